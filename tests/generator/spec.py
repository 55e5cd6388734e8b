"""What a simulated job looks like, and the causes that can be planted in it.

Times are int ns, bandwidths GB/s (10^9 bytes a second, so also bytes per ns), sizes bytes. Everything is a frozen
value: ``spec.without(cause)`` is the same job without one cause, which is how the generator knows what a cause costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

MIB = 1 << 20
US = 1_000
MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A stack of two-matrix blocks (width -> hidden -> width), every dimension known, so FLOPs are too."""

    layers: int = 4
    tokens: int = 8192
    """Rows of a rank's batch."""
    width: int = 1024
    hidden: int = 4096
    flops_per_ns: float = 156_000.0
    """Speed at which matrix products run: 156 TFLOP/s is half an A100's bf16 peak."""
    small_kernel_ns: int = 20 * US
    """An element-wise kernel."""
    optimizer_kernel_ns: int = 100 * US
    optimizer_kernels: int = 3
    element_bytes: int = 2
    """2 is bf16, 4 is fp32: parameters, gradients and what travels."""

    @property
    def layer_parameters(self) -> int:
        """Elements in one layer's two weight matrices."""
        return 2 * self.width * self.hidden

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's gradients."""
        return self.layer_parameters * self.element_bytes

    @property
    def matrix_flops(self) -> int:
        """One matrix product, multiply and add counted: forward or either half of backward, all the same size."""
        return 2 * self.tokens * self.width * self.hidden

    @property
    def flops_per_step(self) -> int:
        """Forward (2 products a layer) and backward (4 products a layer) of one rank."""
        return 6 * self.layers * self.matrix_flops

    @property
    def matrix_ns(self) -> int:
        """Duration of one matrix product."""
        return round(self.matrix_flops / self.flops_per_ns)


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What the training process's own work costs."""

    operator_ns: int = 6 * US
    """Framework time of one operator, launches not included."""
    launch_ns: int = 4 * US
    """One launch call."""
    event_ns: int = 1 * US
    """One call that records an event or makes a stream wait for one."""
    python_ns: int = 2 * US
    """Python between two operators."""
    latency_ns: int = 0
    """From the end of a launch call to the earliest start on the device."""
    sync_return_ns: int = 5 * US
    """From the end of the awaited work to the return of the synchronising call."""


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """A data loader: ``workers`` 0 loads inside ``__next__``."""

    workers: int = 2
    load_ns: int = 1 * MS
    """Time of one worker for one batch."""
    prefetch: int = 2
    """Batches each worker is asked for ahead."""
    next_ns: int = 20 * US
    """Cost of ``__next__`` itself when the batch is there."""


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """Every collective takes alpha + f(n) * bytes / busbw once the last rank has arrived."""

    alpha_ns: int = 20 * US
    busbw_gbps: float = 230.0
    end_jitter_ns: int = 0
    """Ranks leave a collective up to this much apart."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Something planted. ``ranks`` None: all; ``steps`` None: every step, warm-up included."""

    category: ClassVar[str] = ""
    """The account's name for it; empty when it is not charged to ranks."""
    ranks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None

    def hits(self, rank: int, step: int) -> bool:
        """Whether this rank suffers from it in this step."""
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
    """A range of this name lies over it; None: nothing shows but the gap."""


@dataclass(frozen=True, kw_only=True)
class HostSync(Cause):
    """``loss.item()`` between forward and backward."""

    category = "sync"


@dataclass(frozen=True, kw_only=True)
class SlowCopy(Cause):
    """The batch takes ``factor`` times as long to reach the device."""

    category = "copy"
    factor: float


@dataclass(frozen=True, kw_only=True)
class SlowLink(Cause):
    """The network moves bytes ``factor`` times as slowly, for all: a ring runs at its slowest link."""

    category = "communication"
    factor: float


