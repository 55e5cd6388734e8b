"""A job that is watched: what its files say as they grow, at any moment, is what the state says."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.analyzers.live import steps as live_steps
from perfscope.analyzers.live.job import LiveJob
from perfscope.analyzers.live.source import Tail, source_of
from perfscope.analyzers.live.state import LiveState
from perfscope.analyzers.live.steps import RankSteps
from perfscope.recording.history import unpack, unpack_growing
from perfscope.recording.metadata import StepsMetadata
from perfscope.recording.paths import stacks_file, steps_file, trace_file
from tests.analyzers.live.live_jobs import NOW, CountedSource, MemorySource, Recorded, S, block


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Two ranks of DDP that are about to begin."""
    job = Recorded(tmp_path / "recording")
    job.launch()
    job.ranks()
    return job


def after(job: LiveJob, seconds: float) -> LiveState:
    """The state so many seconds after the job began."""
    return job.look(NOW + round(seconds * S), whole=True)


def texts(state: LiveState) -> list[str]:
    return [event.text for event in state.events]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.lists(st.integers(0, 2000), max_size=6))
def test_blocks_come_out_once_however_a_growing_file_is_cut(counts: list[int], cuts: list[int]) -> None:
    data = b"".join(block(100 * place, count) for place, count in enumerate(counts))
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    rest, found = b"", []
    for low, high in itertools.pairwise(edges):
        whole = rest + data[low:high]
        blocks, done = unpack_growing(whole)
        found += blocks
        rest = whole[done:]
    assert found == list(unpack(data))


def test_what_was_cut_by_a_kill_does_not_hold_back_what_a_restart_appends() -> None:
    cut, whole = block(0, 20)[:70], block(0, 20, attempt=1)
    blocks, done = unpack_growing(cut + whole)
    assert [found.attempt for found in blocks] == [1]
    assert done > len(cut)


def test_a_folder_is_waited_for_until_the_job_has_begun_runs_and_has_ended(tmp_path: Path) -> None:
    job = Recorded(tmp_path / "later")
    watched = LiveJob(job.folder)
    assert (state := after(watched, 0)).state == "waiting"
    assert "does not exist" in state.reason
    job.folder.mkdir()
    assert (state := after(watched, 1)).state == "waiting"
    assert "does not exist" not in state.reason
    job.launch()
    assert after(watched, 2).state == "starting"
    job.ranks()
    assert {rank.state for rank in after(watched, 3).ranks} == {"starting"}
    job.all_step(0, 50)
    state = after(watched, 4)
    assert (state.state, state.last_step, [rank.state for rank in state.ranks]) == ("running", 49, ["stepping"] * 2)
    job.ranks(outcome="finished")
    job.launch(exit_code=0)
    state = after(watched, 5)
    assert (state.state, [rank.state for rank in state.ranks]) == ("ended", ["finished"] * 2)
    assert texts(state)[-2:] == ["the job makes steps now", "the job has ended: exit code 0"]


@pytest.mark.parametrize(
    ("outcomes", "state", "reason"),
    [
        (("finished", "finished"), "ended", "all ranks have finished"),
        (("finished", "exception"), "failed", "the recording has ended: rank 1 failed"),
        (("finished", "running"), "ended", "the recording has ended"),
    ],
)
def test_a_recording_that_the_program_has_ended_does_not_hang(
    recorded: Recorded, outcomes: tuple[str, ...], state: str, reason: str
) -> None:
    """The program goes on, so that there is no exit code, and makes no steps that are recorded."""
    recorded.all_step(0, 50)
    recorded.launch(ended=True)
    for rank, outcome in enumerate(outcomes):
        recorded.rank(rank, outcome=outcome)
    seen = after(LiveJob(recorded.folder), 3600)
    assert (seen.state, seen.reason) == (state, reason)


