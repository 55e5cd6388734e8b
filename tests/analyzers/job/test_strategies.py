"""Parallelism written out in collectives, named by what two ranks exchange in steps of 1000 µs."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.job.strategies import job_strategies
from perfscope.analyzers.job.tables.groups import group_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.recording.metadata import ModelMetadata, RunMetadata
from tests.analyzers.job.collectives.matching_jobs import STEP, Rank

Spans = list[tuple[int, int]]
TURNS: Spans = [(1 + 100 * place, 60 + 100 * place) for place in range(8)]
"""Compute of eight layers; until the next one there are 40 µs."""
AFTER: Spans = [(810 + 10 * place, 819 + 10 * place) for place in range(12)]
"""Gradients, one after another, when all is computed."""


def between(turns: Spans) -> Spans:
    return [(end, end + 40) for _, end in turns]


def strategies(
    compute: Spans,
    sums: Spans,
    gathers: Spans | None = None,
    *,
    recorded: tuple[str, ...] = (),
    gradients: int | None = None,
) -> tuple[str, ...]:  # fmt: skip
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": "default_pg"}, steps=2) for rank in (0, 1)]
    for rank in ranks:
        for step in (0, 1):
            for start, end in compute:
                rank.builder.launched("gemm", step * STEP + 55, step * STEP + 1000 * start, step * STEP + 1000 * end)
            for kind, spans in (("allreduce", sums), ("_allgather_base", gathers or [])):
                for start, end in spans:
                    rank.kernel(kind, "0", 1000 * start, 1000 * end, 1000, step=step, launch=57)
    result = align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})
    model = ModelMetadata(trainable_bytes=gradients) if gradients is not None else None
    runs = {rank: RunMetadata(rank=rank, world_size=2, strategies=recorded, model=model) for rank in (0, 1)}
    return job_strategies(result, runs, None, group_rows(result), 2)


def test_activations_that_compute_waits_for_are_tensor_parallel() -> None:
    assert strategies(TURNS, between(TURNS)) == ("tensor",)


def test_gradients_after_the_backward_are_data_parallel() -> None:
    assert strategies([(1, 800)], AFTER) == ("data",)
    assert strategies([(1, 800)], [(810, 900)]) == ("data",)


def test_a_loss_that_is_averaged_is_no_strategy() -> None:
    assert strategies([(1, 800)], [(810, 820)], gradients=1 << 20) == ()
    assert strategies([(1, 800)], [(810, 820)], gradients=2000) == ("data",)


def test_gathers_that_the_forward_waits_for_beside_gradients_are_context_parallel() -> None:
    assert strategies(TURNS, AFTER, between(TURNS[:4])) == ("context", "data")


def test_parameters_gathered_after_the_update_are_not() -> None:
    gathers = [(940 + 10 * place, 949 + 10 * place) for place in range(4)]
    assert "context" not in strategies([(1, 800)], AFTER, gathers)


@pytest.mark.parametrize("recorded", ["ddp", "fsdp", "zero1"])
def test_a_wrapper_that_reduces_gradients_is_the_strategy(recorded: str) -> None:
    assert strategies([(1, 800)], AFTER, recorded=(recorded,)) == (recorded,)
