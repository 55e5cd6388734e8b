"""NCCL's environment: fires when a variable limits NCCL, or when collectives run far below the bandwidth of their link.

Variables are reported where exposed transfer takes part of the step. Without one, the bus bandwidth of large
collectives is compared with the link: inside a host NVLink, between hosts 25 Gbit/s Ethernet, which a machine with such
devices hardly has for its network. Where hosts are not recorded, it must be slow for either: below what one adapter of
100 Gbit/s gives. Where one host, rank or link is slower than the others, and a straggler for that, groups that it slows
do not count, and of the others what is left beside it. Sources: NCCL documentation, "Environment Variables"
(``NCCL_ALGO``: "not recommended to be set"); nccl-tests ``doc/PERFORMANCE.md`` for bus bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Final

from perfscope.analyzers.rules.communication.host_backend import on_host
from perfscope.analyzers.rules.context import RuleContext
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.rows import CollectiveRow, StragglerRow
from perfscope.text import byte_size

RULE: Final = "nccl-environment"
SHARE: Final = 0.05
"""Least share of the step of exposed transfer for a finding about a slow link."""
FLOOR: Final = 0.02
"""The same for a variable that is set: the noise floor, because nothing is inferred."""
LARGE: Final = 16 << 20
"""Bytes from which a collective's time is its bandwidth: below, latency counts."""
FAR: Final = 0.25
"""Share of the link below which it cannot be in use: rings reach about three quarters of NVLink (230 of 300 GB/s on
A100), and half of that where many kernels compete."""
REACHABLE: Final = 0.75
_AS_QUICK: Final = 0.75
"""From this part of the bandwidth inside a slow place on it may be the reason why a larger group is as slow."""
BETWEEN_HOSTS_GBPS: Final = 3.1
"""25 Gbit/s Ethernet."""
_ADAPTER_GBPS: Final = 4 * BETWEEN_HOSTS_GBPS
"""100 Gbit/s: hosts of devices with NVLink have at least one such adapter, and most a faster one for each device."""

_NVLINK_GBPS: Final = (
    (re.compile(r"\bV100\b.*SXM"), 150.0),
    (re.compile(r"\bA800\b.*SXM"), 200.0),
    (re.compile(r"\bA100\b.*SXM"), 300.0),
    (re.compile(r"\bH800\b"), 200.0),
    (re.compile(r"\bH[12]00\b(?!.*(PCI|NVL)).*(HBM3|SXM)|\bH200$"), 450.0),
    (re.compile(r"\bG?B200\b"), 900.0),
)
"""Devices with NVLink to all others of a host -> GB/s in one direction, half of what the datasheets add up."""


