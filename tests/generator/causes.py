"""What can be planted in a job. ``job.lost_ns(cause)`` is what it costs: the step time with it less that without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A planted cause. ``ranks`` None: all; ``steps`` None: every step, warm-up included."""

    category: ClassVar[str] = ""
    """What stragglers' causes are called in results; empty when it is not attributed to ranks."""
    ranks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None

    def hits(self, rank: int, step: int) -> bool:
        """Whether it affects this rank in this step."""
        return (self.ranks is None or rank in self.ranks) and (self.steps is None or step in self.steps)


@dataclass(frozen=True, kw_only=True)
class SlowCompute(Cause):
    """Compute kernels (on CPU: operators) take ``factor`` times as long."""

    category = "compute"
    factor: float


@dataclass(frozen=True, kw_only=True)
class SlowLoader(Cause):
    """A batch takes ``load_ns`` to load."""

    category = "dataloader"
    load_ns: int


@dataclass(frozen=True, kw_only=True)
class SlowHost(Cause):
    """An operator costs the host ``factor`` times as much: launch-bound once that exceeds its kernels."""

    category = "launch"
    factor: float


@dataclass(frozen=True, kw_only=True)
class Pause(Cause):
    """The process does something else for ``pause_ns`` before the forward pass: garbage collection, a checkpoint."""

    category = "host"
    pause_ns: int
    name: str | None = None
    """A range of this name lies over it; None: only the gap is visible."""


@dataclass(frozen=True, kw_only=True)
class RotatingPause(Pause):
    """A pause on another rank each time: every ``every`` steps the next of ``ranks`` (None: of all), as
    garbage collection does that each process starts by its own count of objects.

    With 4 ranks and every second step: rank 0 in step 8, rank 1 in step 10, rank 2 in step 12.
    """

    every: int = 1

    def pauses(self, rank: int, step: int, ranks: int) -> bool:
        """Whether it is this rank's turn in this step of a job of ``ranks``."""
        if step % self.every or (self.steps is not None and step not in self.steps):
            return False
        members = range(ranks) if self.ranks is None else self.ranks
        return members[step // self.every % len(members)] == rank


@dataclass(frozen=True, kw_only=True)
class HostSync(Cause):
    """``loss.item()`` between forward and backward; in a pipeline after the last forward of the step."""

    category = "sync"


@dataclass(frozen=True, kw_only=True)
class SlowCopy(Cause):
    """The batch takes ``factor`` times as long to reach the device."""

    category = "copy"
    factor: float


@dataclass(frozen=True, kw_only=True)
class SlowLink(Cause):
    """The network moves bytes ``factor`` times as slowly, for all: a ring runs at its slowest link.

    ``hosts``: it is these hosts' links that are slow, which slows only what leaves one of them: collectives whose group
    has ranks on it and elsewhere, and sends from it or to it.
    """

    category = "communication"
    factor: float
    hosts: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SmallBuckets(Cause):
    """Gradients are reduced in buckets of ``bucket_bytes``."""

    category = "communication"
    bucket_bytes: int


@dataclass(frozen=True, kw_only=True)
class ReduceEachMicrobatch(Cause):
    """Gradients are reduced after every micro-batch, not after the last only: accumulation without ``no_sync``."""

    category = "communication"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Cause):
    """After the optimizer's step the model is evaluated on ``batches`` batches: forward passes alone. Not in pipelines;
    where the forward pass communicates, all ranks must take part.
    """

    batches: int = 2
    marked: bool = True
    """It lies in a range of the recorder's."""


@dataclass(frozen=True, kw_only=True)
class ExtraLayers(Cause):
    """These pipeline stages have ``layers`` more than the others: more work, not slower work."""

    stages: tuple[int, ...]
    layers: int = 1