@dataclass(frozen=True, kw_only=True)
class SmallBuckets(Cause):
    """Gradients are reduced in buckets of ``bucket_bytes``."""

    category = "communication"
    bucket_bytes: int


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A whole job. Defaults: a healthy 4-rank DDP job on A100s, 8 recorded steps of about 11 ms."""

    ranks: int = 4
    steps: int = 8
    """Recorded steps."""
    warmup: int = 3
    """Steps simulated before the recording begins."""
    first_step: int = 10
    """Number of the first recorded step."""
    backend: str = "nccl"
    """``nccl`` (on devices) or ``gloo`` (on CPUs)."""
    strategy: str = "ddp"
    """``ddp`` or ``fsdp`` (on devices only)."""
    model: ModelSpec = field(default_factory=ModelSpec)
    host: HostSpec = field(default_factory=HostSpec)
    loader: LoaderSpec = field(default_factory=LoaderSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    bucket_bytes: int = 25 * MIB
    """A bucket is reduced once it holds this much."""
    first_bucket_bytes: int = 1 * MIB
    """The same for a step's first bucket, as DDP has it."""
    copy_ns: int = 30 * US
    """Copying one batch to the device."""
    end_sync: bool = False
    """``loss.item()`` after the optimizer, as scripts that print the loss do."""
    noise: float = 0.0
    """Relative standard deviation of every kernel's and operator's duration."""
    seed: int = 0
    causes: tuple[Cause, ...] = ()
    clock_offsets_ns: Mapping[int, int] = field(default_factory=dict)
    """What each rank's clock shows too much."""
    start_skew_ns: Mapping[int, int] = field(default_factory=dict)
    """How much later than the others a rank begins."""
    device_name: str = "NVIDIA A100-SXM4-80GB"

    def __post_init__(self) -> None:
        if self.backend not in ("nccl", "gloo") or self.strategy not in ("ddp", "fsdp"):
            raise ValueError(f"no such job: backend {self.backend!r}, strategy {self.strategy!r}")
        if self.backend == "gloo" and self.strategy != "ddp":
            raise ValueError("the gloo flavour trains with ddp only")
        if self.ranks < 1 or self.steps < 1:
            raise ValueError(f"a job needs a rank and a step, got {self.ranks} and {self.steps}")

    @property
    def recorded_steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps."""
        return tuple(range(self.first_step, self.first_step + self.steps))

    def without(self, *causes: Cause) -> JobSpec:
        """The same job without these causes."""
        return dataclasses.replace(self, causes=tuple(cause for cause in self.causes if cause not in causes))

    def factor(self, kind: type[SlowCompute | SlowHost | SlowCopy], rank: int, step: int) -> float:
        """Product of the factors of all causes of one kind that hit this rank in this step."""
        result = 1.0
        for cause in self.causes:
            if isinstance(cause, kind) and cause.hits(rank, step):
                result *= cause.factor
        return result

    def link_factor(self, step: int) -> float:
        """How many times as long the network takes for its bytes in this step."""
        slow = [c.factor for c in self.causes if isinstance(c, SlowLink) and (c.steps is None or step in c.steps)]
        return math.prod(slow)

    def load_ns(self, rank: int, step: int) -> int:
        """How long one batch takes to load."""
        slow = [cause.load_ns for cause in self.causes if isinstance(cause, SlowLoader) and cause.hits(rank, step)]
        return max([self.loader.load_ns, *slow])

    def pauses(self, rank: int, step: int) -> list[Pause]:
        """Pauses of this rank in this step."""
        return [cause for cause in self.causes if isinstance(cause, Pause) and cause.hits(rank, step)]

    def syncs_forward(self, rank: int, step: int) -> bool:
        """Whether this rank synchronises between forward and backward."""
        return any(isinstance(cause, HostSync) and cause.hits(rank, step) for cause in self.causes)

    def bucket_limit(self, first: bool) -> int:
        """Bucket size with planted causes in force."""
        planted = [cause.bucket_bytes for cause in self.causes if isinstance(cause, SmallBuckets)]
        return min([self.bucket_bytes, *planted, *([self.first_bucket_bytes] if first else [])])


def cpu_job(**changes: object) -> JobSpec:
    """A healthy 4-rank gloo job: fp32, small matrices, steps of about 22 ms; ``changes`` override fields of JobSpec."""
    base = JobSpec(
        backend="gloo",
        model=ModelSpec(
            tokens=512, width=256, hidden=1024, flops_per_ns=250.0, small_kernel_ns=100 * US,
            optimizer_kernel_ns=200 * US, element_bytes=4,
        ),
        host=HostSpec(operator_ns=3 * US, python_ns=5 * US),
        network=NetworkSpec(alpha_ns=100 * US, busbw_gbps=10.0),
        bucket_bytes=4 * MIB,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
