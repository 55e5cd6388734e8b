"""Process groups: which are the same, what they are called and what they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.job.collectives.group_roles import GroupTraffic, role_by_description, role_by_traffic
from perfscope.analyzers.job.collectives.groups import unite
from perfscope.analyzers.job.tables.groups import group_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.collectives.collectives import UNKNOWN_GROUP, Group
from perfscope.results.tables import GroupRow
from tests.analyzers.job.collectives.matching_jobs import STEP, Rank


def group(name: str, *ranks: int, description: str = "", size: int | None = None) -> Group:
    return Group(name=name, ranks=ranks, size=size or len(ranks) or None, description=description)


class TestUnite:
    def test_the_same_name_may_be_two_groups(self) -> None:
        groups, places = unite({0: [group("3", 0, 1)], 1: [group("3", 0, 1)], 8: [group("3", 8, 9)]})
        assert [(each.name, each.ranks) for each in groups] == [("3 [0, 1]", (0, 1)), ("3 [8, 9]", (8, 9))]
        assert places == {0: [0], 1: [0], 8: [1]}

    def test_one_group_may_have_two_names(self) -> None:
        groups, places = unite({0: [group("3", 0, 1)], 1: [group("a7f3", 0, 1)]})
        assert len(groups) == 1
        assert places == {0: [0], 1: [0]}

    def test_groups_of_the_same_ranks_are_distinguished_by_name(self) -> None:
        own = [group("0", 0, 1, description="default_pg"), group("5", 0, 1, description="mesh_dp")]
        groups, places = unite({0: own, 1: own[::-1]})
        assert [each.name for each in groups] == ["default_pg", "mesh_dp"]
        assert places == {0: [0, 1], 1: [1, 0]}

    def test_else_by_what_they_are_for(self) -> None:
        ranks = {
            0: [group("4", 0, 1, description="a"), group("5", 0, 1, description="b")],
            1: [group("7", 0, 1, description="b"), group("6", 0, 1, description="a")],
        }
        groups, places = unite(ranks)
        assert [each.name for each in groups] == ["a", "b"]
        assert places == {0: [0, 1], 1: [1, 0]}

    def test_else_by_the_order_in_which_they_come_into_use(self) -> None:
        groups, places = unite({0: [group("4", 0, 1), group("5", 0, 1)], 1: [group("7", 0, 1), group("8", 0, 1)]})
        assert [each.name for each in groups] == ["4", "5"]
        assert places == {0: [0, 1], 1: [0, 1]}

    def test_a_rank_that_used_only_one_of_them_does_not_confuse_the_others(self) -> None:
        groups, places = unite({0: [group("4", 0, 1), group("5", 0, 1)], 1: [group("5", 0, 1)]})
        assert len(groups) == 2
        assert places[1] == [places[0][1]]

    def test_ranks_that_a_recording_leaves_out_come_from_one_that_lists_them(self) -> None:
        everyone = tuple(range(40))
        groups, places = unite({0: [group("0", size=40)], 1: [group("0", *everyone)]})
        assert [each.ranks for each in groups] == [everyone]
        assert places == {0: [0], 1: [0]}

    def test_without_lists_name_and_size_must_do(self) -> None:
        groups, places = unite({0: [group("0", size=40), group("1", size=8)], 1: [group("0", size=40)]})
        assert [each.name for each in groups] == ["0", "1"]
        assert places == {0: [0, 1], 1: [0]}

    def test_unknown_ones_stay_unknown(self) -> None:
        groups, _ = unite({0: [UNKNOWN_GROUP], 1: [UNKNOWN_GROUP]})
        assert groups == (UNKNOWN_GROUP,)

    def test_a_hash_is_no_name(self) -> None:
        groups, _ = unite({0: [group("da4b9237bacccdf19c0760cab7aec4a8359010b0", 0, 1)]})
        assert [each.name for each in groups] == ["[0, 1]"]

    def test_no_two_groups_share_a_label(self) -> None:
        own = [group(str(at), 0, 1, description="x") for at in range(3)]
        groups, _ = unite({0: own, 1: own})
        assert len({each.name for each in groups}) == 3


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("DATA_PARALLEL_GROUP", "data"), ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "data"), ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"), ("EMBEDDING_GROUP", "pipeline"),
        ("CONTEXT_PARALLEL_GROUP", "context"), ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "expert"), ("EXPERT_TENSOR_PARALLEL_GROUP", "tensor"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"), ("MODEL_PARALLEL_GROUP", "unknown"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "unknown"), ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "unknown"),
        ("mesh_dp", "data"), ("mesh_dp_replicate", "data"), ("mesh_dp_shard", "shard"), ("mesh_dp_shard_cp", "shard"),
        ("mesh_dp_cp", "data"), ("mesh_tp", "tensor"), ("mesh_pp", "pipeline"), ("mesh_cp", "context"),
        ("mesh_ep", "expert"), ("mesh_cp_tp", "unknown"),
        ("tp", "tensor"), ("ep_group", "expert"), ("context_parallel", "context"), ("dp_shard", "shard"),
        ("my dp experiment", None), ("process group", None), ("0", None),
        ("default_pg", None), ("mesh_default", None), ("mesh_dim_0", None), ("", None),
    ],
)  # fmt: skip
def test_roles_by_description(description: str, role: str | None) -> None:
    assert role_by_description(description) == role


DDP = GroupTraffic(
    share={"all_reduce": 1.0},
    per_step=20,
    early_reduced=0.0,
    in_turn=0.0,
    of_backward=0.0,
    replicas=False,
    gathers_first=None,
    alternating=0.0,
    uneven=False,
    indices=0.0,
    between=False,
    returned=False,
    rings=False,
)


@pytest.mark.parametrize(
    ("traffic", "role"),
    [
        (DDP, "data"),
        (replace(DDP, early_reduced=0.3, in_turn=0.9), "tensor"),
        # Layers that fill less than a step, beside a large optimizer.
        (replace(DDP, early_reduced=0.0, in_turn=0.6), "tensor"),
        (replace(DDP, early_reduced=0.1, in_turn=0.6, of_backward=0.5), "tensor"),
        # A backward that waits for each reduction of gradients, as DeepSpeed's without overlap_comm.
        (replace(DDP, in_turn=0.6, of_backward=1.0), "data"),
        (replace(DDP, early_reduced=0.3, in_turn=0.9, per_step=2), "unknown"),
        # Gradients that are reduced after every micro-batch, behind the next one's compute: or something else.
        (replace(DDP, early_reduced=0.3), "unknown"),
        (replace(DDP, early_reduced=0.3, in_turn=0.9, replicas=True), "data"),
        (replace(DDP, early_reduced=None), "unknown"),
        # Buffers that are broadcast may take most of the time where gradients are few.
        (replace(DDP, share={"all_reduce": 0.3, "broadcast": 0.7}, replicas=True), "data"),
        (replace(DDP, share={"all_reduce": 0.3, "broadcast": 0.7}), "shard"),
        (replace(DDP, share={"all_gather": 0.6, "reduce_scatter": 0.4}, gathers_first=12.0), "shard"),
        (replace(DDP, share={"all_gather": 0.5, "reduce_scatter": 0.5}, gathers_first=1.0, alternating=0.7), "tensor"),
        (
            replace(
                DDP, share={"all_gather": 0.5, "reduce_scatter": 0.5}, gathers_first=1.0, alternating=0.7, per_step=4
            ),
            "shard",
        ),
        # ZeRO-1 and 2: gradients to their owners during the backward, parameters from them after the optimizer.
        (replace(DDP, share={"all_gather": 0.5, "reduce_scatter": 0.5}, gathers_first=0.0, alternating=0.1), "shard"),
        (replace(DDP, share={"reduce": 0.6, "all_gather": 0.4}), "shard"),
        (replace(DDP, share={"reduce": 0.6, "broadcast": 0.4}), "shard"),
        (replace(DDP, share={"reduce": 0.6, "broadcast": 0.4}, returned=True), "data"),
        (replace(DDP, share={"reduce": 0.2, "all_gather": 0.8}, gathers_first=None, returned=True), "shard"),
        (replace(DDP, share={"send_recv": 0.9, "all_reduce": 0.1}), "pipeline"),
        (replace(DDP, share={"send_recv": 1.0}, rings=True), "context"),
        (replace(DDP, share={"send_recv": 1.0}, rings=True, between=True), "data"),
        (replace(DDP, share={"all_to_all": 0.8, "all_reduce": 0.2}, uneven=True), "expert"),
        (replace(DDP, share={"all_to_all": 0.8, "all_reduce": 0.2}, uneven=True, indices=0.001), "expert"),
        (replace(DDP, share={"all_to_all": 0.8, "all_reduce": 0.2}, uneven=True, indices=0.026), "unknown"),
        (replace(DDP, share={"all_to_all": 1.0}), "unknown"),
        (replace(DDP, share={"barrier": 1.0}), "unknown"),
    ],
)
def test_roles_by_traffic(traffic: GroupTraffic, role: str) -> None:
    assert role_by_traffic(traffic)[0] == role


def rows_of(ranks: list[Rank]) -> list[GroupRow]:
    return list(group_rows(align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})))


def test_rows_name_ranks_role_time_and_reach() -> None:
    """Per step of 1000 us: a tensor parallel pair is busy 300 us, of which two all-reduces overlap for 100."""
    ranks = []
    for number in range(4):
        row, column = ((0, 1), (0, 2)) if number == 0 else ((0, 1), (1, 3)) if number == 1 else (
            (2, 3), (0, 2)) if number == 2 else ((2, 3), (1, 3))  # fmt: skip
        groups = {"0": (0, 1, 2, 3), "1": row, "2": column}
        rank = Rank(number, 4, groups, {"1": "mesh_tp", "0": "default_pg"}, steps=2, host=f"node{number // 2}")
        for step in (0, 1):
            rank.kernel("allreduce", "1", 100_000, 300_000, step=step)
            rank.kernel("allreduce", "1", 200_000, 400_000, step=step, stream=21, launch=70)
            rank.kernel("allreduce", "2", 700_000, 800_000, 5000, step=step)
            rank.kernel("allreduce", "0", 900_000, 901_000, 1, step=step)
        ranks.append(rank)
    rows = {row.name: row for row in rows_of(ranks)}
    assert sorted(rows) == ["2 [0, 2]", "2 [1, 3]", "default_pg", "mesh_tp [0, 1]", "mesh_tp [2, 3]"]
    tensor, data, world = rows["mesh_tp [2, 3]"], rows["2 [0, 2]"], rows["default_pg"]
    assert (tensor.ranks, tensor.role, tensor.role_from) == ((2, 3), "tensor", "its description, mesh_tp")
    assert (tensor.comm_us, tensor.across_hosts) == (300.0, False)
    assert (data.role, data.comm_us, data.across_hosts) == ("data", 100.0, True)
    assert world.role == "world"
    assert rows_of(ranks)[0].comm_us == 300.0


def all_reduces_of(
    compute: list[tuple[int, int]], reduced: list[tuple[int, int]], *, ddp: bool = False, elements: int = 100
) -> GroupRow:
    """The group of two ranks on two hosts that compute and reduce as given (µs of the step of 1000), undescribed."""
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": "default_pg"}, steps=2, host=f"node{rank}") for rank in (0, 1)]
    for rank in ranks:
        for step in (0, 1):
            at = step * STEP
            if ddp:
                rank.builder.note("DistributedDataParallel.forward", at + 60, at + 90)
            for start, end in compute:
                rank.builder.launched("gemm", at + 55, at + 1000 * start, at + 1000 * end)
            for start, end in reduced:
                rank.kernel("allreduce", "0", 1000 * start, 1000 * end, elements, step=step, launch=57)
    (row,) = rows_of(ranks)
    return row


def buckets(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """All-reduces one after another over these µs."""
    length = (last - first) // count
    return [(first + place * length, first + (place + 1) * length - 1) for place in range(count)]


@pytest.mark.parametrize("ddp", [True, False])
def test_gradients_reduced_most_of_the_step_are_no_activations(ddp: bool) -> None:
    """Forward to 100 µs, backward to 250; nine buckets from 150 to 960, of which only the first overlaps compute."""
    row = all_reduces_of([(1, 100), (100, 250)], buckets(150, 960, 9), ddp=ddp)
    assert row.across_hosts is True
    assert row.role == "data"


@pytest.mark.parametrize("layers", [2, 4, 24])
def test_layers_that_wait_for_all_reduces_are_tensor_parallel(layers: int) -> None:
    """Two halves of each layer, forward and backward: compute, its sum, the next; the optimizer at the end."""
    turn = 900 // (4 * layers)
    compute = [(1 + turn * place, 1 + turn * place + turn // 2) for place in range(4 * layers)]
    row = all_reduces_of([*compute, (910, 990)], [(end, end + turn // 2) for _, end in compute])
    assert row.role == "tensor"


def test_gradients_reduced_by_hand_are_no_activations() -> None:
    """Forward and backward to 500 µs; then all_reduce and a division by the number of ranks, for each of 40."""
    reduced = [(500 + 10 * place, 508 + 10 * place) for place in range(40)]
    row = all_reduces_of([(1, 500), *((end, end + 1) for _, end in reduced)], reduced)
    assert row.role == "data"


def exchanges_of(kinds: list[str]) -> GroupRow:
    """The undescribed group of two ranks on two hosts that issue these one after another, compute between them."""
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": "default_pg"}, steps=2, host=f"node{rank}") for rank in (0, 1)]
    for rank in ranks:
        for step in (0, 1):
            for place, kind in enumerate(kinds):
                at = 100_000 + 40_000 * place
                rank.builder.launched("gemm", step * STEP + 55, step * STEP + at - 20_000, step * STEP + at)
                rank.kernel(kind, "0", at, at + 20_000, step=step, launch=57)
    (row,) = rows_of(ranks)
    return row


GATHER, SCATTER = "_allgather_base", "_reduce_scatter_base"


def test_gradients_to_their_owners_then_parameters_from_them_are_sharded() -> None:
    assert exchanges_of([SCATTER] * 10 + [GATHER] * 8).role == "shard"


def test_layers_that_gather_and_scatter_sequences_are_tensor_parallel() -> None:
    """Two layers: each half gathers and scatters in the forward; in the backward two gathers come before a scatter."""
    assert exchanges_of([GATHER, SCATTER] * 4 + [GATHER, GATHER, SCATTER] * 4).role == "tensor"


def test_one_bucket_after_each_micro_batch_is_of_ddp() -> None:
    """Eight micro-batches without no_sync: compute and all-reduce in turn, as layers would."""
    compute = [(1 + 120 * place, 80 + 120 * place) for place in range(8)]
    assert all_reduces_of(compute, [(end, end + 40) for _, end in compute], ddp=True).role == "data"


def test_data_parallel_ranks_that_divide_parameters_are_sharded() -> None:
    ranks = [Rank(rank, 2, {"0": (0, 1)}, {"0": "mesh_dp"}) for rank in (0, 1)]
    for rank in ranks:
        for place in range(3):
            rank.kernel("_allgather_base", "0", 1000 + 1000 * place, 1500 + 1000 * place)
        rank.kernel("_reduce_scatter_base", "0", 9000, 9500)
    (row,) = rows_of(ranks)
    assert row.role == "shard"
    assert "mesh_dp" in row.role_from
    assert "reduce-scatters" in row.role_from


def test_hosts_of_ranks_outside_the_recording_are_not_known() -> None:
    ranks = [Rank(rank, 4, {"0": (0, 1, 2, 3)}, host="node") for rank in (0, 1)]
    for rank in ranks:
        rank.kernel("allreduce", "0", 1000, 2000)
    (row,) = rows_of(ranks)
    assert row.across_hosts is None
