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
