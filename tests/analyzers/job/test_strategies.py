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
    gathered: int = 4000,
) -> tuple[str, ...]:  # fmt: skip
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": "default_pg"}, steps=2) for rank in (0, 1)]
    for rank in ranks:
        for step in (0, 1):
            for start, end in compute:
                rank.builder.launched("gemm", step * STEP + 55, step * STEP + 1000 * start, step * STEP + 1000 * end)
            for kind, spans, size in (("allreduce", sums, 1000), ("_allgather_base", gathers or [], gathered)):
                for start, end in spans:
                    rank.kernel(kind, "0", 1000 * start, 1000 * end, size, step=step, launch=57)
    return named(ranks, recorded, gradients)


def computing(*ranks: Rank, compute: Spans) -> None:
    for rank in ranks:
        for start, end in compute:
            rank.builder.launched("gemm", 55, 1000 * start, 1000 * end)


def named(ranks: list[Rank], recorded: tuple[str, ...] = (), gradients: int | None = None) -> tuple[str, ...]:
    result = align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})
    model = ModelMetadata(trainable_bytes=gradients) if gradients is not None else None
    size = len(ranks)
    runs = {
        each.number: RunMetadata(rank=each.number, world_size=size, strategies=recorded, model=model) for each in ranks
    }
    return job_strategies(result, runs, None, group_rows(result), size)


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


def test_parameters_gathered_by_hand_beside_the_sum_of_a_norm_are_not() -> None:
    # ZeRO-3 without metadata: gradients are scattered, and the only all-reduces are of a few bytes.
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": "default_pg"}, steps=2) for rank in (0, 1)]
    for rank in ranks:
        for step in (0, 1):
            for place, (start, end) in enumerate(TURNS):
                rank.builder.launched("gemm", step * STEP + 55, step * STEP + 1000 * start, step * STEP + 1000 * end)
                kind = "_allgather_base" if place < 4 else "_reduce_scatter_base"
                rank.kernel(kind, "0", 1000 * end, 1000 * (end + 40), 4000, step=step, launch=57)
            rank.kernel("allreduce", "0", 900_000, 910_000, 1, step=step, launch=58)
    assert named(ranks) == ("shard",)


def test_metrics_that_the_forward_gathers_are_not() -> None:
    gathers = between(TURNS[:4])
    assert "context" not in strategies(TURNS, AFTER, gathers, gathered=400)
    assert strategies(TURNS, AFTER, gathers, gathered=400, recorded=("ddp",)) == ("ddp",)
    assert strategies(TURNS, AFTER, gathers, recorded=("ddp",)) == ("context", "ddp")


def test_parameters_gathered_after_the_update_are_not() -> None:
    gathers = [(940 + 10 * place, 949 + 10 * place) for place in range(4)]
    assert "context" not in strategies([(1, 800)], AFTER, gathers)


@pytest.mark.parametrize("recorded", ["ddp", "fsdp", "zero1"])
def test_a_wrapper_that_reduces_gradients_is_the_strategy(recorded: str) -> None:
    assert strategies([(1, 800)], AFTER, recorded=(recorded,)) == (recorded,)


@pytest.mark.parametrize("size", [2, 4])
def test_keys_and_values_passed_round_a_ring_beside_gradients_are_context_parallel(size: int) -> None:
    members = tuple(range(size))
    ranks = [Rank(rank, size, {"0": members}, {"0": "default_pg"}) for rank in members]
    computing(*ranks, compute=TURNS)
    for rank in ranks:
        to, source = (rank.number + 1) % size, (rank.number - 1) % size
        for start, end in between(TURNS):
            rank.kernel("send", "0", 1000 * start, 1000 * end, 1000, launch=57, peer=to)
            rank.kernel("recv", "0", 1000 * start + 1, 1000 * end, 1000, launch=58, stream=21, peer=source)
        for start, end in AFTER:
            rank.kernel("allreduce", "0", 1000 * start, 1000 * end, 1000, launch=59)
    assert named(ranks) == ("context", "data")


