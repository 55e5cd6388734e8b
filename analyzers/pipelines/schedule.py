"""How a pipeline works through its micro-batches: how many, in how many chunks of the model a stage, in which order.

Ranges of micro-batches tell outright, then what the run recorded of its settings. Else the messages do. With p stages,
m micro-batches and v chunks a stage m·v activations pass from each stage to the next, and m·(v-1) from the last stage
back to the first, where the next chunk begins. One forward, one backward (1F1B) keeps at most p-s micro-batches on
stage s that are not yet on their way back; with all forwards first (GPipe) it is all of them (Narayanan et al., SC'21).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.pipelines.links import Links, read_links
from perfscope.analyzers.pipelines.messages import PipelineMessages
from perfscope.analyzers.pipelines.passes import FORWARD, WEIGHTS, Passes
from perfscope.analyzers.pipelines.stages import Placement
from perfscope.metadata import RunMetadata
from perfscope.trace import NONE

UNKNOWN: Final = "unknown"

_NAMES: Final = {
    # Classes of torch.distributed.pipelining, and what collectors call those of others.
    "Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe", "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "interleaved", "ScheduleInterleavedZeroBubble": "zero_bubble",
    "ScheduleZBVZeroBubble": "zero_bubble", "ScheduleDualPipeV": "zero_bubble",
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved",
}  # fmt: skip

_LONGER: Final = 1.7
"""How many times a forward the last stage computes, from which there was a backward in it too (two to four times)."""


@dataclass(frozen=True)
class Schedule:
    """``microbatches`` of a step, ``chunks`` of the model a stage; None where they cannot be told."""

    name: str = UNKNOWN
    microbatches: int | None = None
    chunks: int | None = None

    @property
    def whole(self) -> bool:
        """Nothing is left to find out."""
        return self.name != UNKNOWN and self.microbatches is not None and self.chunks is not None

    def completed(self, other: Schedule) -> Schedule:
        """What is not known of this one taken from ``other``."""
        return Schedule(
            other.name if self.name == UNKNOWN else self.name,
            other.microbatches if self.microbatches is None else self.microbatches,
            other.chunks if self.chunks is None else self.chunks,
        )


def find_schedule(
    result: Comparison, messages: PipelineMessages, placement: Placement, runs: Mapping[int, RunMetadata]
) -> Schedule:
    """What ranges, settings and messages tell, in this order."""
    found = Schedule()
    sources: tuple[Callable[[], Schedule], ...] = (
        lambda: _by_ranges(result, placement),
        lambda: _by_settings(runs),
        lambda: _by_messages(read_links(result, messages, placement.stage_of), placement.degree),
    )
    for source in sources:
        if not found.whole:
            found = found.completed(source())
    return found


def _by_ranges(result: Comparison, placement: Placement) -> Schedule:
    counts: list[tuple[int, int]] = []
    held: dict[int, int] = {}
    split = False
    for rank, partial in result.partials.items():
        own = partial.passes
        if len(own) == 0 or rank not in placement.stage_of:
            continue
        split |= bool((own.phase == WEIGHTS).any())
        used = partial.steps.indices_of(result.steps)
        for step in used.tolist():
            counts += _counted(own, step)
        held[placement.stage_of[rank]] = max(_most_held(own, step) for step in used.tolist())
    if not counts:
        return Schedule()
    microbatches, chunks = Counter(counts).most_common(1)[0][0]
    name = "zero_bubble" if split else _order(held, placement.degree, microbatches, chunks)
    return Schedule(name, microbatches, chunks)


def _counted(own: Passes, step: int) -> list[tuple[int, int]]:
    """(micro-batches, chunks) of one rank's step; nothing where it has no forward."""
    forward = (own.phase == FORWARD) & (own.step == step)
    numbers = len(np.unique(own.microbatch[forward]))
    if numbers == 0:
        return []
    stages = np.unique(own.stage[forward])
    # Where ranges do not name the stage, each micro-batch's come once for every chunk.
    chunks = len(stages) if stages[0] != NONE else int(forward.sum()) // numbers
    return [(numbers, chunks)]


