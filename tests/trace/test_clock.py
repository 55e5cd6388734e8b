"""Clock offsets and drift between ranks, from collectives whose true times are known."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.trace.clock import Clocks, SendRecvTimes, align


def aligned(ends: dict[int, dict[int, int]], hosts: tuple[str, ...] = ()) -> Clocks:
    """``ends``: instance -> rank -> end on that rank's own clock."""
    lines = [(instance, rank, end) for instance, by_rank in ends.items() for rank, end in by_rank.items()]
    instance, rank, end = (np.array(column, dtype=np.int64) for column in zip(*lines, strict=True))
    return align(np.unique(rank), instance, rank, end, hosts)


def test_example_of_the_docstring():
    clocks = aligned({0: {0: 100, 1: 5100}, 1: {0: 200, 1: 5204}})
    assert clocks.offset_ns.tolist() == [0, -5002]
    assert clocks.residual_ns.tolist() == [1, 1]


def test_one_late_end_in_many_does_not_count():
    ends = {i: {0: 1000 * i, 1: 1000 * i + 500} for i in range(9)} | {9: {0: 9000, 1: 9_000_000}}
    assert aligned(ends).offset_of(1) == -500


def test_offsets_pass_through_ranks_that_share_groups():
    """0-1 and 2-3 are one kind of group, 0-2 and 1-3 the other; no collective holds all four."""
    skew = {0: 0, 1: 700, 2: -300, 3: 5000}
    ends = {}
    for step in range(6):
        for number, group in enumerate([(0, 1), (2, 3), (0, 2), (1, 3)]):
            time = 10_000 * step + 1000 * number
            ends[4 * step + number] = {rank: time + skew[rank] for rank in group}
    clocks = aligned(ends)
    assert clocks.offset_ns.tolist() == [0, -700, 300, -5000]
    assert clocks.residual_ns.tolist() == [0, 0, 0, 0]


def test_a_rank_that_shares_nothing_stays_on_its_clock_unaligned():
    clocks = aligned({0: {0: 100, 1: 150}, 1: {0: 200, 1: 250}, 2: {2: 900, 3: 5000}})
    assert clocks.aligned.tolist() == [True, True, False, False]
    assert clocks.offset_ns.tolist()[2:] == [0, 0]
    assert clocks.residual_ns.tolist()[2:] == [-1, -1]


def test_an_offset_within_the_scatter_is_no_offset():
    noise = np.random.default_rng(0).integers(-2000, 2000, size=(50, 2))
    ends = {i: {0: 100_000 * i + int(a), 1: 100_000 * i + int(b)} for i, (a, b) in enumerate(noise)}
    assert aligned(ends).offset_of(1) == 0


@pytest.mark.parametrize(("apart", "offset"), [(400_000, 0), (5_000_000, -5_000_000)])
def test_ranks_of_one_host_share_a_clock_unless_far_apart(apart, offset):
    ends = {i: {0: 10_000_000 * i, 1: 10_000_000 * i + apart} for i in range(8)}
    assert aligned(ends, ("a", "a")).offset_of(1) == offset


def test_no_collectives_at_all():
    nothing = np.empty(0, dtype=np.int64)
    clocks = align(np.array([0, 1]), nothing, nothing, nothing)
    assert clocks.aligned.tolist() == [True, False]
    assert clocks.offset_ns.tolist() == [0, 0]


SECOND = 1_000_000_000
EPOCH = 1_750_000_000 * SECOND


