"""Kernels that take a tenth longer while NCCL's run: a quicker network ends that too, in traces made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perfscope

RANKS, STEPS, KERNELS, ALONE, SLOWER = 2, 5, 10, 1000.0, 1.1
"""Of each step 10 kernels, which take 1 ms alone, and 1.1 times that beside the all-reduce."""
BEFORE, AFTER = 100.0, 400.0
"""A kernel before the all-reduce is issued, and the optimizer's, once it has ended, µs."""


def step_us(reduces: float) -> float:
    """A step whose all-reduce takes that long, ``reduces`` / 1.1 of the work is done meanwhile."""
    beside = min(reduces, KERNELS * ALONE * SLOWER)
    left = KERNELS * ALONE - beside / SLOWER
    return BEFORE + max(beside + left, reduces) + AFTER


def write(folder: Path, reduces: float) -> None:
    """Traces of both ranks; ``reduces`` must end with a kernel."""
    length = step_us(reduces)
    reduction = {
        "Collective name": "allreduce", "In msg nelems": 100_000_000, "Out msg nelems": 100_000_000,
        "Group size": RANKS, "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": str([*range(RANKS)]),
    }  # fmt: skip
    for rank in range(RANKS):
        events: list[dict[str, object]] = []
        for step in range(STEPS):
            at = step * length
            events.append(event("user_annotation", f"ProfilerStep#{step}", 1, at, at + length))
            kernels = [("ampere_sgemm_128x128", 7, at, at + BEFORE)]
            kernels.append(("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, at + BEFORE, at + BEFORE + reduces))
            now = at + BEFORE
            for _ in range(KERNELS):
                took = ALONE * (SLOWER if now < at + BEFORE + reduces else 1.0)
                kernels.append(("ampere_sgemm_128x128", 7, now, now + took))
                now += took
            kernels.append(("multi_tensor_apply_kernel", 7, max(now, at + BEFORE + reduces), at + length))
            for number, (name, stream, start, end) in enumerate(kernels):
                correlation, launched = 100 * step + number + 1, at - 50 + number
                more = reduction if stream == 20 else {}
                events.append(
                    event("kernel", name, stream, start, end, stream=stream, device=0, correlation=correlation, **more)
                )
                events.append(
                    event("cuda_runtime", "cudaLaunchKernel", 1, launched, launched + 0.5, correlation=correlation)
                )
        info = {"backend": "nccl", "rank": rank, "world_size": RANKS}
        (folder / f"rank_{rank}.json").write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))


def event(cat: str, name: str, thread: int, start: float, end: float, **args: object) -> dict[str, object]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": thread, "tid": thread, "ts": start + 1000, "dur": end - start,
        "args": args,
    }  # fmt: skip


@pytest.mark.parametrize("reduces", [11_000.0, 5_500.0])
def test_a_quicker_network_may_make_kernels_quicker(tmp_path: Path, reduces: float) -> None:
    write(tmp_path, reduces)
    asked = perfscope.whatif(tmp_path, {"network.bandwidth": "2x"})
    assert asked.measured_ns / 1e3 == pytest.approx(step_us(reduces), rel=0.001)
    truth = step_us(reduces / 2)
    assert asked.low_ns / 1e3 < truth < asked.high_ns / 1e3
    # By a tenth at most of what runs beside the half of the all-reduce that is gone.
    other = perfscope.whatif(tmp_path, {"network.bandwidth": "1x"})
    assert other.low_ns - asked.low_ns == pytest.approx(reduces / 2 * (1 - 1 / SLOWER) * 1e3, rel=0.03)
    assert asked.high_ns == pytest.approx(other.high_ns, rel=0.001)