def _most_held(own: Passes, step: int) -> int:
    """The most micro-batches that were forward and not yet back."""
    mine = (own.step == step) & (own.phase != WEIGHTS)
    return int(np.cumsum(np.where(own.phase[mine] == FORWARD, 1, -1)).max(initial=0))


def _by_settings(runs: Mapping[int, RunMetadata]) -> Schedule:
    for run in runs.values():
        told: dict[str, Any] = run.settings.get("pipeline", {})
        if told:
            return Schedule(
                _NAMES.get(str(told.get("schedule", "")), UNKNOWN),
                _positive(told.get("microbatches")),
                _positive(told.get("virtual_stages")),
            )
    return Schedule()


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _by_messages(links: Links, degree: int | None) -> Schedule:
    if degree is None:
        return Schedule()
    if degree == 2:
        microbatches, chunks = _two_stages(links)
    else:
        microbatches, chunks = _more_stages(links, degree) if links.told else _by_sums(links, degree)
    if microbatches is None or chunks is None:
        return Schedule()
    return Schedule(_order(links.held, degree, microbatches, chunks), microbatches, chunks)


def _more_stages(links: Links, degree: int) -> tuple[int | None, int | None]:
    """m·v activations to the next stage, m·(v-1) from the last to the first."""
    last = degree - 1
    onward = [links.passed[stage, stage + 1] for stage in range(last) if (stage, stage + 1) in links.passed]
    if not onward:
        return None, None
    total = int(median(onward))
    ends_seen = (last, 0) in links.passed or not links.sent.keys().isdisjoint({0, last})
    # In between a stage keeps p-s micro-batches of one chunk; of more chunks it keeps more.
    one_chunk = any(most == degree - stage < total - 1 for stage, most in links.held.items() if stage)
    return _split(total, links.passed.get((last, 0), 0)) if ends_seen or one_chunk else (None, None)


def _by_sums(links: Links, degree: int) -> tuple[int | None, int | None]:
    """The stages at the ends send m·(2v-1) messages, those in between 2·m·v, whoever receives them."""
    ends = [links.sent[stage] for stage in (0, degree - 1) if stage in links.sent]
    between = [count for stage, count in links.sent.items() if 0 < stage < degree - 1]
    if not ends or not between:
        return None, None
    total = int(median(between)) // 2
    return _split(total, int(median(ends)) - total)


def _split(onward: int, around: int) -> tuple[int | None, int | None]:
    """(m, v) by m·v and m·(v-1)."""
    microbatches = onward - around
    fits = microbatches > 0 and onward % microbatches == 0
    return (microbatches, onward // microbatches) if fits else (None, None)


def _two_stages(links: Links) -> tuple[int | None, int | None]:
    """Either stage sends m·(2v-1) messages, so that only what it computes in between tells chunks from micro-batches.

    Without chunks the last stage has been through a backward when it first sends. With them it first sends on what its
    chunks but the last put out, in turns of two micro-batches, or of all (breadth first).
    """
    first, last, count = links.computed.get(0), links.computed.get(1), links.sent.get(0, 0)
    if not first or not last:
        return None, None
    if last[0] >= _LONGER * first[0]:
        return links.passed.get((0, 1)), 1
    forwards = next((place for place, took in enumerate(last) if took >= _LONGER * median(last[:place] or [took])), 0)
    for turns in (2, count - 2 * forwards):
        chunks = forwards // turns + 1 if turns > 0 and forwards % turns == 0 else 1
        if chunks > 1 and count % (2 * chunks - 1) == 0:
            return count // (2 * chunks - 1), chunks
    return None, None


def _order(held: Mapping[int, int], degree: int | None, microbatches: int, chunks: int) -> str:
    """By how many micro-batches each stage keeps that are not on their way back. Receipts may be asked for one ahead:
    stages count first on which one more makes no difference.
    """
    if chunks > 1:
        return "interleaved"
    for ahead in (1, 0):
        for stage, most in sorted(held.items(), reverse=True):
            if degree is not None and microbatches > degree - stage + ahead:
                return "gpipe" if most >= microbatches else "1f1b" if most <= degree - stage + ahead else UNKNOWN
    return UNKNOWN
