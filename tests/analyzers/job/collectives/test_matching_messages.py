"""Sends and recvs across ranks, against answers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.job.collectives.matching import match
from perfscope.analyzers.job.collectives.table import collective_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.trace.trace import ProcessGroup
from tests.analyzers.job.collectives.matching_jobs import Rank, instances, line, matched
from tests.traces import MAIN, RUNLOOP, RUNLOOP_2, TraceBuilder


def stages(count: int = 3, **options: object) -> list[Rank]:
    """On one host, so that their clocks agree."""
    return [Rank(rank, count, {"1": tuple(range(count))}, host="node", **options) for rank in range(count)]


def passed(found: MatchedCollectives) -> list[tuple[int, int, int]]:
    columns = (found.messages.source, found.messages.destination, found.messages.bytes)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


class TestPairs:
    @pytest.mark.parametrize("describe", ["kernel", "operator"])
    def test_the_kth_send_is_the_kth_recv_from_that_rank(self, describe: str) -> None:
        first, middle, last = stages(describe=describe)
        first.kernel("send", "1", 300, 500, 10, peer=1)
        middle.kernel("recv", "1", 200, 500, 10, peer=0)
        # Both neighbours' messages arrive side by side, so that order within the group alone would mix them up.
        last.kernel("send", "1", 250, 450, 20, peer=1, launch=70)
        middle.kernel("recv", "1", 210, 450, 20, peer=2, launch=100, stream=31)
        found, _, mismatches = matched([first, middle, last])
        assert mismatches == ()
        assert instances(found) == [("1", "send_recv", (1, 2), True), ("1", "send_recv", (0, 1), True)]
        assert passed(found) == [(0, 1, 20), (2, 1, 40)]
        assert not found.instances.inferred.any()

    def test_arrival_wait_and_transfer_are_those_of_the_two(self) -> None:
        first, second = stages(2)
        first.kernel("send", "1", 300, 500, peer=1)
        second.kernel("recv", "1", 200, 502, peer=0)
        found, _, _ = matched([first, second])
        assert found.wait_ns.tolist() == [0, 100]
        assert found.waited_for.tolist() == [0, 0]
        assert found.instances.last_rank.tolist() == [0]
        (row,) = collective_rows(found, np.array([0]))
        assert (row.kind, row.bytes, row.count, row.complete) == ("send_recv", 200, 1, True)
        # Of the receiver, from the last arrival on.
        assert row.transfer_us == pytest.approx(0.202)
        assert row.busbw_gbps == pytest.approx(200 / 202)
        assert row.last_arriver == {0: 1.0}

    def test_a_send_that_ended_before_the_recv_began_waited_for_no_rank(self) -> None:
        first, second = stages(2)
        first.kernel("send", "1", 100, 150, peer=1)
        second.kernel("recv", "1", 400, 600, peer=0)
        found, _, _ = matched([first, second])
        assert found.wait_ns.tolist() == [0, 0]
        (row,) = collective_rows(found, np.array([0]))
        assert row.transfer_us == pytest.approx(0.2)

    def test_in_a_group_of_two_the_peer_needs_no_description(self) -> None:
        first, second = stages(2)
        first.kernel("send", "1", 300, 500).kernel("recv", "1", 600, 700)
        second.kernel("recv", "1", 200, 500).kernel("send", "1", 600, 700)
        found, _, _ = matched([first, second])
        assert passed(found) == [(0, 1, 200), (1, 0, 200)]

    def test_the_backends_range_names_the_peer_by_its_number_in_the_group(self) -> None:
        ranks = [Rank(rank, 6, {"0": (1, 3, 5)}, describe="nothing") for rank in (1, 3, 5)]
        ranks[0].builder.note("nccl:send 0->1", 230, 250)
        ranks[0].kernel("send", "0", 300, 500, launch=240)
        ranks[1].builder.note("nccl:recv 1<-0", 130, 150)
        ranks[1].kernel("recv", "0", 200, 500, launch=140)
        found, _, _ = matched(ranks)
        assert instances(found) == [("0", "send_recv", (1, 3), True)]
        assert passed(found) == [(1, 3, -1)]

    def test_steps_keep_messages_apart(self) -> None:
        first, second = stages(2, steps=2)
        first.kernel("send", "1", 300, 500, peer=1).kernel("send", "1", 300, 500, peer=1, step=1)
        second.kernel("recv", "1", 200, 500, peer=0, step=1)
        found, _, (mismatch,) = matched([first, second])
        assert [each[2:] for each in instances(found)] == [((0,), False), ((0, 1), True)]
        assert (mismatch.step, mismatch.ranks) == (0, (0, 1))
        assert mismatch.text == "rank 0 sent 1 messages to rank 1, which received 0"

    def test_different_sizes_are_reported_and_not_compared(self) -> None:
        first, second = stages(2)
        first.kernel("send", "1", 300, 500, 10, peer=1)
        second.kernel("recv", "1", 200, 500, 12, peer=0)
        found, _, (mismatch,) = matched([first, second])
        assert [each[2:] for each in instances(found)] == [((1,), False), ((0,), False)]
        assert mismatch.text == "rank 0 sent 20 bytes to rank 1, which received 24"

    def test_a_peer_outside_the_recording_makes_a_bound(self) -> None:
        first, middle, _ = stages()
        first.kernel("send", "1", 300, 500, peer=1)
        middle.kernel("recv", "1", 200, 500, peer=0).kernel("send", "1", 600, 800, peer=2)
        found, _, mismatches = matched([first, middle])
        assert mismatches == ()
        assert instances(found) == [("1", "send_recv", (0, 1), True), ("1", "send_recv", (1,), False)]
        assert found.waited_for.tolist() == [0, 0, -1]
        assert passed(found) == [(0, 1, 200), (1, 2, 200)]


class TestBatches:
    def test_one_kernel_carries_what_was_asked_for_before_its_launch(self) -> None:
        first, second = stages(2)
        first.batch("1", 300, 500, [("send", 1), ("recv", 1)], launch=200)
        second.batch("1", 350, 500, [("send", 0), ("recv", 0)], launch=200)
        found, _, _ = matched([first, second])
        assert instances(found) == [("1", "send_recv", (0, 1), True)]
        assert passed(found) == [(0, 1, 200), (1, 0, 200)]
        assert found.instances.bytes.tolist() == [200]
        assert found.wait_ns.tolist() == [50, 0]

    def test_kernels_that_share_a_message_are_one_exchange(self) -> None:
        """Each waits for its neighbours only: rank 0 for rank 1, though rank 2 comes last of all."""
        first, middle, last = stages()
        first.batch("1", 100, 600, [("send", 1)], launch=90)
        middle.batch("1", 200, 800, [("recv", 0), ("send", 2)], launch=150)
        last.batch("1", 700, 800, [("recv", 1)], launch=150)
        found, _, _ = matched([first, middle, last])
        assert instances(found) == [("1", "send_recv", (0, 1, 2), True)]
        assert found.instances.last_rank.tolist() == [2]
        assert found.waited_for.tolist() == [1, 2, 2]
        assert found.wait_ns.tolist() == [100, 500, 0]

    def test_a_ring_is_one_exchange(self) -> None:
        ranks = stages(4)
        for rank in ranks:
            at = 200 + 10 * rank.number
            legs = [("send", (rank.number + 1) % 4), ("recv", (rank.number - 1) % 4)]
            rank.batch("1", at, 600, legs, launch=180)
        found, _, _ = matched(ranks)
        assert instances(found) == [("1", "send_recv", (0, 1, 2, 3), True)]
        assert found.waited_for.tolist() == [3, 2, 3, 3]

    def test_a_chain_that_comes_back_to_a_rank_is_cut_at_its_smaller_messages(self) -> None:
        """Rank 0 sends, and later receives, what one kernel of rank 1 carries: the send lay in a buffer."""
        first, second = stages(2)
        first.kernel("send", "1", 100, 150, 1, peer=1).kernel("recv", "1", 300, 600, 500, peer=1)
        launch = 250
        for place, (kind, elements) in enumerate((("recv", 1), ("send", 500))):
            at = launch - 20 + 4 * place
            args = second.args(kind, "1", elements, peer=0)
            second.builder.op("record_param_comms", at, at + 2, collective=args)
        second.builder.launched("ncclDevKernel_SendRecv()", launch, 300, 600, stream=30)
        found, _, _ = matched([first, second])
        assert [each[2:] for each in instances(found)] == [((0,), False), ((0, 1), False)]
        assert passed(found) == [(1, 0, 1000)]

    def test_another_threads_operators_are_not_in_the_batch(self) -> None:
        first, second = stages(2)
        stray = first.args("send", "1", 7, peer=1)
        first.builder.op("record_param_comms", 170, 175, thread=2, collective=stray)
        first.batch("1", 300, 500, [("send", 1)], launch=200)
        second.batch("1", 300, 500, [("recv", 0)], launch=200)
        found, _, _ = matched([first, second])
        assert passed(found) == [(0, 1, 200)]


class TestInference:
    """Older torch names no peers: the two ends of a message are found by when they end."""

    def chain(self, ranks: list[Rank]) -> None:
        """Two micro-batches forward through three stages, gradients back."""
        first, middle, last = ranks
        for start in (1000, 4000):
            first.kernel("send", "1", start, start + 600)
            middle.kernel("recv", "1", start - 300, start + 603)
            middle.kernel("send", "1", start + 1000, start + 1500, stream=31)
            last.kernel("recv", "1", start + 400, start + 1502)
        for start in (8000, 11000):
            last.kernel("send", "1", start, start + 600)
            middle.kernel("recv", "1", start - 300, start + 602, stream=31)

    def test_they_are_paired_by_their_ends_and_marked(self) -> None:
        ranks = stages()
        self.chain(ranks)
        found, _, mismatches = matched(ranks)
        assert mismatches == ()
        assert [each[2:] for each in instances(found)] == [
            ((0, 1), True), ((1, 2), True), ((0, 1), True), ((1, 2), True), ((1, 2), True), ((1, 2), True),
        ]  # fmt: skip
        assert found.instances.inferred.all()

    def test_what_ends_alone_stays_alone(self) -> None:
        ranks = stages()
        self.chain(ranks)
        ranks[0].kernel("send", "1", 400_000, 500_000)
        found, _, _ = matched(ranks)
        assert instances(found)[-1][2:] == ((0,), False)
        assert found.instances.inferred.tolist() == [True] * 6 + [False]

    def test_directions_must_fit(self) -> None:
        ranks = stages()
        ranks[0].kernel("send", "1", 1000, 1600)
        ranks[1].kernel("send", "1", 1000, 1601)
        ranks[2].kernel("recv", "1", 1000, 1630)
        found, _, _ = matched(ranks)
        assert sorted(each[2] for each in instances(found)) == [(0,), (1, 2)]

    def test_mute_kernels_of_which_all_ranks_have_as_many_are_taken_for_all_to_alls(self) -> None:
        ranks = [Rank(rank, 3, {"0": (0, 1, 2)}, describe="nothing") for rank in range(3)]
        for rank in ranks:
            rank.kernel("send", "0", 200 + rank.number, 400).kernel("send", "0", 600, 800)
        found, _, _ = matched(ranks)
        assert instances(found) == [("0", "send_recv", (0, 1, 2), True)] * 2


class TestHost:
    """gloo: sends and recvs lie on the thread that issues them, and overlap without nesting."""

    def rank(self, number: int, size: int = 2) -> TraceBuilder:
        group = ProcessGroup("0", "default_pg", tuple(range(size)))
        builder = TraceBuilder(rank=number, world_size=size, groups=(group,)).step(0, 0, 10_000)
        return builder.op("aten::mm", 10, 50)

    def message(self, builder: TraceBuilder, kind: str, peer: int, start: int, end: int) -> None:
        """The operator from ``start``; gloo's range begins when that returns, and ends when somebody waits for it."""
        name = {"send": "c10d::send", "recv": "c10d::recv_"}[kind]
        builder.op(name, start, start + 40, inputs=["", "", str(peer), "0"])
        builder.note(f"gloo:{kind}", start + 35, end, MAIN, shapes=[[25]], types=["float"])

    def test_the_operator_names_the_peer_and_begins_the_message(self) -> None:
        first, second = self.rank(0), self.rank(1)
        self.message(first, "send", 1, 1000, 9000)  # waited for late
        self.message(first, "recv", 1, 2000, 5000)
        self.message(second, "recv", 0, 500, 1300)
        self.message(second, "send", 0, 4000, 4900)
        partials = {rank: analyze_rank(builder.build()) for rank, builder in enumerate((first, second))}
        assert partials[0].collectives.start_ns.tolist() == [1000, 2000]
        found, _, mismatches = match(partials, np.array([0]))
        assert mismatches == ()
        assert passed(found) == [(0, 1, 100), (1, 0, 100)]
        assert found.wait_ns.tolist() == [0, 500, 2000, 0]
        # The send is over when the receiver has it, not when somebody asked for it.
        assert found.done_ns.tolist() == [1300, 1300, 5000, 4900]
        assert found.end_ns[line(found, 0, 0)] == 9000