def test_tensor_parallel_groups_across_which_gradients_are_reduced() -> None:
    groups = {"tp": {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, "dp": {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}}
    names = {(0, 1): "1", (2, 3): "2", (0, 2): "3", (1, 3): "4"}
    ranks = [Rank(rank, 4, {names[groups[kind][rank]]: groups[kind][rank] for kind in groups}) for rank in range(4)]
    computing(*ranks, compute=TURNS)
    for rank in ranks:
        for kind, spans in (("tp", between(TURNS)), ("dp", AFTER)):
            for start, end in spans:
                group = names[groups[kind][rank.number]]
                rank.kernel("allreduce", group, 1000 * start, 1000 * end, 1000, launch=57)
    assert named(ranks) == ("data", "tensor")


def test_groups_of_one_rank_show_nothing() -> None:
    """Frameworks make one of each kind, and reduce over it: 2 stages without tensor or data parallelism."""
    names = {(0,): ("1", "2"), (1,): ("3", "4")}
    ranks = [Rank(rank, 2, dict.fromkeys(names[rank,], (rank,))) for rank in range(2)]
    computing(*ranks, compute=TURNS)
    for rank in ranks:
        for group, spans in zip(names[rank.number,], (between(TURNS), AFTER), strict=True):
            for start, end in spans:
                rank.kernel("allreduce", group, 1000 * start, 1000 * end, 1000, launch=57)
    assert named(ranks, recorded=("pipeline",)) == ("pipeline",)


def test_parameters_that_neighbours_exchange_are_no_keys_and_values() -> None:
    """A ring after the optimizer's step, as of gossip: in the forward the same would be context parallelism."""
    for forward, expected in ((900, ("data",)), (60, ("context",))):
        ranks = [Rank(rank, 3, {"0": (0, 1, 2)}, {"0": "default_pg"}, host="node") for rank in range(3)]
        for rank in ranks:
            rank.builder.note("Optimizer.step#SGD.step", 100, 50_000)
            rank.builder.note("perfscope::forward", 1000 * forward, 1000 * forward + 90_000)
            right, left = (rank.number + 1) % 3, (rank.number - 1) % 3
            rank.kernel("send", "0", 310_000, 400_000, 4_000, peer=right, launch=300_000, stream=20)
            rank.kernel("recv", "0", 311_000, 401_000, 4_000, peer=left, launch=301_000, stream=21)
        computing(*ranks, compute=[(200, 250), (600, 900)])
        assert named(ranks) == expected


def test_metrics_do_not_decide_what_a_group_is_for() -> None:
    """Objects that are gathered between steps take longer than the gradients."""
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": "default_pg"}) for rank in (0, 1)]
    for rank in ranks:
        rank.builder.note("Optimizer.step#SGD.step", 100, 1_000)
        rank.builder.note("perfscope::forward", 600_000, 700_000)
        rank.kernel("_allgather_base", "0", 10_000, 200_000, 2, launch=5_000, dtype="Long")
        rank.kernel("_allgather_base", "0", 210_000, 500_000, 9_000, launch=205_000, dtype="Byte")
        rank.kernel("allreduce", "0", 910_000, 950_000, 100_000, launch=900_000)
    computing(*ranks, compute=[(600, 900)])
    result = align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})
    assert [row.role for row in group_rows(result)] == ["data"]


@pytest.mark.parametrize(
    ("recorded", "description", "named_too"),
    [
        ("fsdp", "mesh_tp", ("tensor",)),
        ("fsdp", "mesh_cp", ("context",)),
        ("fsdp", "mesh_dp", ()),
        ("zero3", "TENSOR_MODEL_PARALLEL_GROUP", ("tensor",)),
        ("fsdp", "default_pg", ()),
    ],
)
def test_beside_a_wrapper_that_shards_descriptions_name_what_divides_the_model(
    recorded: str, description: str, named_too: tuple[str, ...]
) -> None:
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": description}, steps=2) for rank in (0, 1)]
    for rank in ranks:
        rank.builder.launched("gemm", 55, 1_000, 500_000)
        rank.kernel("allreduce", "0", 500_000, 540_000, 1000, step=0, launch=57)
    assert named(ranks, (recorded,)) == tuple(sorted((recorded, *named_too)))
