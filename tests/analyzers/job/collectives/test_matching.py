"""Collectives across ranks: by group, number and order, against answers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.job.collectives.table import collective_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from tests.analyzers.job.collectives.matching_jobs import Rank, instances, matched

WORLD = {"0": (0, 1)}


def pair(**options: object) -> list[Rank]:
    return [Rank(rank, 2, WORLD, **options) for rank in (0, 1)]


class TestSources:
    @pytest.mark.parametrize("describe", ["kernel", "operator"])
    def test_metadata_on_the_kernel_or_on_the_operator_that_launched_it(self, describe: str) -> None:
        ranks = [Rank(rank, 4, {"0": (0, 1, 2, 3), "1": pair}, describe=describe) for rank, pair in enumerate(
            [(0, 1), (0, 1), (2, 3), (2, 3)])]  # fmt: skip
        for rank in ranks:
            rank.kernel("allreduce", "1", 200 + rank.number, 400).kernel("_allgather_base", "0", 500, 700, 300)
        found, _, mismatches = matched(ranks)
        assert mismatches == ()
        assert sorted(instances(found)) == [
            ("0", "all_gather", (0, 1, 2, 3), True),
            ("1 [0, 1]", "all_reduce", (0, 1), True),
            ("1 [2, 3]", "all_reduce", (2, 3), True),
        ]
        assert found.instances.bytes.tolist() == [200, 200, 600]

    def test_the_only_group_needs_no_description(self) -> None:
        ranks = pair(describe="nothing")
        for rank in ranks:
            rank.kernel("allreduce", "0", 200, 400)
        found, _, _ = matched(ranks)
        assert instances(found) == [("0", "all_reduce", (0, 1), True)]

    def test_of_several_groups_none_is_guessed(self) -> None:
        ranks = [Rank(rank, 4, {"0": (0, 1, 2, 3), "1": (0, 1)}, describe="nothing") for rank in (0, 1)]
        for rank in ranks:
            rank.kernel("allreduce", "1", 200, 400)
        found, _, _ = matched(ranks)
        assert instances(found) == [("unknown", "all_reduce", (rank,), False) for rank in (0, 1)]

    def test_the_backends_range_describes_a_kernel_for_messages(self) -> None:
        ranks = pair(describe="nothing")
        for rank in ranks:
            rank.builder.note("nccl:all_to_all", 130, 160)
            rank.kernel("all_to_allv", "0", 200, 400, launch=140)
        found, _, _ = matched(ranks)
        assert instances(found) == [("0", "all_to_all", (0, 1), True)]


def test_an_all_to_all_is_as_large_as_what_its_busiest_rank_sends_or_receives() -> None:
    """Rank 0 sends 100 elements and receives 140, rank 1 the other way round: 120 of each on the mean of both."""
    sent = {0: 100, 1: 140}
    ranks = [Rank(rank, 2, WORLD) for rank in sent]
    for rank in ranks:
        sizes = {"elements_in": sent[rank.number], "elements_out": sent[1 - rank.number]}
        rank.kernel("all_to_allv", "0", 200, 400, **sizes).kernel("allreduce", "0", 500, 700)
    found, _, _ = matched(ranks)
    assert found.instances.bytes.tolist() == [280, 200]
    own = analyze_rank(ranks[0].builder.build()).collectives
    assert own.bytes.tolist() == [280, 200]
    assert own.mean_bytes.tolist() == [240, 200]


class TestNumbers:
    def test_they_find_what_a_recording_lacks_at_its_edges(self) -> None:
        ranks = pair()
        ranks[0].kernel("allreduce", "0", 200, 400, sequence=6)
        for rank in ranks:
            rank.kernel("allreduce", "0", 500, 700, sequence=7).kernel("allreduce", "0", 800, 900, sequence=8)
        found, _, mismatches = matched(ranks)
        assert [each[2] for each in instances(found)] == [(0,), (0, 1), (0, 1)]
        assert mismatches == ()

    def test_one_missing_in_the_middle_is_reported(self) -> None:
        ranks = pair()
        for sequence, start in ((6, 200), (7, 500), (8, 800)):
            for rank in ranks:
                if (rank.number, sequence) != (1, 7):
                    rank.kernel("allreduce", "0", start, start + 100, sequence=sequence)
        found, _, (mismatch,) = matched(ranks)
        assert [each[2] for each in instances(found)] == [(0, 1), (0,), (0, 1)]
        assert mismatch.ranks == (1,)
        assert "rank 1: 1 missing" in mismatch.text
        assert "all_reduce of 200 bytes" in mismatch.text

    def test_one_number_for_two_collectives_is_reported_and_not_compared(self) -> None:
        ranks = pair()
        for rank, kind in zip(ranks, ("allreduce", "_allgather_base"), strict=True):
            rank.kernel(kind, "0", 200, 400, sequence=6).kernel("allreduce", "0", 500, 700, sequence=7)
        found, _, (mismatch,) = matched(ranks)
        assert [each[1:3] for each in instances(found)] == [
            ("all_reduce", (0,)), ("all_gather", (1,)), ("all_reduce", (0, 1)),
        ]  # fmt: skip
        assert "number 6 is not the same collective on all ranks" in mismatch.text

    def test_numbers_of_a_group_that_also_passes_messages_are_not_comparable(self) -> None:
        """NCCL numbers batches of messages too, of which the ranks of a pipeline issue unlike many."""
        ranks = [Rank(rank, 3, {"0": (0, 1, 2)}) for rank in range(3)]
        for rank in ranks:
            rank.kernel("allreduce", "0", 200, 400, sequence=10 + rank.number)
        ranks[0].kernel("send", "0", 500, 600, peer=1, stream=30)
        ranks[1].kernel("recv", "0", 500, 600, peer=0, stream=30)
        found, _, mismatches = matched(ranks)
        assert instances(found)[0] == ("0", "all_reduce", (0, 1, 2), True)
        assert mismatches == ()

    def test_numbers_that_no_two_ranks_share_say_nothing(self) -> None:
        ranks = pair()
        for rank in ranks:
            for start in (200, 500):
                rank.kernel("allreduce", "0", start, start + 100, sequence=start + 5000 * rank.number)
        assert [each[2] for each in instances(matched(ranks)[0])] == [(0, 1), (0, 1)]

    def test_several_kernels_of_one_number_are_matched_in_order(self) -> None:
        ranks = pair()
        for rank in ranks:
            for start in (200, 500):
                rank.kernel("allreduce", "0", start, start + 100, sequence=6)
        assert [each[2] for each in instances(matched(ranks)[0])] == [(0, 1), (0, 1)]


class TestOrder:
    """Without numbers: order, checked by kind, type and size."""

    def issue(self, rank: Rank, sizes: list[int | tuple[str, int]], step: int = 0) -> None:
        for place, size in enumerate(sizes):
            kind, elements = size if isinstance(size, tuple) else ("allreduce", size)
            rank.kernel(kind, "0", 200 + 1000 * place, 700 + 1000 * place, elements, step=step)

    def test_a_missing_one_shifts_none_of_the_others(self) -> None:
        ranks = pair()
        self.issue(ranks[0], [10, 20, 10, 20, 30])
        self.issue(ranks[1], [20, 10, 20, 30])
        found, _, (mismatch,) = matched(ranks)
        assert [each[2] for each in instances(found)] == [(0,), (0, 1), (0, 1), (0, 1), (0, 1)]
        assert mismatch.text == "all_reduce of 20 bytes is not issued equally often (rank 0: 2, rank 1: 1)"
        assert (mismatch.group, mismatch.step, mismatch.ranks) == ("0", 0, (1,))

    def test_an_extra_one_on_two_ranks_is_still_compared_between_them(self) -> None:
        ranks = [Rank(rank, 5, {"0": tuple(range(5))}) for rank in range(5)]
        for rank in ranks:
            self.issue(rank, [10, 99, 20] if rank.number in (1, 3) else [10, 20])
        found, _, (mismatch,) = matched(ranks)
        assert ("0", "all_reduce", (1, 3), False) in instances(found)
        assert sum(each[3] for each in instances(found)) == 2
        assert mismatch.ranks == (1, 3)
        assert "ranks 0, 2, 4: 0, ranks 1, 3: 1" in mismatch.text

    def test_sizes_that_contradict_each_other_are_reported_and_not_compared(self) -> None:
        ranks = [Rank(rank, 3, {"0": (0, 1, 2)}) for rank in range(3)]
        for rank in ranks:
            self.issue(rank, [10, 25 if rank.number == 2 else 20, 30])
        found, _, (mismatch,) = matched(ranks)
        assert [each[2] for each in instances(found)] == [(0, 1, 2), (0, 1, 2)]
        assert mismatch.text == "all_reduce 2 has different sizes (ranks 0, 1: 40 bytes, rank 2: 50 bytes)"
        assert mismatch.ranks == (2,)

    def test_uneven_all_to_alls_are_no_contradiction(self) -> None:
        ranks = pair()
        self.issue(ranks[0], [("all_to_allv", 10), ("all_to_allv", 35)])
        self.issue(ranks[1], [("all_to_allv", 30), ("all_to_allv", 15)])
        found, _, mismatches = matched(ranks)
        assert mismatches == ()
        assert [each[2] for each in instances(found)] == [(0, 1), (0, 1)]
        assert found.instances.bytes.tolist() == [60, 70]

    def test_what_one_rank_does_not_say_contradicts_nothing(self) -> None:
        ranks = pair()
        ranks[1].describe = "nothing"
        for rank in ranks:
            self.issue(rank, [10, 20])
        found, _, mismatches = matched(ranks)
        assert mismatches == ()
        assert found.instances.bytes.tolist() == [20, 40]

    def test_a_rank_that_issues_nothing_is_reported(self) -> None:
        ranks = [Rank(rank, 3, {"0": (0, 1, 2)}, steps=2) for rank in range(3)]
        for rank in ranks:
            self.issue(rank, [10])
            if rank.number != 1:
                self.issue(rank, [10], step=1)
        found, _, (mismatch,) = matched(ranks)
        assert [each[2:] for each in instances(found)] == [((0, 1, 2), True), ((0, 2), False)]
        assert (mismatch.step, mismatch.ranks) == (1, (1,))
        assert "rank 1: none" in mismatch.text

    def test_a_rank_that_is_not_in_the_recording_is_no_mismatch_but_a_bound(self) -> None:
        ranks = [Rank(rank, 3, {"0": (0, 1, 2)}) for rank in (0, 2)]
        for rank, start in zip(ranks, (200, 500), strict=True):
            rank.kernel("allreduce", "0", start, 900)
        found, _, mismatches = matched(ranks)
        assert mismatches == ()
        assert instances(found) == [("0", "all_reduce", (0, 2), False)]
        # The transfer takes at most as long as the shorter of the two: rank 0 waited at least from 200 to 500.
        assert found.wait_ns.tolist() == [300, 0]
        assert found.waited_for.tolist() == [-1, -1]


class TestTime:
    """Order that time contradicts: each recording lacks other kernels than the others."""

    def test_what_never_ran_at_one_time_is_put_together_by_its_ends(self) -> None:
        ranks = [Rank(rank, 2, WORLD, steps=1) for rank in (0, 1)]
        ends = {0: [100, 200, 300, 400, 600, 700], 1: [100, 200, 300, 500, 600, 700]}
        for rank in ranks:
            for end in ends[rank.number]:
                rank.kernel("allreduce", "0", end * 10_000 - 50_000, end * 10_000 + rank.number * 10, launch=60)
        # One step that is long enough.
        for rank in ranks:
            for event in rank.builder.events:
                if event["name"] == "ProfilerStep#0":
                    event["end"] = 8_000_000
        found, clocks, (mismatch,) = matched(ranks)
        assert [each[2] for each in instances(found)] == [(0, 1)] * 3 + [(0,), (1,)] + [(0, 1)] * 2
        assert found.instances.inferred.tolist() == [True] * 3 + [False] * 2 + [True] * 2
        assert "missing from the recording" in mismatch.text
        assert clocks.residual_ns.max() <= 10


def test_each_rank_op_has_the_rank_that_it_waited_for() -> None:
    ranks = [Rank(rank, 3, {"0": (0, 1, 2)}) for rank in range(3)]
    for rank, start in zip(ranks, (200, 700, 300), strict=True):
        rank.kernel("allreduce", "0", start, 900)
    found, _, _ = matched(ranks)
    assert found.waited_for.tolist() == [1, 1, 1]
    assert found.wait_ns.tolist() == [500, 0, 400]
    assert found.transfer_ns.tolist() == [200, 200, 200]
    assert np.array_equal(found.lines_of(2), [2])
    assert found.lines_of(9).tolist() == []


def test_those_left_over_do_not_blur_the_others_times() -> None:
    """The second is missing on rank 1: waits, transfers and bandwidth are those of the first."""
    ranks = pair()
    ranks[0].kernel("allreduce", "0", 200, 500).kernel("allreduce", "0", 600, 99_600)
    ranks[1].kernel("allreduce", "0", 300, 500)
    found, _, _ = matched(ranks)
    (row,) = collective_rows(found, np.array([0]))
    assert (row.count, row.complete) == (2, False)
    assert (row.wait_us, row.transfer_us, row.algbw_gbps) == (0.05, 0.2, 1.0)