def test_the_collectors_ranges_name_the_groups_of_a_cpu_job() -> None:
    """Two groups with like collectives, on the threads of each; only our ranges distinguish them."""
    ranks = []
    for number in range(4):
        row, column = (0, 1) if number < 2 else (2, 3), (0, 2) if number % 2 == 0 else (1, 3)
        groups = (ProcessGroup("0", "default_pg", (0, 1, 2, 3)), ProcessGroup("1", "mesh_tp", row),
                  ProcessGroup("2", "mesh_dp", column))  # fmt: skip
        builder = TraceBuilder(rank=number, world_size=4, groups=groups).step(0, 0, 10_000).op("aten::mm", 10, 50)
        for place, (name, kind, thread) in enumerate(
            (("1", "all_reduce", RUNLOOP), ("2", "reduce_scatter", RUNLOOP_2), ("1", "all_reduce", RUNLOOP))
        ):
            at = 1000 * (place + 1)
            builder.note(f"perfscope::collective#{kind}|{name}|2|{place}||float32|100", at, at + 10)
            builder.note("gloo:all_reduce", at + 100 + number, at + 500, thread, shapes=[[25]], types=["float"])
        ranks.append(builder)
    found, _, mismatches = match({rank: analyze_rank(each.build()) for rank, each in enumerate(ranks)}, np.array([0]))
    assert mismatches == ()
    assert sorted(instances(found)) == [
        ("mesh_dp [0, 2]", "reduce_scatter", (0, 2), True),
        ("mesh_dp [1, 3]", "reduce_scatter", (1, 3), True),
        *[("mesh_tp [0, 1]", "all_reduce", (0, 1), True)] * 2,
        *[("mesh_tp [2, 3]", "all_reduce", (2, 3), True)] * 2,
    ]
    assert (found.instances.bytes == 100).all()
