"""A caching allocator and a training on it, simulated: snapshots as torch writes them, with the truth beside them.

Sizes and splits follow ``c10/cuda/CUDACachingAllocator.cpp``: blocks are rounded to 512 bytes, requests up to 1 MiB
share segments of 2 MiB, those below 10 MiB segments of 20 MiB, larger ones get segments of their own, rounded to
2 MiB. The form of the document is that of ``memorySnapshot`` in ``torch/csrc/cuda/Module.cpp``. Nothing is shared with
the analyzers.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
START_US = 1_800_000_000_000_000

Stack = list[dict[str, Any]]


def stack(*calls: tuple[str, int, str]) -> Stack:
    """Calls as torch records them, the innermost first."""
    return [{"filename": file, "line": line, "name": name} for file, line, name in calls]


TORCH = "/usr/lib/python3.12/site-packages/torch"
MAIN = ("/home/jdoe/acme/train.py", 40, "main")
SETUP = stack((f"{TORCH}/nn/modules/linear.py", 106, "__init__"), ("/home/jdoe/acme/model.py", 12, "__init__"), MAIN)
CALL = (f"{TORCH}/nn/modules/module.py", 1775, "_call_impl")
FORWARD = stack(
    (f"{TORCH}/nn/modules/linear.py", 134, "forward"), CALL, ("/home/jdoe/acme/model.py", 30, "forward"), CALL, MAIN
)
BACKWARD: Stack = []
"""Autograd's thread runs no Python."""
STATES = stack((f"{TORCH}/optim/adam.py", 170, "_init_group"), (f"{TORCH}/optim/adam.py", 233, "step"), MAIN)
UPDATE = stack((f"{TORCH}/optim/adam.py", 600, "_multi_tensor_adam"), (f"{TORCH}/optim/adam.py", 233, "step"), MAIN)
LEAK = stack((f"{TORCH}/_tensor.py", 9, "clone"), ("/home/jdoe/acme/train.py", 55, "remember"), MAIN)


class OutOfMemory(Exception):
    """The device is full."""