def test_step_time_rates_and_stages_are_those_of_the_steps(recorded: Recorded) -> None:
    recorded.all_step(0, 1000, step_ms=40.0)
    recorded.all_step(1000, 300, step_ms=80.0, began_ns=NOW + 40 * S)
    state = after(LiveJob(recorded.folder), 64)
    assert state.step_us == pytest.approx(80_000)
    assert state.step_p95_us == pytest.approx(80_000)
    assert state.run_step_us == pytest.approx((1000 * 40_000 + 300 * 80_000) / 1300)
    assert state.samples_per_step == 16
    assert state.samples_per_s == pytest.approx(16 / 0.08)
    assert state.run_samples_per_s == pytest.approx(16 * 1300 / 64)
    assert state.stages_us == pytest.approx(
        {"dataloader": 2000, "forward": 10_000, "backward": 20_000, "optimizer": 3000, "other": 45_000}
    )
    assert (state.strategies, state.backend, state.world_size, state.age_s) == (("ddp",), "nccl", 2, 0.0)


def test_steps_in_which_the_profiler_ran_are_left_out(recorded: Recorded) -> None:
    recorded.all_step(0, 100)
    recorded.all_step(100, 20, step_ms=400, disturbed=True)
    state = after(LiveJob(recorded.folder), 8)
    assert state.step_us == pytest.approx(40_000)
    assert state.run_step_us == pytest.approx(40_000)


def test_a_straggler_is_named_with_its_stage_and_what_it_takes(recorded: Recorded) -> None:
    recorded.all_step(0, 100, slow={1: {"dataloader": 12.0, "backward": 10.0}})
    (row,) = after(LiveJob(recorded.folder), 4).stragglers
    assert (row.ranks, row.stage, row.share_of_steps) == ((1,), "dataloader", 1.0)
    assert row.delay_us == pytest.approx(10_000)
    assert row.share_of_step == pytest.approx(0.25)


def test_in_a_healthy_job_nobody_is_a_straggler(recorded: Recorded) -> None:
    recorded.all_step(0, 100, slow={0: {"forward": 10.5}})
    state = after(LiveJob(recorded.folder), 4)
    assert state.stragglers == ()
    assert state.not_compared == ""


