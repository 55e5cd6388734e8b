"""Copies on a stream of their own: hybrid sharding's into the buffer of a reduce-scatter that wait for an all-reduce,
and those of the results of reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.engine import Schedules, replay
from perfscope.analyzers.replay.schedules import RecordedSchedules, record_schedules
from tests.analyzers.job.collectives.matching_jobs import Rank

US = 1_000
UNITS, STEPS = 5, 3
COMPUTE, COPY, GATHER, SCATTER, OPTIMIZER = 1_000, 100, 150, 200, 50


@dataclass
class Piece:
    """What runs where, from when to when, µs; ``launch`` is its place in the program."""

    name: str
    start: int
    end: int


def step_of(begin: int, all_reduce: int, result: int = 0) -> list[Piece]:
    """One backward in the order of the program: unit by unit its compute, the copy of its gradients, their
    reduce-scatter and all-reduce, where it takes any time the copy of the ``result``; the parameters of the next unit
    are gathered meanwhile, behind the reduce-scatter before. The copy waits for that of the unit before.
    """
    pieces = []
    computed = scattered = reduced = begin
    gathered = begin
    for unit in range(UNITS):
        start = max(computed, gathered)
        gather = max(scattered, start) if unit == 0 else max(scattered, gathered, computed)
        gathered = gather + GATHER
        computed = start + COMPUTE
        copied = max(computed, reduced) + COPY
        scatter = max(copied, gathered)
        scattered = scatter + SCATTER
        pieces += [
            Piece("_allgather_base", gather, gathered),
            Piece("gemm", start, computed),
            Piece("copy", copied - COPY, copied),
            Piece("_reduce_scatter_base", scatter, scattered),
            Piece("allreduce", max(scattered, reduced), max(scattered, reduced) + all_reduce),
        ]
        reduced = max(scattered, reduced) + all_reduce
        if result:
            pieces.append(Piece("copy", reduced, reduced + result))
            reduced += result
    start = max(reduced, computed, scattered)
    return [*pieces, Piece("adam", start, start + OPTIMIZER)]


def results_step(begin: int, gather: int, scatter: int) -> list[Piece]:
    """One backward of plain sharding: unit by unit the gather of its parameters, its compute, the copy of its gradients
    and their reduce-scatter, and the copy of the result. Compute waits for gathers alone; copies have a stream of their
    own, collectives another one.
    """
    pieces = []
    computed = copied = carried = begin
    for _ in range(UNITS):
        gathered = carried + gather
        start = max(computed, gathered)
        computed = start + COMPUTE
        filled = max(computed, copied) + COPY
        begun = max(filled, gathered)
        carried = begun + scatter
        copied = carried + COPY
        pieces += [
            Piece("_allgather_base", gathered - gather, gathered),
            Piece("gemm", start, computed),
            Piece("copy", filled - COPY, filled),
            Piece("_reduce_scatter_base", begun, carried),
            Piece("copy", carried, copied),
        ]
    return [*pieces, Piece("adam", copied, copied + OPTIMIZER)]


def job(all_reduce: int) -> tuple[AlignedJob, RecordedSchedules, int]:
    """(Four ranks, two replicas of two shards, what a step takes, ns). Hosts launch all steps in their first 3 ms."""
    return recorded_job(lambda begin: step_of(begin, all_reduce))


def recorded_job(step_from: Callable[[int], list[Piece]]) -> tuple[AlignedJob, RecordedSchedules, int]:
    """The same of any step."""
    ranks = []
    for number in range(4):
        shard, replicas = tuple(sorted((number, number ^ 1))), tuple(sorted((number, number ^ 2)))
        rank = Rank(number, 4, {"shard": shard, "replicate": replicas}, steps=0)
        begin = 5_000
        rank.builder.launched("first", 900 * US, 4_990 * US, 5_000 * US)
        for step in range(STEPS):
            pieces = step_from(begin)
            rank.builder.step(step, (950 + 400 * step) * US, (1_350 + 400 * step) * US)
            for place, piece in enumerate(pieces):
                launch = (1_000 + 400 * step + 8 * place) * US
                start, end = piece.start * US, piece.end * US
                if piece.name in ("gemm", "adam", "copy"):
                    rank.builder.launched(piece.name, launch, start, end, stream=27 if piece.name == "copy" else 7)
                else:
                    group, stream = ("replicate", 112) if piece.name == "allreduce" else ("shard", 20)
                    rank.kernel(piece.name, group, start, end, launch=launch, stream=stream)
            begin = pieces[-1].end
        ranks.append(rank)
    result = align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})
    length = step_from(0)[-1].end * US
    return result, record_schedules(result), length


def quicker(result: AlignedJob, schedules: Schedules, factor: float, *kinds: str) -> Schedules:
    """The same with collectives of these kinds that take so many times as long; all-reduces, where none is named."""
    instances = result.matched_before.instances
    chosen = np.isin(np.array(instances.kinds)[instances.kind[schedules.instance]], kinds or ("all_reduce",))
    return replace(
        schedules,
        transfer_ns=np.where(chosen, schedules.transfer_ns * factor, schedules.transfer_ns).astype(np.int64),
    )


def test_the_job_by_hand_takes_what_its_all_reduces_take():
    """3,000 µs each: all five one after another, with the copy and the reduce-scatter between."""
    first = COMPUTE + COPY + SCATTER
    assert step_of(0, 3_000)[-1].end == first + 5 * 3_000 + 4 * (COPY + SCATTER) + OPTIMIZER
    assert step_of(0, 100)[-1].end == 5 * COMPUTE + COPY + SCATTER + 100 + OPTIMIZER


@pytest.mark.parametrize("copied", [0, 60])
@pytest.mark.parametrize("now", [3_000, 1_500])
@pytest.mark.parametrize("then", [100, 300, 700])
@pytest.mark.parametrize("hosts", [False, True])
def test_a_copy_that_waited_for_an_all_reduce_waits_no_longer_than_that(
    now: int, then: int, copied: int, *, hosts: bool
) -> None:
    result, recorded, length = recorded_job(lambda begin: step_of(begin, now, copied))
    schedules = recorded.with_hosts if hosts else recorded.schedules
    assert schedules is not None
    assert recorded.step_time_ns(replay(schedules)) == pytest.approx(length, rel=1e-4)
    assert recorded.step_time_ns(replay(quicker(result, schedules, then / now))) == pytest.approx(
        step_of(0, then, copied)[-1].end * US, rel=0.015 if copied else 0.01
    )


@pytest.mark.parametrize(("gather", "scatter"), [(0.1, 1.0), (1.0, 0.1), (0.5, 0.5)])
@pytest.mark.parametrize("hosts", [False, True])
def test_compute_does_not_wait_for_what_copies_results(gather: float, scatter: float, *, hosts: bool) -> None:
    """It waited for each gather, which was behind the reduce-scatter of the unit before on its stream."""
    result, recorded, length = recorded_job(lambda begin: results_step(begin, 500, 1_000))
    schedules = recorded.with_hosts if hosts else recorded.schedules
    assert schedules is not None
    assert recorded.step_time_ns(replay(schedules)) == pytest.approx(length, rel=1e-4)
    changed = quicker(result, schedules, gather, "all_gather")
    changed = quicker(result, changed, scatter, "reduce_scatter")
    assert recorded.step_time_ns(replay(changed)) == pytest.approx(
        results_step(0, int(500 * gather), int(1_000 * scatter))[-1].end * US, rel=0.01
    )


def test_compute_that_follows_the_copy_of_a_result_waited_for_it():
    """With no gathers in between, and results that the next unit needs: its compute begins as the copy ends."""

    def step(begin: int, scatter: int = 1_000) -> list[Piece]:
        pieces = []
        for _ in range(UNITS):
            computed = begin + COMPUTE
            copied = computed + scatter + COPY
            pieces += [
                Piece("gemm", begin, computed),
                Piece("_reduce_scatter_base", computed, computed + scatter),
                Piece("copy", computed + scatter, copied),
            ]
            begin = copied
        return [*pieces, Piece("adam", begin, begin + OPTIMIZER)]

    result, recorded, length = recorded_job(step)
    for schedules in (recorded.schedules, recorded.with_hosts):
        assert schedules is not None
        assert recorded.step_time_ns(replay(schedules)) == pytest.approx(length, rel=1e-4)
        assert recorded.step_time_ns(replay(quicker(result, schedules, 0.1, "reduce_scatter"))) == pytest.approx(
            step(0, 100)[-1].end * US, rel=0.01
        )


def test_such_a_copy_is_no_progress_of_the_rank():
    result, _, _ = job(3_000)
    own = result.partials[0].progress
    assert own.copy_ns.reshape(STEPS, UNITS, 3).tolist() == [[[0, 0, 0], *[[0, COPY * US, 0]] * (UNITS - 1)]] * STEPS


@pytest.mark.parametrize(("second", "took"), [(150, 30), (1_020, 0)])
def test_work_that_the_host_waited_for_is_no_copy_of_a_buffer(second: int, took: int) -> None:
    """Two kernels of 10 µs on a stream of their own begin as an all-reduce ends, and a reduce-scatter follows. The host
    launches the second of them before that end, or has waited for the first.
    """
    rank = Rank(0, 2, {"0": (0, 1)})
    rank.builder.launched("gemm", 90 * US, 100 * US, 400 * US)
    rank.kernel("allreduce", "0", 100 * US, 1_000 * US, launch=95 * US, stream=112)
    rank.builder.launched("copy", 120 * US, 1_001 * US, 1_011 * US, stream=27)
    rank.builder.launched("copy", second * US, 1_021 * US, 1_031 * US, stream=27)
    rank.kernel("_reduce_scatter_base", "0", 1_040 * US, 1_100 * US, launch=(second + 10) * US)
    rank.builder.launched("adam", (second + 20) * US, 1_110 * US, 1_200 * US)
    assert analyze_rank(rank.builder.build()).progress.copy_ns.tolist() == [0, took * US]
