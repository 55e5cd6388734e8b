"""Who holds which stage: by messages, by ranges, by lists of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.job.pipelines.messages import pipeline_messages
from perfscope.analyzers.job.pipelines.stages import place, ranks_of, stages
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.trace.trace import Category
from tests.analyzers.job.collectives.matching_jobs import Rank
from tests.analyzers.job.pipelines.pipeline_jobs import COALESCED, GPIPE, INTERLEAVED, compared, pipeline, silent
from tests.generator import JobSpec, PipelineSpec


def by_hand(*ranks: Rank) -> AlignedJob:
    return align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})


@pytest.mark.parametrize(
    "spec",
    [
        pipeline(),
        pipeline(schedule=GPIPE),
        pipeline(schedule=COALESCED),
        pipeline(schedule=INTERLEAVED),
        pipeline(schedule=silent(PipelineSpec())),
        pipeline(schedule=silent(COALESCED)),
        pipeline(schedule=silent(INTERLEAVED)),
        pipeline(ranks=2, pipeline=2),
        pipeline(ranks=8, metadata="operator"),
        pipeline(ranks=8, tensor=2, groups="mesh"),
        pipeline(ranks=16, tensor=2, microbatches=4, clip_norm=True),
        pipeline(ranks_per_host=2, host_clock_offsets_ns={1: 5_000_000}),
    ],
    ids=lambda spec: f"{spec.ranks} ranks, tensor {spec.tensor}, {spec.schedule}"[:70],
)
def test_every_rank_of_a_job_has_its_stage(spec: JobSpec, tmp_path: Path) -> None:
    _, found = compared(spec, tmp_path)
    assert stages(found.result) == {rank: spec.stage_of(rank) for rank in range(spec.ranks)}
    assert place(found.result, pipeline_messages(found.result)).degree == spec.pipeline


@pytest.mark.parametrize("ranks", [(0,), (3,), (1, 2), (0, 2), (0, 1, 3)])
@pytest.mark.parametrize("schedule", [PipelineSpec(), INTERLEAVED], ids=["1f1b", "interleaved"])
def test_some_ranks_are_enough(schedule: PipelineSpec, ranks: Sequence[int], tmp_path: Path) -> None:
    _, found = compared(pipeline(schedule=schedule), tmp_path, ranks)
    placed = place(found.result, pipeline_messages(found.result))
    assert stages(found.result) == {rank: rank for rank in ranks}
    assert placed.stage_of == {rank: rank for rank in range(4)}
    assert placed.degree == 4


def test_a_job_without_a_pipeline_has_no_stages(tmp_path: Path) -> None:
    _, found = compared(JobSpec(ranks=2, steps=2), tmp_path)
    assert stages(found.result) == {}


def chain(*order: int, group: Sequence[int], description: str = "") -> list[Rank]:
    """Ranks that hand one thing on, in this order."""
    listed = {"1": tuple(group)}
    found = {
        rank: Rank(rank, max(group) + 1, listed, {"1": description} if description else {}, host="node")
        for rank in order
    }
    for index, (giver, taker) in enumerate(pairwise(order)):
        end = 1000 * (index + 1)
        found[giver].kernel("send", "1", end - 300, end, peer=taker)
        found[taker].kernel("recv", "1", 60, end, peer=giver)
    return list(found.values())


def test_the_first_to_receive_comes_after_its_giver_whatever_the_numbers() -> None:
    assert stages(by_hand(*chain(2, 0, 3, 1, group=range(4)))) == {2: 0, 0: 1, 3: 2, 1: 3}


def test_an_order_with_a_hole_in_it_that_no_list_fills_is_not_known() -> None:
    first, _, third, last = chain(2, 0, 3, 1, group=range(4))
    assert stages(by_hand(first, third, last)) == {2: 0, 3: 2, 1: 3}
    assert stages(by_hand(third, last)) == {}


def test_a_list_whose_neighbours_pass_messages_on_fills_the_hole() -> None:
    _, _, third, last = chain(0, 2, 4, 6, group=(0, 2, 4, 6))
    assert stages(by_hand(third, last)) == {4: 2, 6: 3}


def test_ranges_name_stages_that_messages_do_not_show() -> None:
    ranks = [Rank(rank, 4, {"1": (0, 1, 2, 3)}, host="node") for rank in (1, 3)]
    for rank, stage in zip(ranks, (2, 1), strict=True):
        other = ranks[1 - ranks.index(rank)].number
        rank.kernel("send", "1", 500, 900, peer=other).kernel("recv", "1", 500, 900, peer=other, stream=30)
        for chunk in (stage, stage + 4):
            rank.builder.event(f"perfscope::pipeline#forward|{chunk}|0", Category.ANNOTATION, 70 + chunk, 71 + chunk)
            rank.builder.launched("gemm", 70 + chunk, 200 + 20 * chunk, 210 + 20 * chunk, call_takes=0)
    assert stages(by_hand(*ranks)) == {1: 2, 3: 1}


def test_a_ring_of_attention_is_no_pipeline() -> None:
    ranks = [Rank(rank, 3, {"1": (0, 1, 2)}, host="node") for rank in range(3)]
    for rank in ranks:
        for turn in range(2):
            begin = 300 + 1000 * turn
            legs = [("send", (rank.number + 1) % 3), ("recv", (rank.number - 1) % 3)]
            rank.batch("1", begin, begin + 500, legs, launch=begin - 100)
    assert stages(by_hand(*ranks)) == {}


def test_where_a_group_is_called_the_pipeline_s_others_are_not_looked_at() -> None:
    ranks = chain(0, 1, 2, group=range(3), description="mesh_pp")
    groups = {"1": (0, 1, 2), "2": (0, 1, 2)}
    for rank in ranks:
        rank.groups = groups
    # Before anything else the last one sends to the first, in another group.
    ranks[2].kernel("send", "2", 52, 58, peer=0, launch=40, stream=40)
    ranks[0].kernel("recv", "2", 52, 58, peer=2, launch=40, stream=40)
    assert stages(by_hand(*ranks)) == {0: 0, 1: 1, 2: 2}


def test_ranks_of_gathers_the_ranks_of_a_stage() -> None:
    assert ranks_of({3: 1, 0: 0, 2: 1, 1: 0}) == {0: (0, 1), 1: (2, 3)}
