"""What the pictures of the step, the run, what-if and communication hold, and what their captions say."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from perfscope.reports import advice, communication, curves, overview, page, path, run_history, timeline
from perfscope.reports.definitions import DEFINITIONS
from perfscope.summary import PathRow
from perfscope.summary_tables import GroupRow
from tests.reports import pictures
from tests.reports.examples import EXAMPLES, gpu, healthy, large, starved, straggler


def test_the_timeline_shows_the_blamed_and_the_longest_waiting_first() -> None:
    summary = gpu()
    made = timeline.timeline_chart(summary)
    assert made is not None
    assert [row["rank"] for row in made["ranks"]] == list(range(8))
    waits = {row.rank: row.exposed_comm_wait_us for row in summary.accounting}
    shown = {row["rank"] for row in made["ranks"] if row["shown"]}
    assert len(shown) == timeline.SHOWN_FIRST
    assert max(waits, key=waits.__getitem__) in shown
    assert {row.rank for row in summary.stragglers[:2]} <= shown


def test_a_lane_tells_operator_bytes_group_and_wait() -> None:
    made = timeline.timeline_chart(gpu())
    assert made is not None
    compute, collective, _ = made["ranks"][2]["lanes"]
    texts = made["texts"]
    assert texts[compute["operator"][0]] == "aten::mm"
    assert (compute["pieces"], compute["busy"]) == ([1, 40], [1.0, 0.25])
    assert texts[collective["group"][0]] == "fsdp"
    assert (collective["bytes"], collective["wait"]) == (["386 MiB"], [9.002])
    assert made["unit"] == "ms"


def test_the_timeline_says_which_collective_is_longest_and_splits_it() -> None:
    reading = timeline.timeline_reading(gpu())
    assert "step 17" in reading
    assert "all-gather of 386 MiB" in reading
    assert "of waiting" in reading


def test_a_curve_names_the_best_value_and_what_it_brings() -> None:
    (curve,) = curves.curves(dataclasses.replace(gpu(), curves=pictures.curves()))
    assert curve.reading == (
        "Here 4 workers is best, with 412 ms a step; set now: 1 worker with 455 ms, so that the best does 10% more "
        "steps a second."
    )
    (row,) = pictures.curves()
    unset, best = (dataclasses.replace(row, current=current) for current in (None, 4))
    assert "not recorded" in curves.curves(dataclasses.replace(gpu(), curves=(unset,)))[0].reading
    assert "as good as any" in curves.curves(dataclasses.replace(gpu(), curves=(best,)))[0].reading


def test_a_default_that_is_not_the_least_is_not_called_best() -> None:
    (row,) = pictures.curves()
    least = min(row.points, key=lambda point: point.mid_us)
    other = next(point.value for point in row.points if point.mid_us > least.mid_us)
    kept = dataclasses.replace(row, current=None, best=other)
    assert "no value saves 2% over" in curves.curves(dataclasses.replace(gpu(), curves=(kept,)))[0].reading


@pytest.mark.parametrize("name", EXAMPLES)
def test_arrivals_and_overlap_add_up(name: str) -> None:
    summary = EXAMPLES[name]()
    arrivals = communication.arrivals_chart(summary)
    if arrivals is not None:
        shares = [part for series in arrivals["series"] for part in series["share"]]
        assert math.fsum(shares) == pytest.approx(1.0, abs=0.01)
    overlap = communication.overlap_chart(summary)
    if overlap is not None:
        size = {"µs": 1.0, "ms": 1e3, "s": 1e6}[overlap["unit"]]
        whole = [sum(parts) for parts in zip(overlap["hidden"], overlap["wait"], overlap["transfer"], strict=True)]
        expected = [row.comm_us / size for row in summary.accounting if row.comm_us > 0]
        assert whole == pytest.approx(expected, rel=1e-3)


def test_who_arrives_last_is_named_only_where_it_stands_out() -> None:
    assert "rank 2 comes last" in communication.arrivals_reading(straggler())
    assert "the others wait for it" in communication.arrivals_reading(straggler())
    even = dataclasses.replace(healthy().collectives[0], last_arriver={0: 0.5, 1: 0.5})
    assert "no rank stands out" in communication.arrivals_reading(dataclasses.replace(healthy(), collectives=(even,)))


def test_of_many_groups_those_of_one_role_are_one_colour() -> None:
    row = dataclasses.replace(healthy().collectives[0], ranks=(0, 1), last_arriver={0: 0.5, 1: 0.5})
    names = [f"group {number}" for number in range(communication.GROUPS_SHOWN + 1)]
    groups = tuple(
        GroupRow(name=name, ranks=(0, 1), role="tensor", role_from="its name", comm_us=1.0, across_hosts=None)
        for name in names
    )
    many = tuple(dataclasses.replace(row, group=name) for name in names)
    made = communication.arrivals_chart(dataclasses.replace(healthy(), collectives=many, groups=groups))
    assert made is not None
    assert [series["name"] for series in made["series"]] == ["tensor groups"]


def test_the_path_of_many_ranks_keeps_all_of_its_time() -> None:
    rows = tuple(PathRow(rank=rank, category="compute", us=1000.0 + rank) for rank in range(20))
    summary = dataclasses.replace(straggler(), critical_path=rows)
    made = path.path_chart(summary)
    assert made is not None
    assert len(made["rows"]) == path.RANKS_SHOWN + 1
    assert made["rows"][-1] == "12 others"
    size = {"µs": 1.0, "ms": 1e3}[made["unit"]]
    assert math.fsum(made["values"]["compute"]) * size == pytest.approx(sum(one.us for one in rows), rel=1e-3)


def test_the_run_that_slowed_down_and_its_outlier_are_told() -> None:
    summary = dataclasses.replace(gpu(), history=pictures.history())
    reading = run_history.history_reading(summary)
    assert "the last tenth of the run was 10% slower than the first" in reading
    assert "step 412 with 1.30 s, in dataloader on rank 0" in reading
    table = run_history.outlier_table(summary)
    assert table is not None
    assert [cell.text for cell in table.rows[0]] == ["412", "1.300", "3.10×", "dataloader", "0", "ranks 0, 1"]
    assert "The last tenth of the run was 10% slower" in overview.since(summary)


def test_since_when_counts_the_steps_that_were_held_up() -> None:
    summary = straggler()
    every, some = summary.job.steps, summary.job.steps[2:5]
    row = summary.stragglers[0]
    finding = dataclasses.replace(summary.findings[0], rule="straggling-rank")

    def since(steps: tuple[int, ...]) -> str:
        stragglers = (dataclasses.replace(row, steps=steps),)
        return overview.since(dataclasses.replace(summary, stragglers=stragglers, findings=(finding,)))

    assert since(every).startswith("In every recorded step")
    assert since(some) == f"In 3 of {len(every)} recorded steps, first in step {some[0]}, last in step {some[-1]}."
    assert overview.since(healthy()) == ""


def test_throughput_counts_every_ranks_batches_outside_the_recording() -> None:
    summary = starved()
    job = dataclasses.replace(summary.job, batches_per_step=2.0, batch_shape=(16, 128), unprofiled_step_us=100_000.0)

    def tiles(**changes: object) -> dict[str, overview.Tile]:
        changed = dataclasses.replace(summary, job=dataclasses.replace(job, **changes))
        return {tile.label: tile for tile in overview.tiles(changed)}

    ranks = job.world_size or 0
    told = tiles()["Samples a second"]
    assert told.value == f"{16 * 2 * ranks / 0.1:,.0f}"
    assert f"{16 * 2 * ranks} a step of 100 ms, 32 on each rank" in told.detail
    assert "Samples a second" not in tiles(strategy=("ddp", "tensor"))
    assert "Samples a second" not in tiles(batches_per_step=None)


def test_money_is_a_tile_and_stands_with_each_finding() -> None:
    summary = gpu()
    (tile,) = (tile for tile in overview.tiles(summary) if tile.definition == "cost")
    assert tile.value == "480 USD"
    assert "31.5 USD a day can be saved" in tile.detail
    assert [card.saving for card in advice.cards(summary)][:2] == [
        "at most 48.0 USD a day",
        "31.5 USD a day (between 28.0 and 33.0)",
    ]


def test_a_card_shows_now_predicted_and_at_best_to_scale() -> None:
    (card, *_) = advice.cards(straggler())
    now, *others = card.lengths
    assert (now.kind, now.width) == ("now", 100.0)
    step = straggler().job.step_time_us
    predicted = straggler().findings[0].predicted_step_us
    assert predicted is not None
    by_kind = {length.kind: length for length in others}
    assert by_kind["predicted"].width == pytest.approx(100 * predicted["mid"] / step)
    assert by_kind["predicted"].low == pytest.approx(100 * predicted["low"] / step)
    assert all(length.definition in DEFINITIONS for length in card.lengths)


def test_what_to_type_survives_a_shell() -> None:
    command = advice.whatif_command({"rank.3": "peers", "ddp.comm_dtype": "$(rm -rf ~)"}, "my traces; ls")
    assert command == "perfscope whatif 'my traces; ls' --set rank.3=peers --set 'ddp.comm_dtype=$(rm -rf ~)'"
    assert advice.whatif_command({}, "x") == ""


@pytest.mark.parametrize("hostile", ["</script><script>alert(1)</script>", "k" * 10_000, "\u202eabc", "half \ud800"])
def test_names_in_pictures_are_data(hostile: str) -> None:
    summary = dataclasses.replace(
        gpu(), lanes=pictures.lanes((0, 1), kernel=hostile, group=hostile), history=pictures.history(hostile)
    )
    html = page.render(summary)
    start = html.index('<script type="application/json" id="data">') + len('<script type="application/json" id="data">')
    data = json.loads(html[start : html.index("</script>", start)])
    assert hostile in data["timeline"]["texts"]
    assert data["history"]["outliers"][0]["stage"] == hostile
    assert html.count("<script>alert(1)") == 0


def test_many_ranks_stay_small() -> None:
    assert len(page.render(dataclasses.replace(large(), lanes=pictures.lanes(range(8)))).encode()) < 12e6
