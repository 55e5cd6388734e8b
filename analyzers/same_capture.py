"""Several traces of one rank: which of them were recorded together with the other ranks', by when they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perfscope.analyzers.rank import RankPartial
from perfscope.captures import TraceSource
from perfscope.summary import Failure

Read = tuple[TraceSource, RankPartial]


def of_one_capture(read: Sequence[Read]) -> tuple[list[Read], list[Failure]]:
    """(traces that belong together, what became of the others): of every rank that has several, those of one time.

    Traces whose steps overlap in time were recorded together, directly or through others. Of several such times the one
    that most ranks have is taken, of equals the last. A rank that has none of it keeps its latest trace. Copies, which
    are of one time too, are left for the caller to see to.
    """
    counts = Counter(_rank(entry) for entry in read)
    counts.pop(None, None)
    if not counts or max(counts.values()) == 1:
        return list(read), []
    times = _times(read)
    chosen = max(range(len(times)), key=lambda index: (len({_rank(read[row]) for row in times[index]}), index))
    time_of = {row: index for index, rows in enumerate(times) for row in rows}
    wanted = {rank: max(_candidates(rank, read, time_of), key=lambda time: (time == chosen, time)) for rank in counts}
    kept, failures = [], []
    for row, (source, partial) in enumerate(read):
        rank = _rank(read[row])
        if rank is None or time_of[row] == wanted[rank]:
            kept.append((source, partial))
        else:
            failures.append(_left_out(source, partial, rank))
    return kept, failures


def _rank(entry: Read) -> int | None:
    source, partial = entry
    return partial.rank if partial.rank is not None else source.named_rank


def _times(read: Sequence[Read]) -> list[list[int]]:
    """Rows of traces that overlap in time, earliest first."""
    windows = sorted(
        (int(partial.steps.host_start_ns[0]), int(partial.steps.host_end_ns[-1]), row)
        for row, (_, partial) in enumerate(read)
    )
    times: list[list[int]] = []
    last_end = None
    for start, end, row in windows:
        if last_end is None or start >= last_end:
            times.append([])
            last_end = end
        times[-1].append(row)
        last_end = max(last_end, end)
    return times


def _candidates(rank: int | None, read: Sequence[Read], time_of: dict[int, int]) -> list[int]:
    return [time_of[row] for row, entry in enumerate(read) if _rank(entry) == rank]


def _left_out(source: TraceSource, partial: RankPartial, rank: int) -> Failure:
    numbers = partial.steps.number
    steps = f" (steps {int(numbers[0])}..{int(numbers[-1])})" if partial.steps.marked else ""
    return Failure(
        rank=rank,
        path=str(source.path),
        error=f"another capture of rank {rank}{steps}, recorded at another time than those analyzed; to see it, put "
        "the captures into folders of their own",
    )