class Skewed:
    """Collectives of some groups at true times, as clocks of given offset and drift (ppm) record their ends."""

    def __init__(self, offset: dict[int, int], ppm: dict[int, float], seed: int = 0) -> None:
        self._offset, self._ppm = offset, ppm
        self._dice = np.random.default_rng(seed)
        self._lines: list[tuple[int, int, int]] = []

    def shows(self, rank: int, true_ns: int) -> int:
        """What a rank's clock shows at a true time, which counts from 0."""
        return EPOCH + true_ns + self._offset[rank] + round(self._ppm.get(rank, 0.0) * 1e-6 * true_ns)

    def collective(self, ranks: tuple[int, ...], true_ns: int, scatter_ns: int = 0) -> None:
        number = len({line[0] for line in self._lines})
        for rank in ranks:
            late = int(self._dice.integers(0, scatter_ns + 1))
            self._lines.append((number, rank, self.shows(rank, true_ns + late)))

    def aligned(self, hosts: tuple[str, ...] = (), messages: SendRecvTimes | None = None) -> Clocks:
        columns = zip(*self._lines, strict=True) if self._lines else ((), (), ())
        instance, rank, end = (np.array(column, dtype=np.int64) for column in columns)
        return align(np.array(sorted(self._offset), dtype=np.int64), instance, rank, end, hosts, messages)