@dataclass(frozen=True)
class _Variable:
    """A variable that limits NCCL."""

    name: str
    value: str
    why: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Slow:
    """The best bandwidth of large collectives of one group, far below its link's."""

    row: CollectiveRow
    link_gbps: float
    link: str
    between_hosts: bool | None
    """None where hosts are not recorded: then the link is the device's own, and even one adapter is faster."""

    @property
    def busbw_gbps(self) -> float:
        """Of the row, which has one."""
        return self.row.busbw_gbps or 0.0


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: overlapped communication, another backend, or no such variable and no slow link."""
    exposed, variables = job.exposed_transfer_us, _variables(job)
    place = None if variables else _slow_place(job)
    if place is not None:
        exposed = _exposed_elsewhere_us(job, place)
    if not job.info.devices or on_host(job) or exposed < FLOOR * job.step_time_us:
        return None
    slow = _slowest(job, place)
    if not variables and (slow is None or exposed < SHARE * job.step_time_us):
        return None
    # The network between hosts is not known, so a low bandwidth alone is a hint.
    guessed = not variables and slow is not None and slow.between_hosts is not False
    saved = exposed * (1 - slow.busbw_gbps / slow.link_gbps) if slow and not variables else exposed
    return job.finding(
        RULE,
        _title(variables, slow, job.share(exposed)),
        saved,
        evidence=_evidence(job, exposed, variables, slow),
        action=_action(variables, slow),
        confidence=Confidence.LOW if job.info.few_steps or guessed else Confidence.MEDIUM,
        # A quicker network would be quicker at the slow place, too, which is another finding.
        whatif={} if place is not None else _whatif(job, slow),
    )


def _title(variables: tuple[_Variable, ...], slow: _Slow | None, share: float) -> str:
    if variables:
        named = ", ".join(f"{variable.name}={variable.value}" for variable in variables)
        return f"{named} limits NCCL: exposed transfer takes {share:.0%} of the step"
    assert slow is not None
    if slow.between_hosts is None:
        return (
            f"NCCL reaches {slow.busbw_gbps:.3g} GB/s; NVLink has {slow.link_gbps:g} inside a host, one adapter of "
            f"100 Gbit/s {_ADAPTER_GBPS:g} between hosts: exposed transfer takes {share:.0%} of the step"
        )
    return (
        f"NCCL reaches {slow.busbw_gbps:.3g} of {slow.link_gbps:g} GB/s ({slow.link}): exposed transfer takes "
        f"{share:.0%} of the step"
    )


def _evidence(
    job: RuleContext, exposed_us: float, variables: tuple[_Variable, ...], slow: _Slow | None
) -> tuple[Evidence, ...]:
    rows = [replace(job.exposed_transfer(), value=exposed_us)]
    rows += [Evidence(f"ranks with {each.name}={each.value}", len(each.ranks), ranks=each.ranks) for each in variables]
    if slow is not None:
        what = f"bus bandwidth of {slow.row.kind} of {byte_size(slow.row.bytes or 0)}"
        rows.append(Evidence(what, slow.busbw_gbps, "GB/s", slow.row.ranks))
        rows.append(Evidence(f"{slow.link}, one direction", slow.link_gbps, "GB/s"))
        if slow.between_hosts is None:
            rows.append(Evidence("one adapter of 100 Gbit/s, between hosts", _ADAPTER_GBPS, "GB/s"))
    return tuple(rows)


def _action(variables: tuple[_Variable, ...], slow: _Slow | None) -> Action:
    if variables:
        how = code("shell", "\n".join(f"unset {variable.name}  # {variable.why}" for variable in variables))
        return Action(setting=variables[0].name, old=variables[0].value, new=None, how=how)
    assert slow is not None
    hows = {True: _BETWEEN, False: _INSIDE, None: f"{_COMPARE}\nInside a host: {_INSIDE}\nBetween hosts: {_BETWEEN}"}
    how = hows[slow.between_hosts]
    return Action(setting="NCCL's transport", old=f"{slow.busbw_gbps:.3g} GB/s", new=None, how=how)


def _whatif(job: RuleContext, slow: _Slow | None) -> dict[str, str]:
    """The link at the bandwidth that is reachable, where all communication uses it."""
    if slow is None or slow.between_hosts or any(group.across_hosts is not False for group in job.summary.groups):
        return {}
    return {"network.bandwidth": f"{REACHABLE * slow.link_gbps / slow.busbw_gbps:.3g}x"}


_COMPARE: Final = (
    "Find out which transport NCCL uses (NCCL_DEBUG=INFO: NVLink, PCIe, InfiniBand or sockets), and check that "
    "NCCL_IB_DISABLE, NCCL_P2P_DISABLE and NCCL_SHM_DISABLE are not set; all_reduce_perf of nccl-tests shows what the "
    "devices reach without the job."
)
_INSIDE: Final = (
    "Run once with NCCL_DEBUG=INFO and look at how channels connect: 'via P2P' is NVLink or PCIe, 'via SHM' and "
    "'via NET' are slower. nvidia-smi topo -m must show NV# between the devices; containers need --ipc=host (or a "
    "large --shm-size) and all devices visible; PCIe ACS and the IOMMU can disable P2P."
)
_BETWEEN: Final = (
    "Run once with NCCL_DEBUG=INFO: 'NET/Socket' instead of 'NET/IB' means that NCCL found no InfiniBand or "
    "RoCE. Check ibstat, give the container /dev/infiniband and unlimited locked memory, and name the adapters "
    "(NCCL_IB_HCA=mlx5); on Ethernet name the fast interface (NCCL_SOCKET_IFNAME), on a cloud install its plugin."
)


def _on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on")


def _few(value: str) -> bool:
    return value.isdecimal() and int(value) < 4


_LIMITING: Final[tuple[tuple[str, Callable[[str], bool], bool, str], ...]] = (
    ("NCCL_P2P_DISABLE", _on, False, "devices of a host communicate through host memory instead of NVLink or PCIe."),
    ("NCCL_SHM_DISABLE", _on, False, "devices without a direct path use the network instead of host memory."),
    ("NCCL_IB_DISABLE", _on, True, "hosts use TCP sockets instead of InfiniBand or RoCE."),
    ("NCCL_NET", lambda value: value.lower() == "socket", True, "hosts use TCP sockets."),
    ("NCCL_NVLS_ENABLE", lambda value: value == "0", False, "NVLink switches do no reductions."),
    ("NCCL_ALGO", bool, False, "NCCL chooses the algorithm by size and topology; this overrides it."),
    ("NCCL_PROTO", bool, False, "NCCL chooses the protocol by size; LL halves the bandwidth of large messages."),
    ("NCCL_MAX_NCHANNELS", _few, False, "few channels limit the bandwidth."),
    ("NCCL_MAX_CTAS", _few, False, "few thread blocks limit the bandwidth."),
    ("TORCH_NCCL_BLOCKING_WAIT", _on, False, "the host blocks in every wait, so nothing is queued behind it."),
    ("NCCL_BLOCKING_WAIT", _on, False, "the host blocks in every wait, so nothing is queued behind it."),
    ("NCCL_DEBUG", lambda value: value.upper() == "INFO", False, "a debugging setting; it writes log lines."),
)  # fmt: skip
"""(variable, does its value limit NCCL, only between hosts, why)."""


def _variables(job: RuleContext) -> tuple[_Variable, ...]:
    """Those that are set; NCCL_DEBUG=INFO alone costs almost nothing and is only named together with others."""
    hosts = {run.host for run in job.runs.values()}
    variables = [
        _Variable(name, value, why, ranks)
        for name, limits, between, why in _LIMITING
        if not between or len(hosts) > 1
        for value, ranks in job.environment.get(name, {}).items()
        if limits(value.strip())
    ]
    return tuple(variables) if any(variable.name != "NCCL_DEBUG" for variable in variables) else ()


def _slow_place(job: RuleContext) -> StragglerRow | None:
    """The host, rank or link that the job waits for most, where that is by its slow transfers; None where it is not."""
    worst = next(iter(job.summary.stragglers), None)
    slow = worst is not None and worst.cause == "communication" and worst.lost_us >= SHARE * job.step_time_us
    return worst if slow else None


def _exposed_elsewhere_us(job: RuleContext, place: StragglerRow) -> float:
    """Exposed transfer per step, median of the ranks that are not at the slow place; 0 without any."""
    rows = [row for row in job.summary.time_breakdown if row.rank not in place.members]
    return median(row.exposed_comm_transfer_us for row in rows) if rows else 0.0


def _large(job: RuleContext) -> list[CollectiveRow]:
    """The collectives whose time is their bandwidth, where that is known."""
    return [
        row
        for row in job.summary.collectives
        if (row.bytes or 0) >= LARGE and row.busbw_gbps and row.complete and row.kind not in ("send", "recv")
    ]


def _explained(job: RuleContext, place: StragglerRow) -> frozenset[str]:
    """Groups that are slow by the slow place: those inside it, and those of others with it that are about as quick."""
    members, rows = set(place.members), _large(job)
    inside = [row.busbw_gbps or 0.0 for row in rows if members.issuperset(row.ranks)]
    least = _AS_QUICK * min(inside, default=0.0)
    return frozenset(row.group for row in rows if members.intersection(row.ranks) and (row.busbw_gbps or 0.0) >= least)


def _slowest(job: RuleContext, place: StragglerRow | None) -> _Slow | None:
    """The group furthest below its link's bandwidth; None where none is, or there are no large collectives. Without
    those that a slow place explains.
    """
    across = {group.name: group.across_hosts for group in job.summary.groups}
    best: dict[str, CollectiveRow] = {}
    explained = _explained(job, place) if place is not None else ()
    for row in _large(job):
        if row.group in explained:
            continue
        if row.group not in best or (row.busbw_gbps or 0.0) > (best[row.group].busbw_gbps or 0.0):
            best[row.group] = row
    below = [slow for name, row in best.items() if (slow := _against_link(job, row, across.get(name)))]
    return min(below, key=lambda slow: slow.busbw_gbps / slow.link_gbps, default=None)


def _against_link(job: RuleContext, row: CollectiveRow, across_hosts: bool | None) -> _Slow | None:
    nvlink = [
        # MIG instances have no links of their own.
        next((gbps for pattern, gbps in _NVLINK_GBPS if pattern.search(device) and " MIG " not in device), None)
        for device in job.info.devices
    ]
    if len(nvlink) != 1 or nvlink[0] is None or row.busbw_gbps is None:
        return None
    if across_hosts is None:
        slow = row.busbw_gbps < min(_ADAPTER_GBPS, FAR * nvlink[0])
        return _Slow(row, nvlink[0], "NVLink", between_hosts=None) if slow else None
    if across_hosts:
        slow = row.busbw_gbps < BETWEEN_HOSTS_GBPS
        return _Slow(row, _ADAPTER_GBPS, "one adapter of 100 Gbit/s", between_hosts=True) if slow else None
    return _Slow(row, nvlink[0], "NVLink", between_hosts=False) if row.busbw_gbps < FAR * nvlink[0] else None
