"""Step histories on disk: what is written is read, whatever a kill or a full disk made of the file."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.analyzers.history.job_history import job_history, waiting_stages
from perfscope.analyzers.history.rank_history import NEIGHBOURS, RankFile, bin_width, last_step, read, summarize_rank
from perfscope.collectors.capture.history import BLOCK_STEPS, Step, StepHistory
from perfscope.errors import TraceError
from perfscope.recording.history import DISTURBED, STAGES, Block, pack, unpack
from perfscope.recording.job import open_job
from perfscope.recording.metadata import RunMetadata, save
from perfscope.recording.paths import run_file, steps_file
from perfscope.results.history import OTHER
from perfscope.results.history import History as Summary

MS = 1_000_000


def block(first: int, steps: list[int], attempt: int = 0, **stages: list[int]) -> bytes:
    return pack(Block(attempt, first, 1, steps, stages, bytes(len(steps))))


@given(
    st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=50),  # times of three days at most
    st.sets(st.sampled_from(STAGES)),
    st.integers(0, 2**31),
    st.integers(0, 2**40 - 1),
)
def test_a_block_is_read_as_it_was_written(steps: list[int], stages: set[str], attempt: int, first: int) -> None:
    flags = bytes(DISTURBED if step % 2 else 0 for step in steps)
    data = pack(Block(attempt, first, 17, steps, dict.fromkeys(stages, steps[::-1]), flags))
    (found,) = unpack(b"noise" + data + b"more")
    assert (found.attempt, found.first_step, found.began_ns, found.steps) == (attempt, first, 17, len(steps))
    assert (found.stages, found.flags) == (tuple(name for name in STAGES if name in stages), flags)
    columns = np.frombuffer(found.columns, np.uint8).reshape(-1, 8, len(steps))
    values = [[int.from_bytes(bytes(column[:, place]), "little") for place in range(len(steps))] for column in columns]
    assert values == [steps] + [steps[::-1]] * len(stages)


@given(st.data())
def test_damage_costs_only_the_block_that_it_hits(data: st.DataObject) -> None:
    blocks = [block(10 * number, [number] * 10) for number in range(4)]
    whole = b"".join(blocks)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]
    starts = np.cumsum([0, *map(len, blocks)])
    hit = int(np.searchsorted(starts, place, side="right")) - 1
    assert [found.first_step for found in unpack(damaged)] == [10 * number for number in range(4) if number != hit]


@given(st.integers(0, 400))
def test_a_cut_file_gives_up_its_whole_blocks(cut: int) -> None:
    blocks = [block(10 * number, [number] * 10) for number in range(4)]
    whole = b"".join(blocks)
    ends = np.cumsum([len(each) for each in blocks])
    assert len(list(unpack(whole[:cut]))) == int((ends <= cut).sum())


def step(number: int, *, ms: float = 10.0, disturbed: bool = False, **stages: float) -> Step:
    times = tuple(int(stages.get(name, 0.0) * MS) for name in STAGES)
    return Step(number, number * MS, int(ms * MS), times, disturbed)


def write(path: Path, steps: list[Step], attempt: int = 0, measured: tuple[str, ...] = STAGES) -> None:
    history = StepHistory(path, attempt)
    history.measured = frozenset(measured)
    for each in steps:
        history.add(each)
    history.write()


def test_blocks_hold_consecutive_steps_and_no_more_than_they_may(tmp_path: Path) -> None:
    numbers = [*range(3, 3 + BLOCK_STEPS + 5), 2000, 2001, 1]
    write(tmp_path / "steps", [step(number) for number in numbers])
    found = [(each.first_step, each.steps) for each in unpack((tmp_path / "steps").read_bytes())]
    assert found == [(3, BLOCK_STEPS), (3 + BLOCK_STEPS, 5), (2000, 2), (1, 1)]


def test_what_is_not_measured_is_left_out_and_lies_in_other(tmp_path: Path) -> None:
    write(
        tmp_path / "steps", [step(number, optimizer=2.0, forward=3.0) for number in range(5)], measured=("optimizer",)
    )
    steps = read(tmp_path / "steps")
    assert steps.stages == ("optimizer",)
    assert steps.stages_us.tolist() == [[2000.0, 8000.0]] * 5


def test_of_two_steps_of_one_number_the_later_one_holds(tmp_path: Path) -> None:
    write(tmp_path / "steps", [step(0, ms=1), step(1, ms=2), step(0, ms=3)])
    assert read(tmp_path / "steps").step_us.tolist() == [3000.0, 2000.0]


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_is_set_meanwhile_moves_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    now = time.time_ns
    history = StepHistory(tmp_path / "steps", 0)
    for number in range(20):
        history.add(step(number)._replace(began=10 * number * MS))
        if number == 9:
            history.write()
            monkeypatch.setattr(time, "time_ns", lambda: now() + jump_s * 10**9)
    history.write()
    steps = read(tmp_path / "steps")
    assert np.diff(steps.began_ns).tolist() == [10 * MS] * 19


def test_a_day_of_steps_takes_a_few_megabytes(tmp_path: Path) -> None:
    """An hour of it: 36,000 steps with noise, in blocks of two seconds."""
    dice = np.random.default_rng(0)
    history = StepHistory(tmp_path / "steps", 0)
    history.measured = frozenset(STAGES)
    for first in range(0, 36_000, 20):
        for number, (load, forward, backward) in enumerate(dice.normal((5, 30, 60), (0.2, 0.5, 1), (20, 3)), first):
            history.add(step(number, ms=100, dataloader=load, forward=forward, backward=backward, optimizer=2.0))
        history.write()
    assert len(read(tmp_path / "steps").number) == 36_000
    assert 24 * (tmp_path / "steps").stat().st_size < 16 << 20


def test_the_last_attempt_is_read_and_the_earlier_ones_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "steps", [step(number) for number in range(40)])
    write(tmp_path / "steps", [step(number, ms=20) for number in range(7)], attempt=1)
    steps = read(tmp_path / "steps")
    assert (steps.attempt, steps.earlier_steps, len(steps.number)) == (1, 40, 7)


def test_a_file_without_a_step_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps").write_bytes(b"nothing of ours")
    with pytest.raises(TraceError, match=r"steps: no step in the file"):
        read(tmp_path / "steps")
    assert last_step(tmp_path / "steps") == -1


@given(st.integers(0, 10**7))
def test_a_run_is_cut_into_as_many_intervals_as_a_chart_shows(last: int) -> None:
    width = bin_width(last)
    assert last // width + 1 <= 241
    assert width == 1 or last // width + 1 >= 120


def test_one_rank_by_hand(tmp_path: Path) -> None:
    """100 steps of 10 ms, 2 of them loading; step 50 takes 35 ms, 27 of them loading; the first is disturbed."""
    steps = [step(number, dataloader=2.0, forward=5.0) for number in range(100)]
    steps[50] = step(50, ms=35, dataloader=27.0, forward=5.0)
    steps[0] = step(0, ms=900, disturbed=True)
    write(tmp_path / "steps", steps)
    partial = summarize_rank(RankFile(0, "", tmp_path / "steps"), 1)
    row = partial.row
    assert (row.steps, row.disturbed_steps, row.first_step, row.last_step, row.lost_steps) == (99, 1, 0, 99, 0)
    assert (row.median_us, row.p95_us, row.p99_us, row.max_us) == (10000.0, 10000.0, pytest.approx(10500), 35000.0)
    assert row.mean_us == pytest.approx((98 * 10 + 35) * 1000 / 99)
    assert row.stages_us["dataloader"] == pytest.approx((98 * 2 + 27) * 1000 / 99)
    assert partial.outliers.number.tolist() == [50]
    assert partial.outliers.ratio.tolist() == [3.5]
    assert partial.outliers.stages_us[0][0] == 25000.0
    assert row.trend is None  # below 100 undisturbed steps


def test_steps_that_a_capture_disturbs_are_no_outliers_where_there_are_no_others(tmp_path: Path) -> None:
    """Step 5 of 20 takes 35 ms, as the profiler starts in it: of a run whose trace is written to its end."""
    for disturbed in (True, False):
        steps = [step(number, ms=35 if number == 5 else 10, disturbed=disturbed) for number in range(20)]
        write(tmp_path / str(disturbed), steps)
        partial = summarize_rank(RankFile(0, "", tmp_path / str(disturbed)), 1)
        assert partial.row.max_us == 35_000.0
        assert partial.outliers.number.tolist() == ([] if disturbed else [5])


def test_a_run_that_grows_slower_has_a_trend_and_no_outliers(tmp_path: Path) -> None:
    write(tmp_path / "steps", [step(number, ms=10 + number / 100) for number in range(1000)])
    partial = summarize_rank(RankFile(0, "", tmp_path / "steps"), 4)
    assert partial.row.trend == pytest.approx(9 / 10.5, rel=0.02)
    assert partial.row.outlier_steps == 0
    assert len(partial.bins.place) == 250


def recording(folder: Path, ranks: dict[int, list[Step]], *strategies: str) -> Summary:
    for rank, steps in ranks.items():
        write(steps_file(folder, rank), steps)
        run = RunMetadata(rank=rank, world_size=len(ranks), host=f"node{rank}", strategies=strategies or ("ddp",))
        save(run, run_file(folder, rank))
    history, failures = job_history(open_job(folder))
    assert failures == ()
    assert history is not None
    return history


def test_who_loads_longer_is_slow_and_who_waits_for_it_is_not(tmp_path: Path) -> None:
    ranks = {
        rank: [step(number, ms=20, dataloader=9.0 if rank == 2 else 1.0, backward=3.0 if rank == 2 else 11.0, forward=5)
               for number in range(64)]
        for rank in range(4)
    }  # fmt: skip
    (slow,) = recording(tmp_path, ranks).slow_ranks
    assert (slow.rank, slow.host, slow.stage, slow.excess_us, slow.share_of_run) == (
        2,
        "node2",
        "dataloader",
        8000.0,
        1,
    )


def test_batches_of_evaluations_are_the_evaluations(tmp_path: Path) -> None:
    """Each fifth step of 10 ms, 2 of them loading, evaluates for 40, and draws batches for this for 30 more."""
    steps = [step(number, ms=10, dataloader=2, forward=3) for number in range(40)]
    steps[::5] = [step(number, ms=80, dataloader=32, forward=3, evaluation=40) for number in range(0, 40, 5)]
    write(tmp_path / "a", steps)
    row = summarize_rank(RankFile(0, "", tmp_path / "a"), 1).row
    assert row.stages_us["dataloader"] == pytest.approx(2_000)
    assert row.stages_us["evaluation"] == pytest.approx(8 * 70_000 / 40)
    write(tmp_path / "b", steps[::5])
    always = summarize_rank(RankFile(0, "", tmp_path / "b"), 1).row
    assert always.stages_us["dataloader"] == pytest.approx(32_000)  # nothing shows what the training draws


def test_few_steps_compare_no_ranks(tmp_path: Path) -> None:
    """4 ms of 20 are noise in 19 steps: ranks are compared from 20 on."""
    for few in (19, 20):
        ranks = {
            rank: [step(number, ms=20, dataloader=5.0 if rank == 1 else 1.0, forward=5) for number in range(few)]
            for rank in range(3)
        }
        folder = tmp_path / str(few)
        folder.mkdir()
        assert bool(recording(folder, ranks).slow_ranks) == (few == 20)


@pytest.mark.parametrize(("strategy", "found"), [("ddp", 1), ("fsdp", 0), ("pipeline", 0)])
def test_where_ranks_wait_for_one_another_they_are_not_compared(tmp_path: Path, strategy: str, found: int) -> None:
    ranks = {
        rank: [step(number, ms=20, forward=9.0 if rank == 1 else 5.0) for number in range(64)] for rank in range(3)
    }
    slow = [row for row in recording(tmp_path, ranks, strategy).slow_ranks if row.stage == "forward"]
    assert len(slow) == found


def test_of_two_ranks_other_is_unknown(tmp_path: Path) -> None:
    """Rank 1 loads 8 ms longer; rank 0 waits as long for it, in a collective that the script calls between stages."""
    ranks = {
        rank: [step(number, ms=20, dataloader=9.0 if rank == 1 else 1.0, forward=5, backward=5) for number in range(64)]
        for rank in range(2)
    }
    assert [(row.rank, row.stage) for row in recording(tmp_path, ranks).slow_ranks] == [(1, "dataloader")]


def test_an_outlier_is_put_down_to_the_rank_that_did_not_wait(tmp_path: Path) -> None:
    ranks = {}
    for rank in range(3):
        ranks[rank] = [step(number, dataloader=1, backward=5) for number in range(200)]
        slow = {"dataloader": 41.0, "backward": 5.0} if rank == 1 else {"dataloader": 1.0, "backward": 45.0}
        ranks[rank][90] = step(90, ms=50, **slow)
    history = recording(tmp_path, ranks)
    (outlier,) = history.outliers
    assert (outlier.step, outlier.us, outlier.ratio, outlier.ranks) == (90, 50000.0, 5.0, (0, 1, 2))
    assert (outlier.rank, outlier.stage) == (1, "dataloader")


def test_a_hundred_thousand_steps_stay_a_picture(tmp_path: Path) -> None:
    steps = [step(number, ms=10 if number < 60_000 else 14, forward=3) for number in range(100_000)]
    history = recording(tmp_path, {0: steps}, "single")
    assert 120 <= len(history.bins) <= 240
    assert (history.bins[0].median_us, history.bins[-1].median_us) == (10000.0, 14000.0)
    assert history.ranks[0].trend == pytest.approx(0.4)
    assert history.bins[-1].last_step == 99_999
    assert steps_file(tmp_path, 0).stat().st_size < 100_000  # equal steps: next to nothing per step


def test_a_rank_whose_history_is_damaged_costs_only_itself(tmp_path: Path) -> None:
    for rank in range(2):
        write(steps_file(tmp_path, rank), [step(number) for number in range(NEIGHBOURS)])
        save(RunMetadata(rank=rank, world_size=3), run_file(tmp_path, rank))
    steps_file(tmp_path, 1).write_bytes(b"\0" * 300)
    history, (failure,) = job_history(open_job(tmp_path))
    assert history is not None
    assert ([row.rank for row in history.ranks], history.missing_ranks, failure.rank) == ([0], (1, 2), 1)
    assert "rank-00001.steps.bin: no step in the file" in failure.error


def test_unknown_strategies_compare_only_what_cannot_wait() -> None:
    assert waiting_stages(["ddp"]) == {"backward"}
    assert waiting_stages(["unknown"]) == {"forward", "backward", "optimizer"}
    assert waiting_stages(["ddp", "tensor"]) == {"forward", "backward"}
    assert OTHER not in waiting_stages(["unknown"])
