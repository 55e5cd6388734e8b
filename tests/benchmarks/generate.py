"""Makes a set of traces with the shape of a real data-parallel training run, for benchmarks.

    python -m tests.benchmarks.generate /tmp/set --ranks 8 --megabytes 64 --gzip

The text is laid out line by line as kineto writes it, with the events it writes and about the shares of bytes they have
in real recordings: operators with shapes, runtime calls, kernels, flows between them, NCCL kernels with their metadata,
``ProfilerStep`` ranges and, with ``--python``, Python functions. Names, sizes and durations are made up; the same
arguments give the same files.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BASE_NS = 1_750_000_000_000_000_000
HOST_PID = 4_100
MAIN, AUTOGRAD = 4_100, 4_377
COMPUTE_STREAM, COMM_STREAM = 7, 23
LAYERS = 12
BUCKET_LAYERS = 4
"""Layers whose gradients are reduced together."""

_HEAD = """{{
  "schemaVersion": 1,
  "deviceProperties": [
    {{
      "id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 84987740160,
      "computeMajor": 8, "computeMinor": 0, "warpSize": 32, "numSms": 108
    }}
  ],
  "cuda_runtime_version": 12040, "record_shapes": 1,
  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world_size}, "pg_count": 1, "pg_config": \
[{{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": {world_size}, "ranks": {ranks}}}]\
, "nccl_version": "2.22.3"}},
  "host_name": "node-{host}",
  "traceEvents": ["""
_LABEL = """
  {{
    "name": "thread_name", "ph": "M", "ts": 0.000, "pid": {pid}, "tid": {tid},
    "args": {{
      "name": "thread {tid} ({name})"
    }}
  }},"""
_COMPLETE = """
  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      {args}
    }}
  }},"""
_FLOW = """
  {{
    "ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {ts:.3f},
    "cat": "{cat}", "name": "{cat}"{more}
  }},"""
_TAIL = """
  {{
    "name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": {ts:.3f}
  }}
  ],
  "traceName": "rank{rank}.json",
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": {base_ns}
}}
"""
_OPERATOR_ARGS = (
    '"External id": {id},"Record function id": 0, "Sequence number": {id}, "Fwd thread id": 0, '
    '"Concrete Inputs": ["", "", "1"], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"], '
    '"Input Strides": {shapes}, "Input Dims": {shapes}, "Ev Idx": {id}{more}'
)
_KERNEL_ARGS = """"External id": {id},
      "queued": 0, "device": 0, "context": 1,
      "stream": {stream}, "correlation": {correlation},
      "registers per thread": 90,
      "shared memory": 49152,
      "blocks per SM": 9.481482,
      "warps per SM": 75.851852,
      "grid": [1024, 1, 1],
      "block": [256, 1, 1],
      "est. achieved occupancy %": 75{more}"""
_COLLECTIVE_ARGS = (
    ', "Collective name": "allreduce", "In msg nelems": {elements}, "Out msg nelems": {elements}, '
    '"Group size": {size}, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", '
    '"Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "{ranks}", '
    '"Seq": {sequence}'
)

_SHAPES = [f"[[{16 * 2**at}, 1024], [4096, {1024 * width}], []]" for at in range(4) for width in (1, 4)]
_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{functor}<c10::BFloat16>, std::array<char*, {n}> >"
    "(int, at::native::{functor}<c10::BFloat16>, std::array<char*, {n}>)"
)
_KERNELS = {
    "aten::addmm": "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
    "aten::gelu": _ELEMENTWISE.format(functor="GeluCUDAKernelImpl", n=2),
    "aten::add": _ELEMENTWISE.format(functor="CUDAFunctor_add", n=3),
    "aten::mul": _ELEMENTWISE.format(functor="binary_internal::MulFunctor", n=3),
    "aten::native_layer_norm": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float, "
        "c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)"
    ),
    "aten::_flash_attention_forward": (
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
        "cutlass::bfloat16_t> >(pytorch_flash::Flash_fwd_params)"
    ),
}
_ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
_FORWARD = (
    ("aten::native_layer_norm", 9), ("aten::addmm", 60), ("aten::_flash_attention_forward", 80), ("aten::addmm", 40),
    ("aten::add", 8), ("aten::native_layer_norm", 9), ("aten::addmm", 75), ("aten::gelu", 14), ("aten::addmm", 75),
    ("aten::add", 8),
)  # fmt: skip
"""Operators of one layer and how long their kernels run, µs."""
_VIEWS = ("aten::t", "aten::transpose", "aten::as_strided", "aten::view", "aten::empty", "aten::reshape")


class RankTrace:
    """Writes one rank's trace, event by event. Times are µs since the base."""

    def __init__(self, write: Callable[[str], Any], rank: int, world_size: int, *, python: bool) -> None:
        self._write = write
        self._rank = rank
        self._world_size = world_size
        self._python = python
        self._dice = random.Random(rank)
        self._host = 1000.0 + rank
        self._device_free = {COMPUTE_STREAM: 0.0, COMM_STREAM: 0.0}
        self._id = 0
        self._sequence = 0
        self._forwards = 0
        self.bytes_written = 0

    def _text(self, text: str) -> None:
        self.bytes_written += len(text)
        self._write(text)

    def begin(self) -> None:
        """Everything before the first event, and the threads' names."""
        ranks = list(range(self._world_size))
        self._text(_HEAD.format(rank=self._rank, world_size=self._world_size, ranks=ranks, host=self._rank // 8))
        self._text(_LABEL.format(pid=HOST_PID, tid=MAIN, name="python"))
        self._text(_LABEL.format(pid=HOST_PID, tid=AUTOGRAD, name="pt_autograd_0"))
        self._text(_LABEL.format(pid=0, tid=COMPUTE_STREAM, name="stream 7"))

    def end(self) -> None:
        """Everything after the last event."""
        self._text(_TAIL.format(ts=self._host, rank=self._rank, base_ns=BASE_NS))

    def step(self, number: int) -> None:
        """One training step: load, forward, backward with reductions, update."""
        began = self._host
        self._range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", self._host, 180.0)
        self._host += 200
        for layer in range(LAYERS):
            self._layer(MAIN, _FORWARD, layer)
        for layer in reversed(range(LAYERS)):
            self._layer(AUTOGRAD, [(name, 2 * us) for name, us in reversed(_FORWARD)], layer)
            if layer % BUCKET_LAYERS == 0:
                self._reduce(25_000_000 + layer)
        self._host = max(self._host, *self._device_free.values())
        self._call("cudaDeviceSynchronize", MAIN, 0, 0, self._host - 50, 50.0)
        for _ in range(4):
            self._operator(MAIN, "aten::mul", 12)
        self._range(f"ProfilerStep#{number}", began, self._host - began)
        self._range(f"ProfilerStep#{number}", began + 40, self._host - began, on_device=True)
        self._host += 5

    def _layer(self, tid: int, operators: Sequence[tuple[str, int]], layer: int) -> None:
        if tid == AUTOGRAD:
            self._flow("f", "fwdbwd", self._forwards - layer, HOST_PID, AUTOGRAD, self._host)
        for name, device_us in operators:
            if self._python:
                self._function(f"torch/nn/modules/module.py(1747): forward_{layer}", self._host, 45.0)
            self._operator(tid, name, device_us)
        if tid == MAIN:
            self._forwards += 1
            self._flow("s", "fwdbwd", self._forwards, HOST_PID, MAIN, self._host - 5)

    def _operator(self, tid: int, name: str, device_us: float) -> None:
        """An operator with those inside it, the call that launches its kernel, the kernel, and the flow between."""
        self._id += 1
        outer, start = self._id, self._host
        shapes = _SHAPES[self._dice.randrange(len(_SHAPES))]
        for view in self._dice.sample(_VIEWS, 2):
            self._id += 1
            self._cpu_op(view, self._id, tid, self._host + 1, 2.3, shapes)
            self._host += 3.8
        launch = self._host + 2
        taken = 5.0 + self._dice.random() * 4
        correlation = self._launch("cudaLaunchKernel", tid, outer, launch, taken)
        device_us *= 0.9 + 0.2 * self._dice.random()
        self._kernel(_KERNELS[name], outer, correlation, COMPUTE_STREAM, launch + 8, device_us)
        self._host = launch + taken + 2
        self._cpu_op(name, outer, tid, start, self._host - start, shapes)
        self._host += 1.5

    def _reduce(self, elements: int) -> None:
        """A gradient reduction on the communication stream."""
        self._id += 1
        self._sequence += 1
        args = _COLLECTIVE_ARGS.format(
            elements=elements,
            size=self._world_size,
            ranks=list(range(self._world_size)),
            sequence=self._sequence,
        )
        self._cpu_op("record_param_comms", self._id, AUTOGRAD, self._host, 12.0, f"[[{elements}]]", args)
        correlation = self._launch("cudaLaunchKernelExC", AUTOGRAD, self._id, self._host + 3, 7.0)
        ready = max(self._host + 12, self._device_free[COMPUTE_STREAM])
        device_us = 900 + 20 * self._dice.random()
        self._kernel(_ALL_REDUCE, self._id, correlation, COMM_STREAM, ready, device_us, args)
        self._host += 15

    def _cpu_op(
        self, name: str, external_id: int, tid: int, ts: float, dur: float, shapes: str, more: str = ""
    ) -> None:
        args = _OPERATOR_ARGS.format(id=external_id, shapes=shapes, more=more)
        self._complete("cpu_op", name, HOST_PID, tid, ts, dur, args)

    def _launch(self, name: str, tid: int, external_id: int, ts: float, dur: float) -> int:
        self._id += 1
        self._call(name, tid, external_id, self._id, ts, dur)
        self._flow("s", "ac2g", self._id, HOST_PID, tid, ts)
        return self._id

    def _call(self, name: str, tid: int, external_id: int, correlation: int, ts: float, dur: float) -> None:
        args = f'"External id": {external_id}, "cbid": 211, "correlation": {correlation}'
        self._complete("cuda_runtime", name, HOST_PID, tid, ts, dur, args)

    def _kernel(
        self, name: str, external_id: int, correlation: int, stream: int, ready: float, dur: float, more: str = ""
    ) -> None:
        ts = max(ready, self._device_free[stream])
        self._device_free[stream] = ts + dur
        args = _KERNEL_ARGS.format(id=external_id, stream=stream, correlation=correlation, more=more)
        self._complete("kernel", name, 0, stream, ts, dur, args)
        self._flow("f", "ac2g", correlation, 0, stream, ts)

    def _range(self, name: str, ts: float, dur: float, *, on_device: bool = False) -> None:
        self._id += 1
        cat = "gpu_user_annotation" if on_device else "user_annotation"
        track = (0, COMPUTE_STREAM) if on_device else (HOST_PID, MAIN)
        self._complete(cat, name, *track, ts, dur, f'"External id": {self._id}')

    def _function(self, name: str, ts: float, dur: float) -> None:
        self._id += 1
        args = f'"Python parent id": {self._id - 1}, "Python id": {self._id}, "Ev Idx": {self._id}'
        self._complete("python_function", name, HOST_PID, MAIN, ts, dur, args)

    def _complete(self, cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: str) -> None:
        self._text(_COMPLETE.format(cat=cat, name=name, pid=pid, tid=tid, ts=ts, dur=dur, args=args))

    def _flow(self, phase: str, cat: str, number: int, pid: int, tid: int, ts: float) -> None:
        more = ', "bp": "e"' if phase == "f" else ""
        self._text(_FLOW.format(phase=phase, cat=cat, number=number, pid=pid, tid=tid, ts=ts, more=more))


def write_rank(path: Path, rank: int, world_size: int, size: int, *, python: bool = False) -> int:
    """Write a trace of about ``size`` unpacked bytes, packed where the name ends in ``.gz``; its exact size."""
    with gzip.open(path, "wt", compresslevel=6) if path.suffix == ".gz" else path.open("w") as stream:
        trace = RankTrace(stream.write, rank, world_size, python=python)
        trace.begin()
        number = 0
        while trace.bytes_written < size or number < 2:
            trace.step(number)
            number += 1
        trace.end()
    return trace.bytes_written


def write_set(folder: Path, ranks: int, size: int, *, packed: bool, python: bool = False) -> int:
    """Write the traces of ``ranks`` ranks of ``size`` bytes each; how many bytes they are unpacked."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".json.gz" if packed else ".json"
    return sum(write_rank(folder / f"rank{rank}{suffix}", rank, ranks, size, python=python) for rank in range(ranks))


def main() -> int:
    """Write the set that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=64, help="unpacked size of each rank's trace (default 64)")
    parser.add_argument("--gzip", action="store_true", help="pack the files")
    parser.add_argument("--python", action="store_true", help="with Python functions")
    options = parser.parse_args()
    size = int(options.megabytes * 1e6)
    written = write_set(options.folder, options.ranks, size, packed=options.gzip, python=options.python)
    print(f"{options.folder}: {options.ranks} ranks, {written / 1e6:.0f} MB unpacked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
