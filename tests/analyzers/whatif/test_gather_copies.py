"""What FSDP2 copies to gather parameters, by hand: left out where backwards do not gather."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.replay.schedules import record_schedules
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import predict
from tests.analyzers.job.collectives.matching_jobs import STEP, Rank
from tests.traces import AUTOGRAD, MAIN

US = 1_000
UNITS, COPY, COMPUTE, GATHER = 3, 40, 120, 10
"""Units of the model; µs to copy one out of what was gathered, to compute with it, and to gather it."""
STEPS = 4


def fully_sharded(number: int) -> Rank:
    """Steps of 1 ms. From 10 µs on each unit is copied out and computes, forward and then backward, where its gradients
    are reduced; its gather is issued first and ends as the unit before has computed. The host then waits for all.
    """
    rank = Rank(number, 2, {"0": (0, 1)}, steps=STEPS)
    build = rank.builder
    for step in range(STEPS):
        begin, host, at = step * STEP, 3, 10
        for place in range(2 * UNITS):
            thread = AUTOGRAD if place >= UNITS else MAIN
            size = 1_000 * (1 + min(place, 2 * UNITS - 1 - place))
            now, device = begin + host * US, begin + at * US
            if thread == AUTOGRAD:
                build.op("autograd::engine::evaluate_function: MmBackward0", now, now + 9 * US, thread=AUTOGRAD)
            rank.kernel("_allgather_base", "0", (at - GATHER) * US, at * US, size, launch=now + US, step=step)
            build.note("FSDP::all_gather_copy_out (layers)", now + 3 * US, now + 6 * US, thread=thread)
            build.op("fsdp::split_with_sizes_copy", now + 4 * US, now + 6 * US, thread=thread)
            build.launched("split", now + 5 * US, device, device + COPY * US)
            at += COPY + COMPUTE
            build.launched("gemm", now + 7 * US, device + COPY * US, begin + at * US)
            if thread == AUTOGRAD:
                took = 2 * GATHER if place == 2 * UNITS - 1 else GATHER
                rank.kernel(
                    "_reduce_scatter_base", "0", at * US, (at + took) * US, size, launch=now + 8 * US, step=step,
                    stream=21,
                )  # fmt: skip
            host += 10
        build.call("cudaDeviceSynchronize", begin + host * US, begin + 995 * US)
    return rank


def test_copies_of_gathers_are_those_of_backwards() -> None:
    copies = analyze_rank(fully_sharded(0).builder.build()).gather_copies
    assert set(copies.count.tolist()) == {2 * UNITS}  # a range and an operator for each
    assert [ns // US for ns in copies.host.start_ns[:UNITS].tolist()] == [36, 46, 56]
    assert [ns // US for ns in copies.device.start_ns[:UNITS].tolist()] == [490, 650, 810]
    assert copies.device.end_ns[0] - copies.device.start_ns[0] == COPY * US


def test_a_backward_that_does_not_gather_does_not_copy() -> None:
    partials = {number: analyze_rank(fully_sharded(number).builder.build()) for number in (0, 1)}
    result = align_job(partials)
    found = predict(Context(result, record_schedules(result), {}, {}), {"fsdp.reshard_after_forward": "false"})
    assert found.measured_ns == pytest.approx(STEP, rel=0.01)
    assert found.mid_ns == pytest.approx(found.measured_ns - UNITS * COPY * US, rel=0.01)
