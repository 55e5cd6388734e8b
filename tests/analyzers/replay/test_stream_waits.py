"""Exchanges that came in time, and the calls that show what would have waited for them: a ring by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.replay.schedules import RecordedSchedules, record_schedules
from perfscope.trace.trace import Category
from tests.analyzers.job.collectives.matching_jobs import Rank

US = 1_000
UNITS, STEPS = 6, 3
COMPUTE, EXCHANGE, OPTIMIZER = 1_000, 400, 50


def ring_us(exchange: int) -> int:
    """A step: what a unit computes with is exchanged while the unit before computes."""
    return UNITS * max(COMPUTE, exchange) + OPTIMIZER


HOST_US = [950 + 400 * step for step in range(STEPS)]
"""When the host begins each step: all are launched while the device does what was launched ``first``, up to 5 ms."""


def opened(number: int) -> Rank:
    """One of two ranks, with its steps and that work."""
    rank = Rank(number, 2, {"0": (0, 1)}, describe="operator", steps=0)
    rank.builder.launched("first", 900 * US, 4_990 * US, 5_000 * US)
    for step, host in enumerate(HOST_US):
        rank.builder.step(step, host * US, (host + 400) * US)
    return rank


def recorded_ring(
    *, calls: int = 1, issued: int = 1, late: int | None = None, pause: int = 0, combined: int = 0
) -> tuple[AlignedJob, RecordedSchedules]:
    """Two ranks that issue so many exchanges in each unit, and make streams wait so often behind its compute. The
    exchange of the unit ``late`` ends ``pause`` µs behind the begin of the next unit's compute. Where it takes any
    time, another exchange follows each compute on its stream, without a call.
    """
    ranks = []
    for number in range(2):
        rank, begin = opened(number), 5_000
        for host in HOST_US:
            for unit in range(UNITS):
                at = (host + 50 + 50 * unit) * US
                took = EXCHANGE // issued
                for each in range(issued):
                    end = begin + (each + 1) * took
                    if unit == late:
                        end = begin + COMPUTE + pause
                    rank.kernel("all_to_allv", "0", (end - took) * US, end * US, launch=at + 4 * each * US, stream=20)
                    rank.builder.event(
                        "cudaStreamWaitEvent", Category.RUNTIME, at + 4 * each * US - 1, at + 4 * each * US
                    )
                rank.builder.launched("attention", at + 20 * US, begin * US, (begin + COMPUTE) * US)
                for each in range(calls):
                    called = at + (30 + 2 * each) * US
                    rank.builder.event("cudaStreamWaitEvent", Category.RUNTIME, called, called + US)
                begin += COMPUTE
                if combined:
                    end = begin + combined
                    rank.kernel("all_to_allv", "0", begin * US, end * US, launch=at + 40 * US, stream=7)
                    begin = end
            rank.builder.launched("adam", (host + 390) * US, begin * US, (begin + OPTIMIZER) * US)
            begin += OPTIMIZER
        ranks.append(rank)
    result = align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})
    return result, record_schedules(result)


def step_us(recorded: RecordedSchedules, factor: float) -> float:
    """The step with exchanges that take so many times as long."""
    schedules = recorded.with_hosts
    assert schedules is not None
    slower = replace(schedules, transfer_ns=(schedules.transfer_ns * factor).astype(np.int64))
    return recorded.step_time_ns(replay(slower)) / US


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
@pytest.mark.parametrize(("calls", "issued"), [(1, 1), (2, 2), (2, 1)])
def test_compute_waits_for_a_slower_exchange(calls: int, issued: int, factor: int) -> None:
    _, recorded = recorded_ring(calls=calls, issued=issued)
    assert step_us(recorded, factor) == pytest.approx(ring_us(EXCHANGE * factor), rel=0.01)


@pytest.mark.parametrize("factor", [1, 4])
def test_an_exchange_on_the_stream_of_compute_needs_no_call(factor: int) -> None:
    _, recorded = recorded_ring(combined=100)
    wanted = ring_us(EXCHANGE * factor) + UNITS * 100 * factor
    assert step_us(recorded, factor) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("calls", "issued", "late"),
    [
        (0, 1, None),  # nothing shows that anything waits
        (1, 2, None),  # nor which of them it waits for
        (1, 1, 2),  # an exchange let the next unit's compute pass: the calls mean something else
    ],
)
def test_nothing_is_said_to_wait_where_no_call_shows_it(calls: int, issued: int, late: int | None) -> None:
    _, recorded = recorded_ring(calls=calls, issued=issued, late=late, pause=300)
    assert step_us(recorded, 4) == pytest.approx(UNITS * COMPUTE + OPTIMIZER, rel=0.01)


def test_calls_of_the_operator_that_issues_are_no_waits_for_its_result() -> None:
    """Before the launch its stream waits for compute, after it NCCL's streams for each other; torch's ``wait`` is an
    operator of the same name that begins as the first one ends.
    """
    rank = Rank(0, 2, {"0": (0, 1)}, describe="operator")
    rank.kernel("all_to_allv", "0", 1_000 * US, 1_100 * US, launch=900 * US)
    for called in (900 * US - 2, 900 * US + 1):
        rank.builder.event("cudaStreamWaitEvent", Category.RUNTIME, called, called + 1)
    rank.builder.op("record_param_comms", 900 * US + 3, 900 * US + 9)
    rank.builder.event("cudaStreamWaitEvent", Category.RUNTIME, 900 * US + 4, 900 * US + 6)
    rank.builder.launched("gemm", 950 * US, 1_110 * US, 1_200 * US)
    lane = analyze_rank(rank.builder.build()).progress.host
    assert lane is not None
    assert lane.stream_waits_ns.tolist() == [900 * US + 6]


GIVES, TAKES, SUMS = 500, 1_000, 100
"""What a unit computes on the first stage and on the last one, and what the all-reduce behind them takes."""


def stages(begin: int, exchange: int) -> list[tuple[int, int, int]]:
    """Of each unit when its message begins and ends, and its computation on the last stage."""
    found = []
    sent = taken = begin
    for unit in range(UNITS):
        sending = max(begin + GIVES * (unit + 1), sent)
        sent = sending + exchange
        taken = max(taken, sent) + TAKES
        found.append((sending, sent, taken))
    return found


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_receives_that_are_posted_ahead_are_waited_for_in_their_order(factor: int) -> None:
    """The next one is posted before the last stage waits for this one; nobody waits for sends."""
    ranks = []
    for number in range(2):
        rank, begin = opened(number), 5_000
        for host in HOST_US:
            posted = begin
            for unit, (sending, sent, taken) in enumerate(stages(begin, EXCHANGE)):
                at = (host + 50 + 50 * unit) * US
                if number == 0:
                    computed = begin + GIVES * (unit + 1)
                    rank.builder.launched("gemm", at, (computed - GIVES) * US, computed * US)
                    rank.kernel("send", "0", sending * US, sent * US, launch=at + 10 * US, peer=1)
                else:
                    early = at - 40 * US if unit else at - 10 * US
                    rank.kernel("recv", "0", posted * US, sent * US, launch=early, stream=20, peer=0)
                    posted = sent
                    rank.builder.event("cudaStreamWaitEvent", Category.RUNTIME, at + 12 * US, at + 13 * US)
                    rank.builder.launched("gemm", at + 20 * US, (taken - TAKES) * US, taken * US)
            arrived = begin + GIVES * UNITS if number == 0 else stages(begin, EXCHANGE)[-1][2]
            reduced = stages(begin, EXCHANGE)[-1][2] + SUMS
            rank.kernel("allreduce", "0", arrived * US, reduced * US, launch=(host + 380) * US, stream=24)
            rank.builder.launched("adam", (host + 390) * US, reduced * US, (reduced + OPTIMIZER) * US)
            begin = reduced + OPTIMIZER
        ranks.append(rank)
    result = align_job({rank.number: analyze_rank(rank.builder.build()) for rank in ranks})
    wanted = stages(0, EXCHANGE * factor)[-1][2] + SUMS * factor + OPTIMIZER
    assert step_us(record_schedules(result), factor) == pytest.approx(wanted, rel=0.01)
