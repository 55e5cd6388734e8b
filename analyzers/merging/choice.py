"""What of a job is shown: which ranks, which steps, how long a window. Few, so that the file stays small."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.merging.view import Windows
from perfscope.analyzers.strips import typical_step
from perfscope.analyzers.timeline import Row
from perfscope.errors import UnusableInput
from perfscope.summary import Summary

MOST_RANKS: Final = 8
"""Ranks shown unless they are named: as many as a screen holds with their lanes open."""

MOST_STEPS: Final = 2
"""Steps shown unless they are named: a typical one, and the longest."""

_STRAGGLERS: Final = 3
_VICTIMS: Final = 2

_SPAN: Final = re.compile(r"^(\d+)(?:-(\d+))?$")
_TIME: Final = re.compile(r"^(\d+(?:\.\d+)?)(s|ms|us)?$")
_UNITS: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, None: 10**6}


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """``0,3-7`` as numbers, ascending. Raises UnusableInput, naming the option."""
    numbers: set[int] = set()
    for part in text.split(","):
        span = _SPAN.match(part.strip())
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise UnusableInput(f"{option} {text}: write numbers and ranges of them, such as 0,3-7, or all")
        numbers.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(sorted(numbers))


def parse_window(text: str) -> tuple[int, int]:
    """``120ms-250ms`` as ns; without a unit they are ms. Raises UnusableInput."""
    ends = [_TIME.match(part.strip()) for part in text.split("-")]
    if len(ends) == 2 and ends[0] and ends[1]:
        start, end = (round(float(end[1]) * _UNITS[end[2]]) for end in ends if end)
        if start < end:
            return start, end
    raise UnusableInput(f"--window {text}: write from when to when, such as 120ms-250ms or 1.5s-2s")


def choose_ranks(asked: str | None, summary: Summary, result: Comparison) -> tuple[int, ...]:
    """The ranks that are shown, the most telling first. Raises UnusableInput where one asked for is not there."""
    there = tuple(sorted(result.partials))
    if asked == "all" or (asked is None and len(there) <= MOST_RANKS):
        return telling_ranks(summary, result, len(there))
    if asked is None:
        return telling_ranks(summary, result, MOST_RANKS)
    wanted = parse_numbers(asked, "--ranks")
    missing = sorted(set(wanted) - set(there))
    if missing:
        raise UnusableInput(
            f"--ranks {asked}: no rank {missing[0]} in the recording, which has {len(there)} from {there[0]} to "
            f"{there[-1]}"
        )
    return wanted


def telling_ranks(summary: Summary, result: Comparison, most: int) -> tuple[int, ...]:
    """Up to ``most`` ranks: stragglers, who waited longest for them, the slowest, the usual one, then an even choice.

    The usual rank is the one whose own time, the step without waiting, is the median.
    """
    there = sorted(result.partials)
    waited = {rank: int(result.totals[rank][:, Row.COMM_WAIT].sum()) for rank in there}
    own = {rank: int(result.totals[rank].sum()) - waited[rank] for rank in there}
    by_wait = sorted(there, key=lambda rank: (-waited[rank], rank))
    by_own = sorted(there, key=lambda rank: (own[rank], rank))
    picked = [
        *(row.rank for row in summary.stragglers[:_STRAGGLERS]),
        *by_wait[:_VICTIMS],
        result.slowest,
        by_own[len(there) // 2],
        there[0],
    ]
    chosen = list(dict.fromkeys(rank for rank in picked if rank in result.partials))[:most]
    rest = [rank for rank in there if rank not in chosen]
    spread = np.linspace(0, len(rest) - 1, min(most - len(chosen), len(rest))).round().astype(int).tolist()
    return (*chosen, *(rest[place] for place in spread))


def choose_steps(asked: str | None, result: Comparison) -> tuple[int, ...]:
    """Places among the used steps. Raises UnusableInput where a step asked for is not among them."""
    steps = result.steps.tolist()
    if asked == "all" or (asked is None and len(steps) <= MOST_STEPS):
        return tuple(range(len(steps)))
    if asked is None:
        longest = np.max([end - start for start, end in result.windows.values()], axis=0)
        return tuple(sorted({typical_step(result), int(np.argmax(longest))}))
    wanted = parse_numbers(asked, "--steps")
    missing = sorted(set(wanted) - set(steps))
    if missing:
        raise UnusableInput(f"--steps {asked}: no step {missing[0]} in the recording, which has {_spans(steps)}")
    return tuple(steps.index(step) for step in wanted)


def windows_of_steps(result: Comparison, ranks: Iterable[int], places: Sequence[int], zero_ns: int) -> Windows:
    """When any of ``ranks`` was in any of these steps, on its host or its device."""
    spans = []
    for rank in ranks:
        steps = result.partials[rank].steps
        own = steps.indices_of(result.steps)[list(places)]
        start, end = (edges[list(places)] for edges in result.windows[rank])
        # A host may be steps ahead of its device: what it launched for these steps belongs to them.
        start, end = np.minimum(start, steps.host_start_ns[own]), np.maximum(end, steps.host_end_ns[own])
        spans.append([result.clocks.to_common(rank, edge) - zero_ns for edge in (start, end)])
    first = np.min([start for start, _ in spans], axis=0)
    last = np.max([end for _, end in spans], axis=0)
    return _joined(first.tolist(), last.tolist())


def _joined(starts: Sequence[int], ends: Sequence[int]) -> Windows:
    """The union of ranges, as windows."""
    joined: list[list[int]] = []
    for start, end in sorted(zip(starts, ends, strict=True)):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    bounds = np.array(joined, dtype=np.int64)
    return Windows(bounds[:, 0], bounds[:, 1])


def _spans(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} from {numbers[0]} to {numbers[-1]}"