class Allocator:
    """One device of ``capacity`` bytes."""

    def __init__(self, capacity: int = 80 * GIB, *, history: bool = True, expandable: bool = False) -> None:
        self.capacity = capacity
        self.expandable = expandable
        self.history = history
        self.segments: list[dict[str, Any]] = []
        self.trace: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, Stack]] = {}
        """Address -> requested bytes and stack."""
        self.peak = 0
        self.at_peak: dict[int, tuple[int, Stack]] = {}
        self._next = 0x7F00_0000_0000

    def alloc(self, size: int, frames: Stack, label: str = "") -> int:
        rounded = -(-size // 512) * 512
        block = self._best(rounded) or self._grow(rounded, frames) or self._after_release(rounded, size, frames)
        segment, at = block
        self._split(segment, at, rounded)
        found = segment["blocks"][at]
        found.update(state="active_allocated", requested_size=size, frames=frames)
        self.live[found["address"]] = (size, frames)
        self._note("alloc", found["address"], size, frames, label)
        total = self.allocated
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.live)
        return int(found["address"])

    def free(self, address: int) -> None:
        size, _ = self.live.pop(address)
        self._note("free_requested", address, size, [])
        self._note("free_completed", address, size, [])
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["address"] == address:
                    block.update(state="inactive", requested_size=0, frames=[])
                    self._merge(segment)
                    return

    @property
    def allocated(self) -> int:
        return sum(size for size, _ in self.live.values())

    @property
    def reserved(self) -> int:
        return sum(segment["total_size"] for segment in self.segments)

    def _best(self, size: int) -> tuple[dict[str, Any], int] | None:
        kind = "small" if size <= MIB else "large"
        free = [
            (block["size"], index, at)
            for index, segment in enumerate(self.segments)
            if segment["segment_type"] == kind
            for at, block in enumerate(segment["blocks"])
            if block["state"] == "inactive" and block["size"] >= size
        ]
        if not free:
            return None
        _, index, at = min(free)
        return self.segments[index], at

    def _grow(self, size: int, frames: Stack) -> tuple[dict[str, Any], int] | None:
        total = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + total > self.capacity:
            return None
        address, self._next = self._next, self._next + total + 2 * MIB
        segment = {
            "device": 0, "address": address, "total_size": total, "stream": 0,
            "segment_type": "small" if size <= MIB else "large", "segment_pool_id": (0, 0),
            "is_expandable": self.expandable, "frames": frames,
            "blocks": [{"address": address, "size": total, "requested_size": 0, "state": "inactive", "frames": []}],
        }  # fmt: skip
        self.segments.append(segment)
        self._note("segment_map" if self.expandable else "segment_alloc", address, total, frames)
        return segment, 0

    def _after_release(self, rounded: int, size: int, frames: Stack) -> tuple[dict[str, Any], int]:
        for segment in [each for each in self.segments if all(b["state"] == "inactive" for b in each["blocks"])]:
            self.segments.remove(segment)
            self._note("segment_free", segment["address"], segment["total_size"], [])
        block = self._grow(rounded, frames)
        if block is None:
            self._note("oom", self.capacity - self.reserved, size, frames)
            raise OutOfMemory
        return block

    def _split(self, segment: dict[str, Any], at: int, size: int) -> None:
        block = segment["blocks"][at]
        rest = block["size"] - size
        if rest >= (512 if segment["segment_type"] == "small" else MIB + 1):
            block["size"] = size
            segment["blocks"].insert(at + 1, {
                "address": block["address"] + size, "size": rest, "requested_size": 0, "state": "inactive",
                "frames": [],
            })  # fmt: skip

    def _merge(self, segment: dict[str, Any]) -> None:
        merged: list[dict[str, Any]] = []
        for block in segment["blocks"]:
            if merged and merged[-1]["state"] == block["state"] == "inactive":
                merged[-1]["size"] += block["size"]
            else:
                merged.append(block)
        segment["blocks"] = merged

    def _note(self, action: str, address: int, size: int, frames: Stack, label: str = "") -> None:
        if self.history:
            self.trace.append({
                "action": action, "device_free" if action == "oom" else "addr": address, "size": size, "stream": 0,
                "time_us": START_US + 10 * len(self.trace), "compile_context": "N/A", "user_metadata": label,
                "pool_id": (0, 0), "frames": frames,
            })  # fmt: skip

    def document(self, last: int | None = None) -> dict[str, Any]:
        """The snapshot; ``last``: the ring buffer held so many actions."""
        segments = [
            {
                **segment,
                "allocated_size": sum(b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"),
                "active_size": sum(b["size"] for b in segment["blocks"] if b["state"] != "inactive"),
                "requested_size": sum(b["requested_size"] for b in segment["blocks"]),
            }
            for segment in self.segments
        ]
        return {
            "segments": segments,
            "device_traces": [self.trace[-last:] if last else self.trace],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
                "expandable_segments": self.expandable, "roundup_power2_divisions": {"1": 0},
            },
            "external_annotations": [],
        }  # fmt: skip

    def dump(self, path: Path, last: int | None = None) -> None:
        path.write_bytes(pickle.dumps(self.document(last)))


def train(
    allocator: Allocator, steps: int = 8, *, layers: int = 4, weights: int = 24 * MIB, activations: int = 48 * MIB,
    leak: int = 0,
) -> None:  # fmt: skip
    """A loop with Adam; ``leak`` bytes are kept in each step."""
    for _ in range(layers):
        allocator.alloc(weights, SETUP)
    states = []
    for step in range(steps):
        kept = [allocator.alloc(activations - 100, FORWARD) for _ in range(layers)]
        if leak:
            allocator.alloc(leak, LEAK)
        gradients = []
        while kept:
            gradients.append(allocator.alloc(weights, BACKWARD))
            allocator.free(kept.pop())
        if step == 0:
            states = [allocator.alloc(weights, STATES) for _ in range(2 * layers)]
        scratch = allocator.alloc(weights, UPDATE)
        allocator.free(scratch)
        for gradient in gradients:
            allocator.free(gradient)
    assert states or not steps
