"""Makes the views of the ranks that are shown, from what their comparison found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfscope.analyzers.merging.communication import Communications
from perfscope.analyzers.merging.sampled import sampled_counters
from perfscope.analyzers.merging.view import Counter, RankView, Windows
from perfscope.analyzers.merging.wording import rank_summary, rank_title, step_name
from perfscope.analyzers.whole import Whole
from perfscope.clock import Clocks


def rank_views(
    whole: Whole, ranks: Sequence[int], windows: Windows, lanes: frozenset[str], zero_ns: int
) -> list[RankView]:
    """What is to be written of each rank, without the ranks' traces."""
    result = whole.compared.result
    communications = Communications(result, ranks, windows, zero_ns)
    counters = {}
    if "counters" in lanes:
        counters = sampled_counters(
            whole.job, result, dict(whole.compared.runs), whole.summary.system, windows, zero_ns
        )
    return [_view(whole, rank, windows, lanes, zero_ns, communications, counters.get(rank, ())) for rank in ranks]


def _view(
    whole: Whole,
    rank: int,
    windows: Windows,
    lanes: frozenset[str],
    zero_ns: int,
    communications: Communications,
    counters: tuple[Counter, ...],
) -> RankView:
    result = whole.compared.result
    timeline, source = result.timelines[rank], whole.sources[rank]
    clocks = _clock_of(result.clocks, rank)
    start, end = (clocks.to_common(rank, edge) - zero_ns for edge in result.windows[rank])
    shown = windows.shows(start, end)
    steps = {
        step_name(result, number): (begins, ends)
        for number, begins, ends in zip(
            result.steps[shown].tolist(), start[shown].tolist(), end[shown].tolist(), strict=True
        )
    }
    start, end = (clocks.to_common(rank, edge) - zero_ns for edge in (timeline.start_ns, timeline.ends_ns))
    shown = windows.shows(start, end)
    start, end = windows.clipped(start[shown], end[shown])
    return RankView(
        rank=rank,
        path=source.path,
        part=source.part,
        title=rank_title(whole, rank),
        summary=rank_summary(whole.summary, rank),
        windows=windows,
        clocks=clocks,
        zero_ns=zero_ns,
        lanes=lanes,
        steps=steps,
        account_start_ns=start,
        account_end_ns=end,
        account_row=timeline.row[shown],
        communication=communications.of(rank),
        counters=counters,
    )


def _clock_of(clocks: Clocks, rank: int) -> Clocks:
    """One rank's clock alone: what its worker needs of them."""
    place = int(np.searchsorted(clocks.ranks, rank))
    one = slice(place, place + 1)
    return replace(
        clocks,
        ranks=clocks.ranks[one],
        offset_ns=clocks.offset_ns[one],
        residual_ns=clocks.residual_ns[one],
        aligned=clocks.aligned[one],
        drift=clocks.drift[one],
        reference_ns=clocks.reference_ns[one],
    )
