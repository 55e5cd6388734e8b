"""The timeline of one step: which ranks it shows, and what its entries contain."""

from __future__ import annotations

import dataclasses

from plotly.graph_objects import Figure

from perfscope.reports.figures import timeline
from tests.reports.examples import gpu


def test_the_timeline_shows_stragglers_and_the_longest_waiting_first() -> None:
    summary = gpu()
    made = timeline.timeline_figure(summary)
    assert made is not None
    assert list(Figure(made).layout.meta["lanes"]) == [str(rank) for rank in range(8)]
    waits = {row.rank: row.exposed_comm_wait_us for row in summary.time_breakdown}
    shown = {trace.meta for trace in Figure(made).data if isinstance(trace.meta, int) and trace.visible}
    assert shown == timeline.first_shown(summary)
    assert len(shown) == timeline.SHOWN_FIRST
    assert max(waits, key=waits.__getitem__) in shown
    assert {row.rank for row in summary.stragglers[:2]} <= shown
    places = [place for rank in sorted(shown) for place in Figure(made).layout.meta["lanes"][str(rank)]]
    assert list(Figure(made).layout.yaxis.categoryarray) == places


def test_an_entry_shows_operator_bytes_group_and_wait() -> None:
    made = timeline.timeline_figure(gpu())
    assert made is not None
    compute, wait, transfer = (
        next(trace for trace in Figure(made).data if trace.meta == 2 and trace.legendgroup == kind)
        for kind in ("compute", "wait", "transfer")
    )
    assert compute.customdata[0] == "<b>sm90_xmma_gemm_bf16</b><br>launched by aten::mm<br>290 ms from 0 µs"
    assert compute.customdata[1].startswith("40 short events, busy 25%; the longest:<br>")
    assert list(compute.marker.opacity) == [1.0, 0.3]
    text = "<b>all_gather</b><br>386 MiB<br>group fsdp<br>wait 9.00 ms, transfer 41.0 ms<br>50.0 ms from 100 ms"
    assert (wait.customdata[0], transfer.customdata[0]) == (text, text)
    assert (wait.base[0], wait.x[0]) == (100, 9.002)
    assert (transfer.base[0], transfer.x[0]) == (109.002, 40.998)


def test_a_line_leads_from_the_last_arrival_to_each_rank_that_waits_for_it() -> None:
    """All ranks wait for rank 6: rank 0 from 100 ms for 9 ms."""
    summary = gpu()
    lanes = [
        dataclasses.replace(lane, waited_for=(6,)) if lane.kind == "communication" else lane for lane in summary.lanes
    ]
    made = timeline.timeline_figure(dataclasses.replace(summary, lanes=tuple(lanes)))
    assert made is not None
    links = {tuple(trace.meta): trace for trace in Figure(made).data if trace.legendgroup == "link"}
    assert set(links) == {(6, rank) for rank in range(8) if rank != 6}
    assert list(links[6, 0].x) == [109, 109, None]
    places = [
        next(place for place in Figure(made).layout.meta["lanes"][rank] if "communication" in place) for rank in "60"
    ]
    assert list(links[6, 0].y) == [*places, None]
    shown = timeline.first_shown(summary)
    assert all(trace.visible == (set(ranks) <= shown) for ranks, trace in links.items())
    assert sum(bool(trace.showlegend) for trace in links.values()) == (len(shown & {6}) and 1)
