"""The trainings that ``whatif_real.py`` plays: the ones its documented table is made of, and others drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

MEGABITS: Final = 1000.0


@dataclass(frozen=True)
class Change:
    """What is asked of PerfScope, and the fields of ``whatif_job.Setup`` that make it real."""

    setting: str
    value: str
    real: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.setting}={self.value}"


@dataclass(frozen=True)
class Scene:
    """One recording and the changes predicted from it."""

    name: str
    setup: dict[str, Any]
    changes: tuple[Change, ...]

    @property
    def throttled(self) -> bool:
        return "megabits" in self.setup


def _workers(*numbers: int) -> tuple[Change, ...]:
    return tuple(Change("dataloader.num_workers", str(number), {"workers": number}) for number in numbers)


def _threads(*numbers: int) -> tuple[Change, ...]:
    return tuple(Change("env.OMP_NUM_THREADS", str(number), {"threads": number}) for number in numbers)


def _buckets(*sizes: float) -> tuple[Change, ...]:
    return tuple(Change("ddp.bucket_cap_mb", f"{size:g}", {"bucket_mb": size}) for size in sizes)


def _stages(*stages: tuple[str, str]) -> tuple[Change, ...]:
    return tuple(Change("zero.stage", stage, {"strategy": strategy}) for stage, strategy in stages)


def _checkpoints(before: int, *after: int) -> tuple[Change, ...]:
    return tuple(Change("activations.recompute", f"{left / before:g}", {"checkpoint": left}) for left in after)


SCENES: Final = (
    Scene("a dataset that waits", {"load_sleep_ms": 40, "batch": 256}, _workers(1, 2)),
    Scene("a dataset that waits, 1 worker", {"load_sleep_ms": 200, "workers": 1}, _workers(2)),
    Scene("a dataset that computes", {"load_products": 60, "batch": 256}, _workers(1, 2)),
    Scene("4 OMP threads per rank", {"threads": 4, "batch": 256}, _threads(1)),
    Scene("2 OMP threads per rank", {"threads": 2, "batch": 256}, _threads(1)),
    Scene("8 blocks again", {"checkpoint": 8, "blocks": 8, "batch": 256}, _checkpoints(8, 0, 4)),
    Scene(
        "8 blocks again, reentrant", {"checkpoint": 8, "reentrant": True, "blocks": 8, "batch": 256}, _checkpoints(8, 0)
    ),
    Scene("a slow rank", {"slow_ms": 100, "batch": 256}, (Change("rank.1", "peers", {"slow_ms": 0}),)),
    Scene(
        "network",
        {"megabits": MEGABITS, "bucket_mb": 4, "batch": 256},
        (
            *_buckets(1, 25),
            Change("network.bandwidth", "2x", {"megabits": 2 * MEGABITS}),
            Change("network.bandwidth", "0.5x", {"megabits": MEGABITS / 2}),
            Change("ddp.comm_dtype", "bf16", {"bf16_hook": True}),
        ),
    ),
    Scene("one bucket", {"megabits": MEGABITS, "bucket_mb": 100, "batch": 256}, _buckets(4, 2)),
    Scene(
        "accumulation",
        {"megabits": MEGABITS, "accumulate": 4, "batch": 128},
        (Change("ddp.no_sync", "true", {"no_sync": True}),),
    ),
    Scene(
        "DDP",
        {"megabits": MEGABITS, "batch": 256},
        _stages(("3", "full_shard"), ("2", "shard_grad_op"), ("1", "zero1")),
    ),
    *(
        Scene(
            name,
            {"strategy": "by_hand", "blocks": 24, "width": 256, "batch": 512, **link},
            tuple(Change("gradients.reduce", way, {"strategy": way}) for way in ("ddp", "flat")),
        )
        for name, link in (("by hand", {}), ("by hand, slow link", {"megabits": MEGABITS}))
    ),
    Scene(
        "FULL_SHARD",
        {"megabits": MEGABITS, "strategy": "full_shard", "batch": 256},
        (
            *_stages(("2", "shard_grad_op"), ("0", "ddp")),
            Change("network.bandwidth", "2x", {"megabits": 2 * MEGABITS}),
        ),
    ),
)


def drawn(seed: int) -> tuple[Scene, ...]:
    """The same kinds of scenes as ``SCENES`` with sizes, times, links and asked values drawn at random."""
    draw = random.Random(seed)

    def model() -> dict[str, Any]:
        return {
            "blocks": draw.randint(3, 8),
            "width": draw.choice((320, 448, 576, 704)),
            "batch": draw.choice((96, 160, 224, 320)),
        }

    def link() -> dict[str, Any]:
        return {**model(), "megabits": float(draw.choice((400, 600, 800, 1500, 2500)))}

    network, fsdp = link(), link()
    sleeping, computing, one_worker = model(), model(), model()
    return (
        Scene(
            "a dataset that waits",
            {**sleeping, "load_sleep_ms": draw.randint(15, 120)},
            _workers(1, draw.choice((2, 3))),
        ),
        Scene(
            "a dataset that waits, 1 worker",
            {**one_worker, "load_sleep_ms": draw.randint(100, 300), "workers": 1},
            _workers(draw.choice((2, 3))),
        ),
        Scene("a dataset that computes", {**computing, "load_products": draw.randint(20, 120)}, _workers(1, 2)),
        Scene(
            "a slow rank", {**model(), "slow_ms": draw.randint(20, 150)}, (Change("rank.1", "peers", {"slow_ms": 0}),)
        ),
        Scene(
            "network",
            {**network, "bucket_mb": draw.choice((2, 3, 6))},
            (
                *_buckets(1, draw.choice((10, 25, 50))),
                *(
                    Change("network.bandwidth", f"{times:g}x", {"megabits": times * network["megabits"]})
                    for times in (draw.choice((1.5, 2, 4)), draw.choice((0.5, 0.7)))
                ),
                Change("ddp.comm_dtype", "bf16", {"bf16_hook": True}),
            ),
        ),
        Scene("one bucket", {**link(), "bucket_mb": 100}, _buckets(draw.choice((3, 4, 6)), 2)),
        Scene(
            "accumulation",
            {**link(), "megabits": MEGABITS, "accumulate": draw.choice((2, 3))},
            (Change("ddp.no_sync", "true", {"no_sync": True}),),
        ),
        Scene("DDP", link(), _stages(("3", "full_shard"), ("2", "shard_grad_op"), ("1", "zero1"))),
        Scene(
            "by hand",
            {**link(), "strategy": "by_hand", "blocks": draw.randint(12, 32), "width": draw.choice((192, 320))},
            tuple(Change("gradients.reduce", way, {"strategy": way}) for way in ("ddp", "flat")),
        ),
        Scene(
            "FULL_SHARD",
            {**fsdp, "strategy": "full_shard"},
            (
                *_stages(("2", "shard_grad_op"), ("0", "ddp")),
                Change("network.bandwidth", "2x", {"megabits": 2 * fsdp["megabits"]}),
            ),
        ),
    )
