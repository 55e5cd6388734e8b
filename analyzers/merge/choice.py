"""Chooses the ranks, the steps and the time window to show: few by default, so that the file stays small."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.lanes import typical_step
from perfscope.analyzers.merge.rank_view import Windows
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.errors import UnusableInput
from perfscope.results.attribution import attributed_ranks
from perfscope.results.categories import TimeCategory
from perfscope.results.summary import Summary
from perfscope.text import rank_list

MOST_RANKS: Final = 8
"""Ranks shown by default: as many as a screen holds with their lanes open."""

MOST_STEPS: Final = 2
"""Steps shown by default: a typical one and the longest."""

_STRAGGLERS: Final = 3
_WAITING: Final = 2

_SPAN: Final = re.compile(r"^(\d+)(?:-(\d+))?$")
_TIME: Final = re.compile(r"^(\d+(?:\.\d+)?)(s|ms|us)?$")
_UNITS: Final = {"s": 10**9, "ms": 10**6, "us": 10**3, None: 10**6}


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """``0,3-7`` as numbers, ascending. Raises UnusableInput, naming the option."""
    numbers: set[int] = set()
    for part in text.split(","):
        span = _SPAN.match(part.strip())
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise UnusableInput(f"{option} {text}: write numbers and ranges, such as 0,3-7, or all")
        numbers.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(sorted(numbers))


def parse_window(text: str) -> tuple[int, int]:
    """``120ms-250ms`` as ns; the default unit is ms. Raises UnusableInput."""
    ends = [_TIME.match(part.strip()) for part in text.split("-")]
    if len(ends) == 2 and ends[0] and ends[1]:
        start, end = (round(float(end[1]) * _UNITS[end[2]]) for end in ends if end)
        if start < end:
            return start, end
    raise UnusableInput(f"--window {text}: write start and end, such as 120ms-250ms or 1.5s-2s")


def choose_ranks(requested: str | None, summary: Summary, result: AlignedJob) -> tuple[int, ...]:
    """The ranks to show, the most informative first. Raises UnusableInput where a requested rank does not exist."""
    there = tuple(sorted(result.partials))
    if requested == "all" or (requested is None and len(there) <= MOST_RANKS):
        return informative_ranks(summary, result, len(there))
    if requested is None:
        return informative_ranks(summary, result, MOST_RANKS)
    return requested_numbers(requested, "--ranks", there)


def requested_numbers(text: str, option: str, known: Sequence[int]) -> tuple[int, ...]:
    """The numbers of ``--ranks`` or ``--steps``, ascending. Raises UnusableInput where one is not ``known``."""
    numbers = parse_numbers(text, option)
    missing = sorted(set(numbers) - set(known))
    if missing:
        name = option.strip("-").removesuffix("s")
        raise UnusableInput(
            f"{option} {text}: no {name} {missing[0]} in the recording, which has {name}s {rank_list(known)}"
        )
    return numbers


def informative_ranks(summary: Summary, result: AlignedJob, most: int) -> tuple[int, ...]:
    """Up to ``most`` ranks: stragglers, the ranks that wait longest, the slowest, the median one, then every n-th.

    The median rank is that of the ranks' own time, which is the step without waiting.
    """
    there = sorted(result.partials)
    waited = {rank: int(result.totals[rank][:, TimeCategory.COMM_WAIT].sum()) for rank in there}
    own = {rank: int(result.totals[rank].sum()) - waited[rank] for rank in there}
    by_wait = sorted(there, key=lambda rank: (-waited[rank], rank))
    by_own = sorted(there, key=lambda rank: (own[rank], rank))
    picked = [
        *attributed_ranks(summary.stragglers)[:_STRAGGLERS],
        *by_wait[:_WAITING],
        result.last,
        by_own[len(there) // 2],
        there[0],
    ]
    chosen = list(dict.fromkeys(rank for rank in picked if rank in result.partials))[:most]
    rest = [rank for rank in there if rank not in chosen]
    spread = np.linspace(0, len(rest) - 1, min(most - len(chosen), len(rest))).round().astype(int).tolist()
    return (*chosen, *(rest[place] for place in spread))


def choose_steps(requested: str | None, result: AlignedJob) -> tuple[int, ...]:
    """Indices into the used steps. Raises UnusableInput where a requested step is not used."""
    steps = result.steps.tolist()
    if requested == "all" or (requested is None and len(steps) <= MOST_STEPS):
        return tuple(range(len(steps)))
    if requested is None:
        longest = np.max([end - start for start, end in result.windows.values()], axis=0)
        return tuple(sorted({typical_step(result), int(np.argmax(longest))}))
    return tuple(steps.index(step) for step in requested_numbers(requested, "--steps", steps))


def windows_of_steps(result: AlignedJob, ranks: Iterable[int], places: Sequence[int], zero_ns: int) -> Windows:
    """The time in which any of ``ranks`` is in any of these steps, on its host or its device."""
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
    shown = Intervals.of(first, last)
    return Windows(shown.start_ns, shown.end_ns)


def step_name(result: AlignedJob, number: int) -> str:
    """The name of a step on the tracks."""
    return f"step {number}" if result.is_marked else "the whole recording"


def steps_shown(result: AlignedJob, windows: Windows, zero_ns: int) -> tuple[int, ...]:
    """Numbers of the used steps whose middle is shown on some rank; empty where nothing marks steps."""
    if not result.is_marked:
        return ()
    shown = np.zeros(len(result.steps), dtype=np.bool_)
    for rank, edges in result.windows.items():
        start, end = (result.clocks.to_common(rank, edge) - zero_ns for edge in edges)
        middle = start + (end - start) // 2
        shown |= windows.shows(middle, middle)
    return tuple(result.steps[shown].tolist())
