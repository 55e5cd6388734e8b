"""Jobs as other tools record them: marked steps, kernels, arguments of NCCL's; no launches and no metadata.

A step is a copy, a forward, a backward, an optimizer's kernel and 20 µs of nothing. Each bucket is reduced when its
share of the backward is done, or when all is; one after the other, and the optimizer waits for the last. With
``tensor_us`` two ranks each reduce between forward and backward what tensor parallelism has divided::

    compute  |forward |   backward    |        |optimizer|
    NCCL     |                 |  1st |  2nd   |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfscope.results.findings import Finding
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised

RANKS: Final = 4
STEPS: Final = 5
FORWARD_US, BACKWARD_US, OPTIMIZER_US, NOTHING_US = 3_200.0, 6_400.0, 300.0, 20.0
_BACKWARD_KERNELS: Final = 160
_COMPUTE, _NCCL, _TENSOR = 7, 20, 28
"""Streams."""
_ALL_REDUCE: Final = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Bare:
    """One job; times in µs."""

    buckets: int = 4
    transfer_us: float = 500.0
    bytes: int | None = 25 << 20
    """Of each bucket; None: not recorded."""
    dtype: str = "BFloat16"
    overlap: bool = True
    ddp: bool = False
    copy_us: float = 0.0
    tensor_us: float = 0.0
    device: str = "NVIDIA H100 80GB HBM3"

    @property
    def reduced_us(self) -> float:
        """From the end of the forward until all gradients are reduced."""
        done = 0.0
        for bucket in range(1, self.buckets + 1):
            ready = BACKWARD_US * bucket / self.buckets if self.overlap else BACKWARD_US
            done = max(done, ready) + self.transfer_us
        return max(done, BACKWARD_US)

    @property
    def step_us(self) -> float:
        """Of every rank."""
        return self.copy_us + FORWARD_US + self.tensor_us + self.reduced_us + OPTIMIZER_US + NOTHING_US

    def analyze(self, folder: Path) -> Summary:
        """Write it, read it as a user would."""
        for rank in range(RANKS):
            (folder / f"rank{rank}.json").write_text(json.dumps(self._trace(rank)), encoding="utf-8")
        return advised(folder)

    def _trace(self, rank: int) -> dict[str, Any]:
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": self.device, "totalGlobalMem": 85_000_000_000}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS},
            "traceEvents": [event for step in range(STEPS) for event in self._step(step, rank)],
        }

    def _step(self, number: int, rank: int) -> list[dict[str, Any]]:
        begin = 1e9 + number * self.step_us
        forward = begin + self.copy_us
        backward = forward + FORWARD_US + self.tensor_us
        events = [_range(f"ProfilerStep#{number}", begin, self.step_us - 1)]
        if self.ddp:
            events.append(_range("DistributedDataParallel.forward", begin + 1, 50))
        if self.copy_us:
            events.append(_work("Memcpy HtoD (Pinned -> Device)", begin, self.copy_us, category="gpu_memcpy"))
        events.append(_work("ampere_bf16_s16816gemm_bf16_128x128_nn", forward, FORWARD_US))
        if self.tensor_us:
            pair = [rank // 2 * 2, rank // 2 * 2 + 1]
            sent = _arguments("BFloat16", 64 << 20, pair, "1", "TENSOR_MODEL_PARALLEL_GROUP")
            events.append(_work(_ALL_REDUCE, forward + FORWARD_US, self.tensor_us, _TENSOR, **sent))
        each = BACKWARD_US / _BACKWARD_KERNELS
        starts = (backward + index * each for index in range(_BACKWARD_KERNELS))
        events += [_work("ampere_bf16_s16816gemm_bf16_128x128_nt", start, each) for start in starts]
        free = backward
        for bucket in range(1, self.buckets + 1):
            free = max(free, backward + (BACKWARD_US * bucket / self.buckets if self.overlap else BACKWARD_US))
            events.append(_work(_ALL_REDUCE, free, self.transfer_us, _NCCL, **self._sent()))
            free += self.transfer_us
        optimizer = "multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>"
        events.append(_work(optimizer, backward + self.reduced_us, OPTIMIZER_US))
        return events

    def _sent(self) -> dict[str, Any]:
        """Arguments of an all-reduce, as torch writes them."""
        if self.bytes is None:
            return {}
        return _arguments(self.dtype, self.bytes, list(range(RANKS)), "0", "default_pg")


def found(summary: Summary, rule: str) -> Finding | None:
    """What a rule found."""
    return next((finding for finding in summary.findings if finding.rule == rule), None)


def _arguments(dtype: str, sent: int, ranks: list[int], group: str, description: str) -> dict[str, Any]:
    """Those of an all-reduce of so many bytes, as torch writes them."""
    elements = sent // (4 if dtype == "Float" else 2)
    return {
        "Collective name": "allreduce", "dtype": dtype, "In msg nelems": elements, "Out msg nelems": elements,
        "Group size": len(ranks), "Process Group Name": group, "Process Group Ranks": str(ranks),
        "Process Group Description": description,
    }  # fmt: skip


def _range(name: str, start: float, takes: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "user_annotation", "pid": 1, "tid": 1, "ts": start, "dur": takes}


def _work(
    name: str, start: float, takes: float, stream: int = _COMPUTE, category: str = "kernel", **args: Any
) -> dict[str, Any]:
    """Device work on a stream."""
    args = {"device": 0, "stream": stream, **args}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": stream, "ts": start, "dur": takes, "args": args}
