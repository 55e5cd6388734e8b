"""Who is no straggler: ranks that only waited for a core, as the others did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.stragglers.contention import contention_notes, without_contention
from perfscope.recording.metadata import CpuMetadata, RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import StragglerRow
from perfscope.results.system import HostRow, System
from tests.analyzers.job.pipelines.pipeline_jobs import compared
from tests.generator import cpu_job

LATE = StragglerRow(rank=1, ranks=(1,), scope="rank", cause="compute", lost_us=5_000.0, confidence="high")
IN_TURN = replace(LATE, ranks=(0, 1, 2, 3), scope="job")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AlignedJob:
    """Four ranks on CPUs, steps of about 22 ms."""
    _, replayed = compared(cpu_job(steps=3), tmp_path_factory.mktemp("cpu"))
    return replayed.result


def on_cores(*ran_and_waited_ms: tuple[float, float]) -> dict[int, RunMetadata]:
    """Ranks whose training threads ran and waited for a core so long per step."""
    return {
        rank: RunMetadata(
            rank=rank,
            cpu=CpuMetadata(steps=2, wall_ns=80_000_000, thread_ns=round(2e6 * ran), waited_ns=round(2e6 * waited)),
        )
        for rank, (ran, waited) in enumerate(ran_and_waited_ms)
    }


@pytest.mark.parametrize(
    ("mine", "row", "named"),
    [
        ((8.0, 14.5), LATE, False),
        ((8.9, 14.5), LATE, False),
        ((11.0, 14.5), LATE, True),
        ((8.0, 11.0), LATE, True),
        ((8.0, 21.0), LATE, True),
        ((1.0, 12.6), LATE, True),
        ((8.0, 14.5), replace(LATE, cause="dataloader"), True),
        ((8.0, 14.5), replace(LATE, lost_us=10_000.0), True),
        ((8.0, 14.5), IN_TURN, False),
        ((8.0, 14.5), replace(IN_TURN, cause="host"), True),
        ((8.0, 1.0), IN_TURN, True),
    ],
    ids=[
        "waits 4.5 ms longer for a core", "and computes somewhat longer", "computes much longer",
        "waits little longer", "waits alone", "and is blocked for 4.4 ms by itself", "waits for data",
        "is late by much more", "in turn", "pauses in turn",
        "in turn, and one hardly waits",
    ],
)  # fmt: skip
def test_a_rank_that_waits_for_a_core_as_others_do_is_not_named(
    result: AlignedJob, mine: tuple[float, float], row: StragglerRow, named: bool
) -> None:
    """It is late by 5 ms of a step, and its peers wait 10 ms of each for a core."""
    usual = (8.0, 10.0)
    assert bool(without_contention([row], result, on_cores(usual, mine, usual, usual), None)) is named


SOMETIMES = replace(LATE, share_of_steps=0.5)


@pytest.mark.parametrize(
    ("mine", "row", "named"),
    [
        ((8.0, 10.0), SOMETIMES, False),
        ((8.0, 10.0), LATE, True),
        ((8.0, 9.0), SOMETIMES, True),
        ((11.5, 10.0), SOMETIMES, True),
        ((2.0, 10.0), SOMETIMES, True),
    ],
    ids=["late half of the time", "late in every step", "waits less than that", "works longer", "is blocked longer"],
)
def test_a_rank_that_is_late_now_and_then_is_not_named_for_what_all_wait_for(
    result: AlignedJob, mine: tuple[float, float], row: StragglerRow, named: bool
) -> None:
    """It costs 5 ms of a step on the mean; all wait 10 ms of each for a core."""
    usual = (8.0, 10.0)
    assert bool(without_contention([row], result, on_cores(usual, mine, usual, usual), None)) is named


@pytest.mark.parametrize(("part", "named"), [(0.0, True), (0.5, True), (0.9, False)])
def test_each_step_s_waits_tell_what_makes_ranks_late_in_turn(result: AlignedJob, part: float, named: bool) -> None:
    """In each step another rank is late by 5 ms, of which it waits this part for a core; all wait 10 ms per step."""
    steps, late_ns = len(result.steps), 5_000_000
    own = {rank: np.zeros_like(totals) for rank, totals in result.totals.items()}
    core = {rank: np.full(steps, 10_000_000) for rank in own}
    for step in range(steps):
        own[step % 4][step, TimeCategory.COMPUTE] = late_ns
        core[step % 4][step] += round(part * late_ns)
    row = replace(IN_TURN, steps=tuple(result.steps.tolist()))
    usual = (8.0, 10.0)
    found = without_contention([row], replace(result, totals=own), on_cores(usual, usual, usual, usual), None, core)
    assert bool(found) is named


@pytest.mark.parametrize(
    ("ran_ms", "asleep_ms", "named"),
    [(8.0, 0.0, False), (10.7, 0.0, True), (8.0, 4.0, False), (8.0, 5.5, True)],
    ids=["the same work", "a third more work", "sleeps for less than it costs", "sleeps for all of it"],
)
def test_what_a_rank_does_itself_for_most_of_its_cost_names_it(
    result: AlignedJob, ran_ms: float, asleep_ms: float, named: bool
) -> None:
    """Rank 1 is late by 10 ms in every second step, which costs 5 on the mean; of these 10 it waits 9 for a core."""
    late = np.arange(len(result.steps)) % 2 == 0
    own = {rank: np.zeros_like(totals) for rank, totals in result.totals.items()}
    own[1][late, TimeCategory.HOST] = 10_000_000
    core = {rank: np.full(len(result.steps), 10_000_000) for rank in own}
    core[1][late] += 9_000_000
    runs = on_cores(*[(8.0, 10.0)] * 4)
    for rank, (ran, asleep) in enumerate([(8.0, 0.0), (ran_ms, asleep_ms), (8.0, 0.0), (8.0, 0.0)]):
        cpu = CpuMetadata(
            steps=2, wall_ns=round(2e6 * (ran + 10.0 + asleep)), thread_ns=round(2e6 * ran), waited_ns=20_000_000
        )
        runs[rank] = replace(runs[rank], cpu=cpu)
    row = replace(SOMETIMES, cause="host", steps=tuple(result.steps[late].tolist()))
    assert bool(without_contention([row], replace(result, totals=own), runs, None, core)) is named


@pytest.mark.parametrize(("asleep_ms", "lost_ms", "named"), [(0.0, 5.0, False), (3.0, 5.0, True), (0.0, 6.0, True)])
def test_ranks_that_pause_in_turn_and_never_sleep_may_wait_for_a_core(
    result: AlignedJob, asleep_ms: float, lost_ms: float, named: bool
) -> None:
    """All wait 10 ms of each step for a core, and none sleeps: half of that may be late here and there."""
    cpu = CpuMetadata(steps=2, wall_ns=round(2e6 * (18.0 + asleep_ms)), thread_ns=16_000_000, waited_ns=20_000_000)
    runs = {rank: RunMetadata(rank=rank, cpu=cpu) for rank in range(4)}
    quiet = replace(result, totals={rank: np.zeros_like(totals) for rank, totals in result.totals.items()})
    row = replace(IN_TURN, cause="host", lost_us=1e3 * lost_ms)
    assert bool(without_contention([row], quiet, runs, None)) is named


WORK = {
    "rank 1 has three times as much": ([2.0, 6.0, 2.0, 2.0], (6.0, 18.0)),
    "others have more": ([3.0, 1.0, 1.0, 1.0], (9.0, 9.0)),
    "all as much": ([2.0, 2.0, 2.0, 2.0], (9.0, 9.0)),
    "rank 1 has a little more": ([2.0, 2.2, 2.0, 2.0], (9.0, 9.9)),
    "no shapes, and rank 1 runs longer": ([0.0, 0.0, 0.0, 0.0], (6.0, 18.0)),
    "no shapes, and all run as long": ([0.0, 0.0, 0.0, 0.0], (9.0, 9.0)),
}


@pytest.mark.parametrize(("work", "named"), [*zip(WORK, [True, True, False, False, True, False], strict=True)])
def test_uneven_work_is_uneven_although_most_of_what_it_takes_is_waited_for_a_core(
    result: AlignedJob, work: str, named: bool
) -> None:
    """In each step another rank is late by 5 ms, 4.5 of which it waits for a core. All wait for one twice as long as
    they run, 27 ms in all on the mean: 5 ms would be a fifth of the work.
    """
    flops, (usual_ms, ran_ms) = WORK[work]
    steps, late_ns = len(result.steps), 5_000_000
    own = {rank: np.zeros_like(totals) for rank, totals in result.totals.items()}
    core = {rank: np.full(steps, 10_000_000) for rank in own}
    for step in range(steps):
        own[step % 4][step, TimeCategory.COMPUTE] = late_ns
        core[step % 4][step] += 4_500_000
    partials = {
        rank: replace(partial, flops=replace(partial.flops, model=np.full_like(partial.flops.model, flops[rank])))
        for rank, partial in result.partials.items()
    }
    ran = [usual_ms, ran_ms, usual_ms, usual_ms]
    row = replace(IN_TURN, steps=tuple(result.steps.tolist()))
    job = replace(result, totals=own, partials=partials)
    assert bool(without_contention([row], job, on_cores(*((ms, 2 * ms) for ms in ran)), None, core)) is named


@pytest.mark.parametrize(
    ("cause", "slept_ms", "waited_ms", "named"),
    [
        ("host", 5, 0, True),
        ("host", 5, 4, True),
        ("host", 5, 7, False),
        ("host", 5, 13, False),
        ("host", 2, 0, False),
        ("compute", 5, 0, False),
    ],
)
def test_a_rank_that_sleeps_in_one_step_is_named_although_all_wait_for_cores_and_sleep_as_long(
    result: AlignedJob, cause: str, slept_ms: int, waited_ms: int, named: bool
) -> None:
    """It costs 5 ms of a step on the mean, 15 in one of three, of which it waits some for a core. All wait 10 ms of
    each for one, which explains such costs where they do not sleep.
    """
    own = {rank: np.zeros_like(totals) for rank, totals in result.totals.items()}
    core = {rank: np.full(len(result.steps), 10_000_000) for rank in own}
    own[1][0, TimeCategory.HOST if cause == "host" else TimeCategory.COMPUTE] = 15_000_000
    core[1][0] += waited_ms * 1_000_000
    row = replace(SOMETIMES, cause=cause, steps=(int(result.steps[0]),))
    usual = (40.0 - 10.0 - slept_ms, 10.0)  # of 40
    runs = on_cores(usual, usual, usual, usual)
    assert bool(without_contention([row], replace(result, totals=own), runs, None, core)) is named


@pytest.mark.parametrize(("ran_ms", "named"), [(8.0, False), (13.0, True)])
def test_a_rank_with_that_much_more_to_do_is_named_whatever_it_waited(
    result: AlignedJob, ran_ms: float, named: bool
) -> None:
    """It is late by 5 ms in some steps, nearly all of which it then waits for a core."""
    own = {rank: np.zeros_like(totals) for rank, totals in result.totals.items()}
    core = {rank: np.zeros(len(result.steps), np.int64) for rank in own}
    own[1][0, TimeCategory.COMPUTE], core[1][0] = 15_000_000, 14_000_000
    row = replace(SOMETIMES, steps=(int(result.steps[0]),))
    runs = on_cores((8.0, 10.0), (ran_ms, 10.0), (8.0, 10.0), (8.0, 10.0))
    assert bool(without_contention([row], replace(result, totals=own), runs, None, core)) is named


def test_waits_of_steps_that_are_no_longer_tell_nothing(result: AlignedJob) -> None:
    """What all wait for then counts, as where no step's waits are recorded."""
    own = {rank: np.zeros_like(totals) for rank, totals in result.totals.items()}
    core = {rank: np.zeros(len(result.steps), np.int64) for rank in own}
    row = replace(IN_TURN, steps=tuple(result.steps.tolist()))
    usual = (8.0, 10.0)
    runs = on_cores(usual, usual, usual, usual)
    assert not without_contention([row], replace(result, totals=own), runs, None, core)


def test_where_nobody_recorded_it_all_are_named(result: AlignedJob) -> None:
    assert without_contention([LATE, IN_TURN], result, {}, None) == (LATE, IN_TURN)


@pytest.mark.parametrize(("share", "named"), [(0.05, True), (0.2, False)])
def test_what_a_hypervisor_takes_is_no_rank_s(result: AlignedJob, share: float, named: bool) -> None:
    """5 ms of a step of about 22."""
    host = HostRow(**{**dict.fromkeys(HostRow.__dataclass_fields__), "ranks": (0, 1, 2, 3), "steal_share": share})
    machines = System(hosts=(host,), devices=(), processes=(), window_us=(0.0, 1.0))
    assert bool(without_contention([LATE], result, {}, machines)) is named


def test_a_note_says_so() -> None:
    (note,) = contention_notes([LATE, IN_TURN], 50_000.0)
    assert note.text.startswith(
        "The others waited for rank 1 10% of the step, because training threads wait for a core"
    )
    assert not list(contention_notes([], 50_000.0))