def test_stragglers_that_take_turns_are_all_named(tmp_path: Path) -> None:
    job = Recorded(tmp_path / "turns", world=4)
    job.launch()
    job.ranks()
    for first in range(0, 64, 4):
        job.all_step(first, 4, slow={first // 4 % 2: {"forward": 20.0, "backward": 10.0}})
    rows = after(LiveJob(job.folder), 3).stragglers
    assert [(row.ranks, row.stage) for row in rows] == [((0,), "forward"), ((1,), "forward")]
    assert [row.delay_us for row in rows] == pytest.approx([5000, 5000])


@pytest.mark.parametrize(("strategies", "says"), [(("pipeline",), "pipeline"), (("ddp", "pipeline"), "pipeline")])
def test_ranks_that_do_different_work_are_not_compared(
    recorded: Recorded, strategies: tuple[str, ...], says: str
) -> None:
    recorded.ranks(strategies=strategies)
    recorded.all_step(0, 100, slow={1: {"forward": 20.0}})
    state = after(LiveJob(recorded.folder), 4)
    assert state.stragglers == ()
    assert says in state.not_compared
    assert state.samples_per_s is None


def test_the_default_mode_compares_what_it_times(recorded: Recorded) -> None:
    """It times the optimizer alone: the rest of the step holds the waiting, and is no rank's own."""
    recorded.all_step(0, 50)  # so that the folder is like any other
    for rank in range(2):
        steps_file(recorded.folder, rank).unlink()
        recorded.steps(rank, 0, 100, stages={"optimizer": 3.0 + 4 * rank})
    (row,) = after(LiveJob(recorded.folder), 4).stragglers
    assert (row.ranks, row.stage, row.delay_us) == ((1,), "optimizer", pytest.approx(4000))


def test_only_what_is_new_is_read(recorded: Recorded) -> None:
    source = CountedSource(recorded.folder)
    watched = LiveJob(recorded.folder, source)
    recorded.all_step(0, 100)
    first = after(watched, 4)
    read = source.read_bytes
    assert read == sum(steps_file(recorded.folder, rank).stat().st_size for rank in range(2))
    after(watched, 5)
    assert source.read_bytes == read
    more = recorded.steps(0, 100, 50)
    second = after(watched, 6)
    assert source.read_bytes == read + more
    assert [rank.last_step for rank in second.ranks] == [149, 99]
    # The job is where all its ranks are.
    assert first.last_step == second.last_step == 99


def test_a_block_that_is_being_written_is_taken_when_it_is_whole(recorded: Recorded) -> None:
    watched = LiveJob(recorded.folder)
    recorded.all_step(0, 100)
    data = block(100, 50)
    with steps_file(recorded.folder, 0).open("ab") as file:
        file.write(data[:60])
    assert after(watched, 5).ranks[0].last_step == 99
    with steps_file(recorded.folder, 0).open("ab") as file:
        file.write(data[60:])
    assert after(watched, 6).ranks[0].last_step == 149


def test_of_a_long_run_the_end_is_read_and_that_is_said(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_steps, "FIRST_BYTES", 4096)
    monkeypatch.setattr(live_steps, "_LEAST_BYTES", 1024)
    for first in range(0, 20_000, 100):
        recorded.all_step(first, 100)
    source = CountedSource(recorded.folder)
    state = after(LiveJob(recorded.folder, source), 800)
    assert source.read_bytes <= 4096
    assert state.first_step > 10_000
    assert state.last_step == 19_999
    assert state.run_samples_per_s == pytest.approx(16 / 0.04)


def test_a_restart_is_said_and_steps_count_from_0_again(recorded: Recorded) -> None:
    watched = LiveJob(recorded.folder)
    recorded.all_step(0, 100)
    assert after(watched, 4).restarts == 0
    recorded.all_step(0, 10, attempt=1, began_ns=NOW + 20 * S)
    state = after(watched, 21)
    assert (state.restarts, state.last_step) == (1, 9)
    assert any("restarted (attempt 2)" in text for text in texts(state))


def test_another_run_in_the_folder_begins_anew(recorded: Recorded) -> None:
    watched = LiveJob(recorded.folder)
    recorded.all_step(0, 100)
    assert after(watched, 4).last_step == 99
    for rank in range(2):
        steps_file(recorded.folder, rank).unlink()
    recorded.launch(started_at="2027-01-15T09:00:00+00:00")
    recorded.all_step(0, 5)
    state = after(watched, 5)
    assert (state.last_step, state.run_step_us) == (4, pytest.approx(40_000))


def test_a_job_that_stands_still_is_stalled_and_may_go_on(recorded: Recorded) -> None:
    watched = LiveJob(recorded.folder)
    recorded.all_step(0, 100)
    assert after(watched, 6).state == "running"
    state = after(watched, 30)
    assert (state.state, [rank.state for rank in state.ranks]) == ("stalled", ["silent"] * 2)
    assert "26.0 s" in state.reason
    stacks_file(recorded.folder, 1).write_text("stacks")
    assert "rank 1 wrote stacks" in after(watched, 32).reason
    recorded.all_step(100, 10, began_ns=NOW + 40 * S)
    state = after(watched, 41)
    assert state.state == "running"
    assert "the job makes steps again" in texts(state)


def test_long_steps_are_no_stall(recorded: Recorded) -> None:
    recorded.all_step(0, 10, step_ms=6000, began_ns=NOW)
    assert after(LiveJob(recorded.folder), 100).state == "running"


def test_clocks_of_other_hosts_may_be_wrong(recorded: Recorded) -> None:
    """Steps that come are no hour old, and none is of the future."""
    watched = LiveJob(recorded.folder)
    for first, clock in ((0, -3600), (100, -3600), (200, 3600)):
        recorded.all_step(first, 100, began_ns=NOW + clock * S)
        state = after(watched, 4 + first / 25)
    assert (state.state, state.age_s) == ("running", 0.0)


def test_a_process_that_left_its_hosts_samples_is_gone(recorded: Recorded) -> None:
    watched = LiveJob(recorded.folder)
    recorded.all_step(0, 100)
    recorded.header()
    recorded.sample(3, [100, 101])
    assert {rank.state for rank in after(watched, 4).ranks} == {"stepping"}
    recorded.sample(4, [100])
    state = after(watched, 5)
    assert [rank.state for rank in state.ranks] == ["stepping", "gone"]
    assert "rank 1 is gone" in state.reason
    recorded.rank(0, outcome="exception")
    recorded.launch(exit_code=1)
    state = after(watched, 6)
    assert state.state == "failed"
    assert "exit code 1; rank 1 is gone (killed, or crashed) and rank 0 failed" in state.reason
    stacks_file(recorded.folder, 1).write_text("stacks")
    assert "exit code 1; rank 1 stood still (and wrote stacks) and rank 0 failed" in after(watched, 7).reason


def test_a_process_of_this_host_that_is_gone_is_found_without_samples(recorded: Recorded) -> None:
    recorded.all_step(0, 100)
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitpid(child, 0)
    recorded.rank(0, host=socket.gethostname(), pid=os.getpid())
    recorded.rank(1, host=socket.gethostname(), pid=child)
    assert [rank.state for rank in after(LiveJob(recorded.folder), 60).ranks] == ["silent", "gone"]


def test_load_is_that_of_the_last_seconds(recorded: Recorded) -> None:
    recorded.all_step(0, 500)
    recorded.header(devices=2)
    for second in range(20):
        recorded.sample(second, [100, 101], busy=0.25, gpus=(90, 30))
    state = after(LiveJob(recorded.folder), 20)
    (host,) = state.hosts
    assert (host.cpu_share, host.cores, host.memory_used_bytes) == (pytest.approx(0.25), 8, 16 << 30)
    assert host.cores_of_ranks == pytest.approx({0: 1.0, 1: 1.0})
    assert [rank.device.utilisation for rank in state.ranks if rank.device] == pytest.approx([0.9, 0.3])
    assert state.ranks[1].device is not None
    assert (state.ranks[1].device.power_w, state.ranks[1].cores) == (300, pytest.approx(1.0))


@pytest.mark.parametrize(
    "line",
    [
        '{"schema":"perfscope.samples/1","devices":5}',
        '{"process":"x","rank":[]}',
        '{"process":100,"kind":"rank"}',
        "5",
        "[1,2",
        "[1,[],[],[[]]]",
        '["a",[],[],[]]',
        "[null]",
        '[1800000003000000000,["x"],[["y"]],[["z","w"],[100]]]',
        "\x1b[2J",
    ],
)
def test_damaged_samples_cost_themselves(recorded: Recorded, line: str) -> None:
    recorded.all_step(0, 100)
    recorded.header(devices=1)
    recorded.sample(1, [100, 101], gpus=[50])
    with (recorded.folder / "host-node0.samples.jsonl").open("a") as file:
        file.write(line + "\n")
    recorded.sample(2, [100, 101], gpus=[50])
    assert after(LiveJob(recorded.folder), 4).state == "running"


@pytest.mark.parametrize(("ended_s", "seen_s", "age_s"), [(60, 30, 30), (-3600, 30, 30), (20, 30, 20), (-5, 0, 0)])
def test_a_rank_whose_clock_is_ahead_grows_older_too(ended_s: int, seen_s: int, age_s: int) -> None:
    now = 10**18
    seen = now - seen_s * 10**9 if seen_s else 0
    assert RankSteps(Tail(), ended_ns=now - ended_s * 10**9, seen_ns=seen).age_s(now) == age_s


def test_captures_and_further_jobs_are_seen(recorded: Recorded) -> None:
    watched = LiveJob(recorded.folder)
    recorded.all_step(0, 100)
    assert after(watched, 4).captures == 0
    trace_file(recorded.folder, 0, 0).write_bytes(b"")
    (recorded.folder / "job-1").mkdir()
    state = after(watched, 5)
    assert (state.captures, state.further_jobs) == (1, ("job-1",))
    assert "capture 0 was written" in texts(state)


def test_batches_that_are_not_known_give_no_rate(recorded: Recorded) -> None:
    recorded.ranks(steps=StepsMetadata())
    recorded.all_step(0, 100)
    assert after(LiveJob(recorded.folder), 4).samples_per_s is None
    recorded.ranks(settings={"gradient_accumulation": {"backwards_per_step": 4}}, steps=StepsMetadata())
    assert after(LiveJob(recorded.folder), 4).samples_per_step == 64


def test_a_folder_that_cannot_be_read_for_a_moment_is_read_again(recorded: Recorded) -> None:
    class Failing(CountedSource):
        fails = False

        def entries(self):  # type: ignore[no-untyped-def]
            if self.fails:
                raise OSError(5, "Input/output error")
            return super().entries()

    source = Failing(recorded.folder)
    watched = LiveJob(recorded.folder, source)
    recorded.all_step(0, 100)
    after(watched, 4)
    source.fails = True
    state = after(watched, 5)
    assert ("Input/output error" in state.problem, state.last_step) == (True, 99)
    source.fails = False
    assert after(watched, 6).problem == ""


def test_thousands_of_ranks_are_read_and_compared(tmp_path: Path) -> None:
    usual, slow = (
        block(0, 60),
        block(0, 60, stages={"dataloader": 22.0, "forward": 10.0, "backward": 0.0, "optimizer": 3.0}),
    )
    source = MemorySource({f"rank-{rank:05d}.steps.bin": usual for rank in range(4096)})
    source.files["rank-02718.steps.bin"] = slow
    watched = LiveJob(tmp_path / "remote", source)
    state = after(watched, 3)
    assert (len(state.ranks), state.last_step) == (4096, 59)
    assert [(row.ranks, row.stage) for row in state.stragglers] == [((2718,), "dataloader")]
    assert state.stragglers[0].delay_us == pytest.approx(20_000)
    # Memory does not grow with the steps: of each rank the last ones are kept.
    kept = watched._steps._ring
    before = kept._us.nbytes
    for first in range(60, 600, 60):
        for rank in range(4096) if first == 60 else range(8):
            name = f"rank-{rank:05d}.steps.bin"
            source.files[name] += block(first, 60) if rank < 8 else usual
    after(watched, 24)
    assert kept._us.nbytes == before <= 24 << 20


def test_a_folder_by_url_is_watched(recorded: Recorded) -> None:
    upath = pytest.importorskip("upath", reason="universal-pathlib is not installed (the remote extra)")
    url = upath.UPath("memory://bucket/watched")
    watched = LiveJob(url, source_of(url))
    assert after(watched, 0).state == "waiting"
    recorded.all_step(0, 100)
    for file in recorded.folder.iterdir():
        (url / file.name).write_bytes(file.read_bytes())
    state = after(watched, 4)
    assert (state.state, state.last_step, state.world_size) == ("running", 99, 2)
    recorded.all_step(100, 50)
    for rank in range(2):
        (url / steps_file(recorded.folder, rank).name).write_bytes(steps_file(recorded.folder, rank).read_bytes())
    assert after(watched, 6).last_step == 149


def test_a_rank_that_is_slow_where_others_wait_for_it_is_named(recorded: Recorded) -> None:
    """In DDP all backwards take as long; the slow rank is the one that does not wait in its own."""
    for rank in range(2):
        waits = {"backward": 12.0 if rank == 0 else 0.0}
        recorded.steps(rank, 0, 200, began_ns=NOW, waits=waits)
    state = after(LiveJob(recorded.folder), 8)
    (row,) = state.stragglers
    assert (row.ranks, row.stage, row.share_of_steps) == ((1,), "backward", 1.0)
    assert row.delay_us == pytest.approx(12_000)
    assert row.share_of_step == pytest.approx(0.3)
    assert state.ranks[0].stages_us["waiting"] == pytest.approx(12_000)
    assert state.ranks[0].stages_us["backward"] == pytest.approx(8000)
    assert sum(state.ranks[0].stages_us.values()) == pytest.approx(40_000)
    assert [rank.excess_us for rank in state.ranks] == pytest.approx([0, 12_000])


def test_stages_of_a_pipeline_are_compared_by_what_their_ranks_do(tmp_path: Path) -> None:
    job = Recorded(tmp_path / "stages", world=4)
    job.launch()
    for rank in range(4):
        job.rank(rank, strategies=("pipeline",), settings={"pipeline": {"stage": rank // 2}})
        own = 4.0 if rank < 2 else 14.0
        late = 5.0 if rank == 1 else 0.0
        stages = {"dataloader": 0.0, "forward": own + late, "backward": 25.0 - own - late, "optimizer": 3.0}
        job.steps(rank, 0, 200, stages=stages, waits={"backward": 25.0 - own - late})
    state = after(LiveJob(job.folder), 8)
    assert state.not_compared == ""
    assert [row.ranks for row in state.stragglers] in ([(1,)], [])
    assert [rank.excess_us for rank in state.ranks] == pytest.approx([0, 5000, 0, 0])