def test_drift_is_found_and_taken_back():
    jobs = Skewed({0: 0, 1: 5_000_000, 2: -300_000}, {1: 20.0, 2: -45.0})
    for step in range(100):
        jobs.collective((0, 1, 2), step * SECOND // 10, scatter_ns=3000)
    clocks = jobs.aligned()
    # A clock that runs fast is set back.
    assert clocks.drift_ppm.tolist() == pytest.approx([0.0, -20.0, 45.0], abs=0.5)
    assert clocks.residual_ns.max() < 3000
    middle = 50 * SECOND // 10
    assert clocks.offset_of(1) == pytest.approx(jobs.shows(0, middle) - jobs.shows(1, middle), abs=2000)
    for true in (0, middle, 10 * SECOND):
        for rank in (1, 2):
            assert clocks.to_common(rank, jobs.shows(rank, true)) == pytest.approx(jobs.shows(0, true), abs=2000)


def test_without_drift_none_is_made_up():
    jobs = Skewed({0: 0, 1: 5_000_000}, {})
    for step in range(60):
        jobs.collective((0, 1), step * SECOND // 10, scatter_ns=20_000)
    clocks = jobs.aligned()
    assert clocks.drift_ppm.tolist() == [0.0, 0.0]
    assert clocks.offset_of(1) == pytest.approx(-5_000_000, abs=3000)


def test_drift_passes_through_groups_that_do_not_overlap():
    """A chain: no collective holds more than two ranks."""
    ppm = {1: 10.0, 2: -10.0, 3: 30.0}
    jobs = Skewed({0: 0, 1: 1_000_000, 2: 2_000_000, 3: -4_000_000}, ppm)
    for step in range(80):
        for pair in ((0, 1), (1, 2), (2, 3)):
            jobs.collective(pair, step * SECOND // 10, scatter_ns=1000)
    assert jobs.aligned().drift_ppm.tolist() == pytest.approx([0.0, -10.0, 10.0, -30.0], abs=0.5)


def test_ranks_of_one_host_share_drift_and_offset():
    jobs = Skewed({rank: (rank // 4) * 3_000_000 for rank in range(8)}, dict.fromkeys(range(4, 8), 25.0))
    for step in range(60):
        jobs.collective(tuple(range(8)), step * SECOND // 10, scatter_ns=8000)
    clocks = jobs.aligned(("a",) * 4 + ("b",) * 4)
    assert len(set(clocks.offset_ns[4:].tolist())) == 1
    assert len(set(clocks.drift_ppm[4:].tolist())) == 1
    assert clocks.drift_ppm[4] == pytest.approx(-25.0, abs=1.0)
    assert clocks.offset_ns[:4].tolist() == [0] * 4


def test_a_host_ties_together_what_collectives_do_not():
    """Stages of a pipeline on two hosts: every collective stays within a stage, every host holds both stages."""
    jobs = Skewed({0: 0, 1: 700_000, 2: 0, 3: 700_000}, {})
    for step in range(20):
        jobs.collective((0, 1), step * SECOND)
        jobs.collective((2, 3), step * SECOND + SECOND // 2)
    clocks = jobs.aligned(("a", "b", "a", "b"))
    assert clocks.aligned.all()
    assert clocks.offset_ns.tolist() == [0, -700_000, 0, -700_000]
    assert jobs.aligned().aligned.tolist() == [True, True, False, False]


def test_times_go_to_the_common_clock_and_back():
    clocks = Clocks(
        ranks=np.array([0, 7]),
        offset_ns=np.array([0, -123_456_789]),
        residual_ns=np.array([0, 0]),
        aligned=np.array([True, True]),
        drift=np.array([0.0, -3.7e-5]),
        reference_ns=np.array([0, EPOCH]),
        cluster=np.array([0, 0]),
    )
    times = EPOCH + np.random.default_rng(1).integers(-100 * SECOND, 100 * SECOND, 1000)
    common = clocks.to_common(7, times)
    # The clock runs fast, so that a second of it is less than one: two moments may fall on the same ns.
    assert np.abs(clocks.to_own(7, common) - times).max() <= 1
    assert clocks.to_common(0, times).tolist() == times.tolist()
    assert clocks.to_common(7, EPOCH) == EPOCH - 123_456_789
    assert clocks.to_own(7, EPOCH - 123_456_789) == EPOCH
    mixed = clocks.to_common(np.array([0, 7]), np.array([EPOCH, EPOCH]))
    assert mixed.tolist() == [EPOCH, EPOCH - 123_456_789]


class TestMessages:
    """A chain of stages between which nothing but messages passes."""

    def messages(
        self, jobs: Skewed, lines: list[tuple[int, int, int, int, int]], *, ends_with_send: bool = True
    ) -> SendRecvTimes:
        """``lines``: sender, receiver, and true times: send begins, send ends, recv ends."""
        return SendRecvTimes(
            sender=np.array([line[0] for line in lines], dtype=np.int64),
            receiver=np.array([line[1] for line in lines], dtype=np.int64),
            send_start_ns=np.array([jobs.shows(line[0], line[2]) for line in lines], dtype=np.int64),
            send_end_ns=np.array([jobs.shows(line[0], line[3]) for line in lines], dtype=np.int64),
            recv_end_ns=np.array([jobs.shows(line[1], line[4]) for line in lines], dtype=np.int64),
            recv_ends_with_send=np.full(len(lines), ends_with_send),
        )

    def there_and_back(self, ranks: int, count: int) -> list[tuple[int, int, int, int, int]]:
        lines = []
        for k in range(count):
            for rank in range(ranks - 1):
                at = k * SECOND // 10 + rank * 1_000_000
                lines.append((rank, rank + 1, at, at + 200_000, at + 203_000))
                lines.append((rank + 1, rank, at + 50_000_000, at + 50_200_000, at + 50_203_000))
        return lines

    def test_they_join_the_clocks(self):
        jobs = Skewed({0: 0, 1: 5_000_000, 2: -8_000_000}, {})
        clocks = jobs.aligned(messages=self.messages(jobs, self.there_and_back(3, 10)))
        assert clocks.aligned.all()
        # Receipts end 3 us after the sends, in both directions alike.
        assert clocks.offset_ns.tolist() == pytest.approx([0, -5_000_000, 8_000_000], abs=10)

    def test_a_send_into_a_buffer_does_not_count(self):
        jobs = Skewed({0: 0, 1: 5_000_000}, {})
        lines = self.there_and_back(2, 20)
        # Of a third of the messages the receiver begins only long after the sender is done.
        late = [(*line[:4], line[4] + 40_000_000) if k % 3 == 0 else line for k, line in enumerate(lines)]
        clocks = jobs.aligned(messages=self.messages(jobs, late))
        assert clocks.offset_of(1) == pytest.approx(-5_000_000, abs=5_000)

    def test_drift_shows_in_them_too(self):
        jobs = Skewed({0: 0, 1: 5_000_000}, {1: 40.0})
        clocks = jobs.aligned(messages=self.messages(jobs, self.there_and_back(2, 60)))
        assert clocks.drift_ppm.tolist() == pytest.approx([0.0, -40.0], abs=0.5)

    def test_a_hosts_ranges_only_bound_the_offset(self):
        """gloo's range around a send ends when somebody asks for it: its end is no evidence."""
        jobs = Skewed({0: 0, 1: 5_000_000}, {})
        lines = [(*line[:3], line[3] + 30_000_000, line[4]) for line in self.there_and_back(2, 10)]
        clocks = jobs.aligned(messages=self.messages(jobs, lines, ends_with_send=False))
        # The messages take 203 us either way: no better can be known than that, and the middle is right.
        assert clocks.offset_of(1) == pytest.approx(-5_000_000, abs=1000)
        assert clocks.residual_ns[1] == pytest.approx(203_000, abs=1000)

    def test_one_direction_is_better_than_nothing(self):
        jobs = Skewed({0: 0, 1: 5_000_000}, {})
        lines = [line for line in self.there_and_back(2, 10) if line[0] == 0]
        assert jobs.aligned(messages=self.messages(jobs, lines)).offset_of(1) == pytest.approx(-5_003_000, abs=1000)

    def test_whole_groups_move_with_the_rank_that_a_message_reaches(self):
        jobs = Skewed({0: 0, 1: 100_000, 2: 5_000_000, 3: 6_000_000}, {})
        for step in range(10):
            jobs.collective((0, 1), step * SECOND)
            jobs.collective((2, 3), step * SECOND)
        lines = [(sender + 1, receiver + 1, *times) for sender, receiver, *times in self.there_and_back(2, 10)]
        clocks = jobs.aligned(messages=self.messages(jobs, lines))
        assert clocks.aligned.all()
        assert clocks.offset_ns.tolist() == pytest.approx([0, -100_000, -5_000_000, -6_000_000], abs=4000)

    def test_a_kernel_of_several_messages_ends_with_the_last_of_them(self):
        """Ranks 0 and 1 share a host, ranks 2 and 3 another. All exchange with the next one in a ring, in one kernel
        each; a message inside a host takes 30 us, one between hosts 300. Rank 2 comes last by 900, ranks 1 and 2 end
        with the message between them, rank 3 with the quick one of rank 2, and rank 0 with the slow one of rank 3.
        """
        jobs = Skewed({0: 0, 1: 0, 2: 4_000_000, 3: 4_000_000}, {})
        came = {0: 100_000, 1: 150_000, 2: 1_000_000, 3: 120_000}
        ends = {0: 420_000, 1: 1_300_000, 2: 1_300_000, 3: 1_030_000}
        ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
        columns = []
        for k in range(10):
            jobs.collective((0, 1), k * SECOND // 10)
            jobs.collective((2, 3), k * SECOND // 10)
            for sender, receiver in (*ring, *((receiver, sender) for sender, receiver in ring)):
                begin, sent, here, there = (
                    jobs.shows(rank, k * SECOND // 10 + at[rank])
                    for rank, at in ((sender, came), (sender, ends), (receiver, came), (receiver, ends))
                )
                columns.append((sender, receiver, begin, sent, there, here, 4 * k + sender, 4 * k + receiver))
        lines = np.array(columns, dtype=np.int64).T
        messages = SendRecvTimes(
            *lines[:5], np.ones(len(columns), dtype=np.bool_), recv_start_ns=lines[5], kernels=(lines[6], lines[7])
        )
        clocks = jobs.aligned(("a", "a", "b", "b"), messages)
        assert clocks.aligned.all()
        assert clocks.offset_ns.tolist() == pytest.approx([0, 0, -4_000_000, -4_000_000], abs=1000)
