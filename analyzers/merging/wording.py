"""What a merged file says in words: titles, and what it does not show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.merging.communication import rank_list
from perfscope.analyzers.merging.view import DEFAULT_LANES, Windows
from perfscope.analyzers.whole import Whole
from perfscope.summary import Summary


@dataclass(frozen=True, eq=False)
class Shown:
    """What a file shows."""

    ranks: tuple[int, ...]
    windows: Windows
    zero_ns: int
    lanes: frozenset[str]


def job_title(summary: Summary) -> str:
    """The job in one line."""
    job = summary.job
    strategy = job.strategy if isinstance(job.strategy, str) else "+".join(job.strategy)
    size = job.world_size or len(job.ranks)
    return f"{size} {'rank' if size == 1 else 'ranks'}, {strategy}, {job.step_time_us / 1e3:.4g} ms a step"


def rank_title(whole: Whole, rank: int) -> str:
    """A rank with its host and device. Numbers have as many digits as the largest, so that names sort like ranks."""
    result = whole.compared.result
    digits = len(str(max(result.partials)))
    devices = result.partials[rank].devices
    more = [result.hosts.names.get(rank, ""), devices[0].name if devices else ""]
    return ", ".join([f"rank {rank:0{digits}}", *(text for text in more if text)])


def rank_summary(summary: Summary, rank: int) -> str:
    """Where a rank's step goes, the largest parts first."""
    row = next(row for row in summary.accounting if row.rank == rank)
    parts = sorted(row.rows().items(), key=lambda part: -part[1])
    told = ", ".join(f"{name} {us / 1e3:.4g} ms" for name, us in parts if us > 0.005 * row.step_time_us)
    return f"Step {row.step_time_us / 1e3:.4g} ms: {told}."


def is_marked(result: Comparison) -> bool:
    """Does something in the recording mark steps? Otherwise the whole of it is one."""
    return all(partial.steps.marked for partial in result.partials.values())


def step_name(result: Comparison, number: int) -> str:
    """What a step is called."""
    return f"step {number}" if is_marked(result) else "the whole recording"


def steps_shown(result: Comparison, windows: Windows, zero_ns: int) -> tuple[int, ...]:
    """Numbers of the used steps that lie in the time shown on some rank; none where nothing marks steps."""
    if not is_marked(result):
        return ()
    found = np.zeros(len(result.steps), dtype=np.bool_)
    for rank, edges in result.windows.items():
        start, end = (result.clocks.to_common(rank, edge) - zero_ns for edge in edges)
        middle = start + (end - start) // 2
        found |= windows.shows(middle, middle)
    return tuple(result.steps[found].tolist())


def what_is_left_out(whole: Whole, shown: Shown) -> list[str]:
    """A sentence each for ranks, steps and lanes that the file does not show, and for clocks that are not aligned."""
    result = whole.compared.result
    sentences = []
    ranks = sorted(set(result.partials) - set(shown.ranks))
    if ranks:
        sentences.append(
            f"{len(ranks)} of {len(result.partials)} ranks are left out: {rank_list(ranks)}. --ranks names others."
        )
    whole_steps = steps_shown(result, shown.windows, shown.zero_ns)
    steps = sorted(set(result.steps.tolist()) - set(whole_steps))
    if steps and is_marked(result) and not whole_steps:
        sentences.append("Less than half of any step is shown: a longer --window, or --steps, shows more.")
    elif steps and is_marked(result):
        sentences.append(
            f"{len(steps)} of {len(result.steps)} steps are left out: {rank_list(steps)}. --steps names others."
        )
    lanes = [lane for lane in DEFAULT_LANES if lane not in shown.lanes]
    if lanes:
        sentences.append(f"Lanes left out: {', '.join(lanes)}.")
    clocks = result.clocks
    astray = sorted(set(clocks.ranks[~clocks.aligned].tolist()) & set(shown.ranks))
    if astray:
        sentences.append(
            f"Ranks {rank_list(astray)} share no collective with the others: they are shown on their own clocks."
        )
    sentences += [f"Rank {each.rank}: {each.error}" for each in whole.summary.job.failures if each.rank is not None]
    return sentences
