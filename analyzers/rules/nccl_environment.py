"""NCCL's environment: fires when a variable holds NCCL back, or when it moves bytes far below what its links can do.

Variables are reported where communication that nothing hides takes part of the step. Without one, the bus bandwidth of
large collectives is held against the link: inside a host against NVLink, between hosts against 25 Gbit/s Ethernet,
which a machine with such devices hardly has for its network. Sources: NCCL documentation, "Environment Variables"
(``NCCL_ALGO``: "not recommended to be set"); nccl-tests ``doc/PERFORMANCE.md`` for bus bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import environment
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary import CollectiveRow

RULE: Final = "nccl-environment"
SHARE: Final = 0.05
"""Share of the step that exposed transfers must take from which a slow link is named."""
FLOOR: Final = 0.02
"""The same for a variable that is set: the noise floor, because nothing has to be inferred."""
LARGE: Final = 16 << 20
"""Bytes from which a collective's time is its bandwidth: below, latency counts."""
FAR: Final = 0.25
"""Share of the link below which it cannot be in use: rings reach about three quarters of NVLink (230 of 300 GB/s on
A100), and half of that where many kernels compete."""
REACHABLE: Final = 0.75
BETWEEN_HOSTS_GBPS: Final = 3.1
"""25 Gbit/s Ethernet."""

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
    """A variable that holds NCCL back."""

    name: str
    value: str
    why: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Slow:
    """The best that large collectives of one group reach, far below its link."""

    row: CollectiveRow
    link_gbps: float
    link: str
    between_hosts: bool

    @property
    def busbw_gbps(self) -> float:
        """Of the row, which has one."""
        return self.row.busbw_gbps or 0.0


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: hidden communication, another backend, no such variable and links in use."""
    exposed = facts.typical_us("exposed_comm_transfer")
    if not facts.devices or exposed < FLOOR * facts.step_time_us:
        return None
    variables, slow = _variables(facts), _slowest(facts)
    if not variables and (slow is None or exposed < SHARE * facts.step_time_us):
        return None
    share = exposed / facts.step_time_us
    saved = exposed * (1 - slow.busbw_gbps / slow.link_gbps) if slow and not variables else exposed
    return Finding(
        rule=RULE,
        title=_title(variables, slow, share),
        severity=Severity.of_share(saved / facts.step_time_us),
        evidence=_evidence(facts, variables, slow, exposed),
        action=_action(variables, slow),
        confidence=_confidence(facts, variables, slow),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, saved),
        whatif=_whatif(facts, slow),
    )


def _title(variables: tuple[_Variable, ...], slow: _Slow | None, share: float) -> str:
    if variables:
        named = ", ".join(f"{variable.name}={variable.value}" for variable in variables)
        return f"{named} holds NCCL back, and transfers that nothing hides take {share:.0%} of the step"
    assert slow is not None
    return (
        f"NCCL moves {slow.busbw_gbps:.3g} GB/s where {slow.link} has {slow.link_gbps:g}, and transfers that nothing "
        f"hides take {share:.0%} of the step"
    )


def _evidence(
    facts: JobFacts, variables: tuple[_Variable, ...], slow: _Slow | None, exposed: float
) -> tuple[Evidence, ...]:
    rows = [Evidence(what="transfers that nothing hides (median)", value=exposed, unit="us", ranks=facts.ranks)]
    rows += [
        Evidence(what=f"ranks with {each.name}={each.value}", value=len(each.ranks), unit="", ranks=each.ranks)
        for each in variables
    ]
    if slow is not None:
        what = f"bus bandwidth of {slow.row.kind} of {(slow.row.bytes or 0) / 2**20:.0f} MiB"
        rows.append(Evidence(what=what, value=slow.busbw_gbps, unit="GB/s", ranks=slow.row.ranks))
        rows.append(Evidence(what=f"{slow.link}, one direction", value=slow.link_gbps, unit="GB/s"))
    return tuple(rows)


def _action(variables: tuple[_Variable, ...], slow: _Slow | None) -> Action:
    if variables:
        how = "\n".join(f"unset {variable.name}: {variable.why}" for variable in variables)
        return Action(setting=variables[0].name, old=variables[0].value, new=None, how=how)
    assert slow is not None
    how = _BETWEEN if slow.between_hosts else _INSIDE
    return Action(setting="NCCL's transport", old=f"{slow.busbw_gbps:.3g} GB/s", new=None, how=how)


def _confidence(facts: JobFacts, variables: tuple[_Variable, ...], slow: _Slow | None) -> Confidence:
    """What lies between hosts is not known: there, a pace alone is a hint."""
    guessed = not variables and slow is not None and slow.between_hosts
    return Confidence.LOW if facts.few_steps or guessed else Confidence.MEDIUM


def _whatif(facts: JobFacts, slow: _Slow | None) -> dict[str, str]:
    """The link as it can be, where all that the job sends goes over it."""
    if slow is None or slow.between_hosts or any(group.across_hosts is not False for group in facts.groups):
        return {}
    return {"network.bandwidth": f"{REACHABLE * slow.link_gbps / slow.busbw_gbps:.3g}x"}


_INSIDE: Final = (
    "Run once with NCCL_DEBUG=INFO and look at how channels connect: 'via P2P' is NVLink or PCIe, 'via SHM' and "
    "'via NET' are detours. nvidia-smi topo -m must show NV# between the devices; containers need --ipc=host (or a "
    "large --shm-size) and all devices visible; PCIe ACS and the IOMMU keep peers apart."
)
_BETWEEN: Final = (
    "Run once with NCCL_DEBUG=INFO: 'NET/Socket' where 'NET/IB' was expected means that NCCL found no InfiniBand or "
    "RoCE. Look at ibstat, give the container /dev/infiniband and unlimited locked memory, and name the adapters "
    "(NCCL_IB_HCA=mlx5); on Ethernet name the fast interface (NCCL_SOCKET_IFNAME), on a cloud install its plugin."
)

_ON: Final = ("1", "true", "yes", "on")


def _on(value: str) -> bool:
    return value.lower() in _ON


def _any(value: str) -> bool:
    return bool(value)


def _few(value: str) -> bool:
    return value.isdecimal() and int(value) < 4


_HOLD_BACK: Final[tuple[tuple[str, Callable[[str], bool], bool, str], ...]] = (
    ("NCCL_P2P_DISABLE", _on, False, "devices of a host talk through its memory in the place of NVLink or PCIe."),
    ("NCCL_SHM_DISABLE", _on, False, "devices without a direct path talk through the network in the place of memory."),
    ("NCCL_IB_DISABLE", _on, True, "hosts talk over TCP sockets in the place of InfiniBand or RoCE."),
    ("NCCL_NET", lambda value: value.lower() == "socket", True, "hosts talk over TCP sockets."),
    ("NCCL_NVLS_ENABLE", lambda value: value == "0", False, "NVLink switches reduce nothing."),
    ("NCCL_ALGO", _any, False, "NCCL chooses the algorithm by size and topology; this takes the choice away."),
    ("NCCL_PROTO", _any, False, "NCCL chooses the protocol by size; LL halves the bandwidth of large messages."),
    ("NCCL_MAX_NCHANNELS", _few, False, "few channels, little bandwidth."),
    ("NCCL_MAX_CTAS", _few, False, "few thread blocks, little bandwidth."),
    ("TORCH_NCCL_BLOCKING_WAIT", _on, False, "the host blocks in every wait, so nothing is queued behind it."),
    ("NCCL_BLOCKING_WAIT", _on, False, "the host blocks in every wait, so nothing is queued behind it."),
    ("NCCL_DEBUG", lambda value: value.upper() == "INFO", False, "left from looking into something; it writes lines."),
)  # fmt: skip
"""(variable, does its value hold NCCL back, only between hosts, why)."""


def _variables(facts: JobFacts) -> tuple[_Variable, ...]:
    """Those that are set; NCCL_DEBUG=INFO alone costs next to nothing and is only told beside others."""
    hosts = {run.host for run in facts.runs.values()}
    recorded = environment(facts)
    found = [
        _Variable(name, value, why, ranks)
        for name, holds, between, why in _HOLD_BACK
        if not between or len(hosts) > 1
        for value, ranks in recorded.get(name, {}).items()
        if holds(value.strip())
    ]
    return tuple(found) if any(variable.name != "NCCL_DEBUG" for variable in found) else ()


def _slowest(facts: JobFacts) -> _Slow | None:
    """The group furthest below its link; None where all use it, or nothing large was moved."""
    across = {group.name: group.across_hosts for group in facts.groups}
    best: dict[str, CollectiveRow] = {}
    for row in facts.collectives:
        if (row.bytes or 0) < LARGE or not row.busbw_gbps or not row.complete or row.kind in ("send", "recv"):
            continue
        if row.group not in best or row.busbw_gbps > (best[row.group].busbw_gbps or 0.0):
            best[row.group] = row
    slow = [found for name, row in best.items() if (found := _against_link(facts, row, across.get(name)))]
    return min(slow, key=lambda found: found.busbw_gbps / found.link_gbps, default=None)


def _against_link(facts: JobFacts, row: CollectiveRow, across_hosts: bool | None) -> _Slow | None:
    nvlink = [
        next((gbps for pattern, gbps in _NVLINK_GBPS if pattern.search(device)), None) for device in facts.devices
    ]
    if len(nvlink) != 1 or nvlink[0] is None or across_hosts is None or row.busbw_gbps is None:
        return None
    if across_hosts:
        slow = row.busbw_gbps < BETWEEN_HOSTS_GBPS
        return _Slow(row, 4 * BETWEEN_HOSTS_GBPS, "one adapter of 100 Gbit/s", between_hosts=True) if slow else None
    return _Slow(row, nvlink[0], "NVLink", between_hosts=False) if row.busbw_gbps < FAR * nvlink[0] else None
