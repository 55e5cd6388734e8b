"""Losses: categories of the time breakdown beyond compute, which findings are about them, and where to look further."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import Final

from perfscope.analyzers.job.pipelines.table import inherent_bubble_share
from perfscope.analyzers.rank.loop_phases import INSIDE, is_phase
from perfscope.results.categories import BY_ID
from perfscope.results.findings import STRAGGLING_RANK, Finding
from perfscope.results.notes import Note
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares as shares_of

WAIT, _TRANSFER = "exposed_comm_wait", "exposed_comm_transfer"
"""Categories of the time breakdown."""

_OF_PIPELINES: Final = ("pipeline-imbalance", "pipeline-bubble")

_ABOUT: Final = {
    **dict.fromkeys((STRAGGLING_RANK, "uneven-work", "uneven-cpu-time"), (WAIT,)),
    **dict.fromkeys(_OF_PIPELINES, (WAIT, _TRANSFER)),
    **dict.fromkeys(("dataloader-workers", "loader-stalls"), ("idle_dataloader",)),
    "slow-sampler": ("idle_dataloader", "idle_host"),
    "recompilation": ("idle_host",),
    **dict.fromkeys(("pinned-memory", "batch-copies"), ("exposed_copy",)),
    "offload": ("exposed_copy", "idle_host"),
    **dict.fromkeys(("launch-bound", "batch-size", "debug-settings"), ("idle_launch",)),
    **dict.fromkeys(("garbage-collection", "cpu-contention", "cpu-oversubscription"), ("idle_host", "idle_launch")),
    "host-pauses": ("idle_host",),
    "checkpoint-saving": ("idle_host",),
    "host-syncs": ("idle_sync",),
    **dict.fromkeys(("small-operators", "loop-work"), ("idle_launch", "idle_host")),
    **dict.fromkeys(
        (
            "mixed-precision",
            "double-precision",
            "optimizer-kernels",
            "channels-last",
            "costly-operator",
            "filled-tensors",
        ),
        (),
    ),
}
"""Rule -> the categories that its change shortens; every other rule is about transfers."""

_LOOK: Final = {
    WAIT: "which rank arrives last in the collectives' table, and what it does before in the timeline",
    _TRANSFER: "which collectives take long in the collectives' table, their bandwidth, and what could run meanwhile",
    "exposed_copy": "what is copied in the kernels' table and by which operator; copies from pinned memory with "
    "non_blocking=True overlap compute",
    "idle_dataloader": "what one batch costs in the data loading table, and how many workers load",
    "idle_sync": "which calls block in the timeline's host lane",
    "idle_launch": "which operators launch most kernels in the operators' table",
    "idle_host": "what the host runs between operators; {stacks} names its Python functions",
    "idle_dependency": "which stream's work the kernels wait for in the timeline",
    "idle_unknown": "the notes on what is missing; record host events, and without CUDA graphs",
}
"""Category -> where to look when no fix is known."""

_MOSTLY: Final = 0.5
"""From this share of the host time on, what has a name is the place to look; and of the wait, what ranks wait for."""

_PYTHON_FUNCTION: Final = re.compile(r"^(?P<file>.*\.py)\((?P<line>\d+)\): (?P<name>.*)$")

_FUNCTIONS: Final = 3
"""Ranges and Python functions that are named where none has most of the host time."""
_SOME: Final = 0.1
"""Share of the host time from which one of them is."""

FEW_LAUNCHES: Final = 20
"""Least launches per step of a job that launches can limit where each waits for long: idle time with fewer is one slow
call (an allocation, a kernel that is compiled or loaded at its first use), which is another problem."""

SLOW_LAUNCH_US: Final = 100.0
"""Idle time per launch up to which hosts launch as usual: an operator with its launch takes 5 to 50 µs, and about twice
as much under the profiler."""

_FIRST_USE: Final = (
    "look at the longest calls in the timeline's host lane: single slow calls limit a step with so few launches, as "
    "when a kernel is compiled or loaded at its first use; record steps after a warm-up"
)

_COMPILED: Final = ("Torch-Compiled Region", "TorchDynamo", "CompiledFunction")
"""What operators of compiled models begin with."""

_COMPILING: Final = (
    "look at later steps: the model is compiled (torch.compile), which takes long in the first ones; "
    "TORCH_LOGS=recompiles names what is compiled again"
)

_UNSIZED: Final = (
    "look at the transport that NCCL uses (NCCL_DEBUG=INFO names NVLink, InfiniBand or sockets); sizes of collectives, "
    "which perfscope run records, would show their bandwidth"
)

_ALL_RANKS: Final = "record all ranks to tell waiting from transfers"
_NAME_PEERS: Final = (
    "who waits for whom is not recorded, so waiting cannot be told from transfers. Record with torch.profiler "
    "(perfscope run does): since PyTorch 2.5 its traces name the ranks that take part in a collective, and both ends "
    "of a message"
)


def losses(summary: Summary) -> tuple[dict[str, float], float]:
    """(Category beyond compute -> its share of all ranks' time without the pipeline's inherent bubble, compute's).
    Without the wait for a rank that is slow only while it is profiled.
    """
    shares = shares_of(summary.time_breakdown)
    compute = shares.pop("compute")
    effect = profiling_effect(summary)
    if effect is not None:
        shares[WAIT] = max(shares[WAIT] - effect.values["share"], 0.0)
    inherent = inherent_bubble_share(summary.pipeline) if summary.pipeline is not None else 0.0
    for category in (WAIT, _TRANSFER):  # without its neighbours a rank seems to transfer
        part = min(shares[category], inherent)
        shares[category] -= part
        inherent -= part
    return shares, compute


def profiling_effect(summary: Summary) -> Note | None:
    """The note on a rank that is slow in the recorded steps alone; None without."""
    return next((note for note in summary.notes if note.kind in ("profiling_effect", "recorded_steps_alone")), None)


def largest(shares: dict[str, float], summary: Summary, treated: Collection[Finding] = ()) -> tuple[str, float]:
    """The category with the largest share of those that none of the findings ``treated`` is about."""
    about = _categories(summary, treated)
    return max(((name, share) for name, share in shares.items() if name not in about), key=lambda item: item[1])


def _categories(summary: Summary, treated: Collection[Finding]) -> set[str]:
    """What these findings are about: of a straggler whose links are slow, transfers, too."""
    about = {category for finding in treated for category in _about(finding.rule, summary)}
    slow_links = any(row.cause == "communication" for row in summary.stragglers)
    stragglers = any(finding.rule == STRAGGLING_RANK for finding in treated)
    return about | {_TRANSFER} if slow_links and stragglers else about


def _about(rule: str, summary: Summary) -> tuple[str, ...]:
    """What one rule's findings are about. Beside its bubble, transfers of a pipeline are as long as what it sends."""
    pipeline = summary.pipeline
    if rule in _OF_PIPELINES and pipeline is not None and losses(summary)[0][_TRANSFER] > pipeline.bubble_share:
        return (WAIT,)
    return _ABOUT.get(rule, (_TRANSFER,))


def waits_for(summary: Summary, treated: Collection[Finding]) -> bool:
    """Do ranks wait mostly for others that do what these findings are about? The critical path goes through each wait
    to the rank that was waited for: what is lost to both is what it holds of their categories.
    """
    about = _categories(summary, treated)
    shares = shares_of(summary.time_breakdown)
    path = summary.critical_path or ()
    on_path = sum(row.us for row in path if row.category in about) / max(sum(row.us for row in path), 1.0)
    return on_path >= sum(shares[category] for category in about) + _MOSTLY * shares[WAIT]


def in_words(category: str, share: float, summary: Summary) -> str:
    """What a category is called in a sentence."""
    if category == WAIT and summary.pipeline is not None:
        pipeline = summary.pipeline
        if pipeline.bubble_share - inherent_bubble_share(pipeline) >= share / 2:
            return "waiting for other stages of the pipeline"
    if category == _TRANSFER and is_bound(summary):
        whom = "ranks that are not in the recording" if summary.job.may_lack_ranks else "other ranks"
        return f"communication, which may be waiting for {whom}"
    if category == "idle_unknown" and _has_unlisted_graphs(summary):
        return "unknown: CUDA graphs ran whose kernels are not in the recording"
    named = named_host(summary) if category == "idle_host" else ""
    return f"{BY_ID[category].phrase}, mostly in {named}" if named else BY_ID[category].phrase


def where_to_look(category: str, summary: Summary) -> str:
    """What shows more about a loss that no fix is known for."""
    if category in (WAIT, _TRANSFER) and is_bound(summary):
        return _ALL_RANKS if summary.job.may_lack_ranks else _NAME_PEERS
    named = named_host(summary) if category == "idle_host" else ""
    recorder = "perfscope run --stacks" if summary.job.command else "with_stack=True"
    if named in INSIDE:
        return (
            f"look at what Python runs in {named} outside its operators (hooks, conversions, waiting for a file or a "
            f"lock); {recorder} names its functions"
        )
    if named:
        return f"look at what {named} does, and whether it can run in DataLoader workers or while the model computes"
    if category == "idle_unknown" and _has_unlisted_graphs(summary):
        return "record the graphs' kernels: nsys profile --cuda-graph-trace=node, or once without graphs"
    if category in ("idle_launch", "idle_host") and _compiles(summary):
        return _COMPILING
    if category == "idle_launch" and launches_few(summary):
        return _FIRST_USE
    if category == "idle_host" and not summary.operators:
        return "look at what the host does then: record its operators too (ProfilerActivity.CPU; perfscope run does)"
    if category == _TRANSFER and _is_unsized(summary):
        return _UNSIZED
    if category == "idle_host" and (places := _places(summary)):
        return f"look at what the host runs between operators, most of it in these {places}"
    return f"look at {_LOOK[category].format(stacks=recorder)}"


def _has_unlisted_graphs(summary: Summary) -> bool:
    """Were CUDA graphs launched whose kernels are not in the recording?"""
    return any(note.kind == "graphs_unlisted" for note in summary.notes)


def _is_unsized(summary: Summary) -> bool:
    """Do devices communicate, and nothing says how much?"""
    rows = summary.collectives
    return bool(rows) and "CPU" not in summary.job.devices and not any(row.bytes for row in rows)


def launches_few(summary: Summary) -> bool:
    """Do steps launch so little, and wait so long for it, that idle time is of single slow calls? Without recorded
    calls, one for each kernel or copy, at most.
    """
    launched = [row.launches_per_step for row in summary.launches]
    most = max(launched, default=sum(row.count_per_step for row in summary.kernels))
    waited_us = max((row.idle_launch_us for row in summary.time_breakdown), default=0.0)
    return most < FEW_LAUNCHES and waited_us > most * SLOW_LAUNCH_US


def _compiles(summary: Summary) -> bool:
    """Is it likely that a lone step was spent in compiling, as the first steps of a compiled model are?"""
    return len(summary.job.steps) <= 1 and any(row.name.startswith(_COMPILED) for row in summary.operators)


def named_host(summary: Summary) -> str:
    """What most of all ranks' host time is spent in, where that has a name; empty otherwise."""
    total = sum(row.idle_host_us for row in summary.time_breakdown)
    name, time = max(_named_us(summary).items(), key=lambda item: item[1], default=("", 0.0))
    if time < _MOSTLY * total or not time:
        return ""
    return host_work(name)


def _named_us(summary: Summary) -> Counter[str]:
    """All ranks' host time by its names."""
    named: Counter[str] = Counter()
    for row in summary.time_breakdown:
        named.update(row.named_host_us)
    return named


def _places(summary: Summary) -> str:
    """The Python functions with most of the host time, or without any the ranges; those with little of it left out.
    Phases of the loop are neither. Empty without.
    """
    total = sum(row.idle_host_us for row in summary.time_breakdown)
    named = {name: us for name, us in _named_us(summary).items() if not is_phase(name) and us >= _SOME * total}
    functions = {name: us for name, us in named.items() if _PYTHON_FUNCTION.match(name)}
    places = Counter(functions or named).most_common(_FUNCTIONS)
    what = "Python functions" if functions else "ranges"
    return f"{what}: {', '.join(host_work(name) for name, _ in places)}" if places else ""


def host_work(name: str) -> str:
    """Named host work inside a sentence: a Python function by its name and place."""
    found = _PYTHON_FUNCTION.match(name)
    return f"{found['name']} ({found['file']}:{found['line']})" if found else name


def is_bound(summary: Summary) -> bool:
    """Is there a rank whose waiting cannot be told from its transfers?"""
    return any(entry.wait_is_bound for entry in summary.time_breakdown)
