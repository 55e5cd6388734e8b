"""What a simulated job looks like: everything is a frozen value. ``spec.without(cause)`` is the same job without one
cause, which is how the generator knows what a cause costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.generator.causes import (
    Cause,
    Evaluation,
    ExtraLayers,
    HostSync,
    Pause,
    ReduceEachMicrobatch,
    RotatingPause,
    SlowCompute,
    SlowCopy,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
)
from tests.generator.layout import Group, Layout
from tests.generator.parts import MIB, US, HostSpec, LoaderSpec, ModelSpec, NetworkSpec, PipelineSpec

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "pipeline")
METADATA = ("kernel", "numbered", "operator", "none")
RECOMPUTE = ("none", "reentrant", "non_reentrant")


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
    """``ddp``; on devices also ``fsdp``, ``zero1``, ``zero2``, ``zero3`` and ``pipeline``."""
    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages; more than 1 with strategy ``pipeline`` only."""
    replicas: int = 1
    """Copies of the model that are each sharded over a part of the data parallel ranks; more than 1 with ``fsdp`` only:
    hybrid sharding."""
    microbatches: int = 1
    """(Micro-)batches of a step: passed through the pipeline, elsewhere gradients accumulated."""
    schedule: PipelineSpec = field(default_factory=PipelineSpec)
    recompute: str = "none"
    """Activation checkpointing of every layer: ``reentrant`` or ``non_reentrant``, as torch's checkpoint has them."""
    clip_norm: bool = False
    """The gradients' norm is reduced over all ranks that hold parts of the model before the optimizer."""
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
    ranks_per_host: int = 8
    """Consecutive ranks share a host; a rank's device is its number there."""
    clock_offsets_ns: Mapping[int, int] = field(default_factory=dict)
    """How far each rank's clock is ahead."""
    host_clock_offsets_ns: Mapping[int, int] = field(default_factory=dict)
    """How far each host's clock is ahead, on top."""
    host_drift_ppm: Mapping[int, float] = field(default_factory=dict)
    """How much too fast each host's clock runs: recorded time = offset + true time x (1 + drift)."""
    start_skew_ns: Mapping[int, int] = field(default_factory=dict)
    """How much later than the others a rank begins."""
    device_name: str = "NVIDIA A100-SXM4-80GB"
    metadata: str = "kernel"
    """What describes a collective: its ``kernel`` and the operator that launched it; there with its number too
    (``numbered``, as the newest torch does; others number it on the operator); on the ``operator`` only; or nowhere
    (``none``)."""
    groups: str = "megatron"
    """Whose descriptions the process groups carry: ``megatron`` or ``mesh``."""

    def __post_init__(self) -> None:
        if self.backend not in ("nccl", "gloo") or self.strategy not in STRATEGIES:
            raise ValueError(f"no such job: backend {self.backend!r}, strategy {self.strategy!r}")
        if self.metadata not in METADATA or self.recompute not in RECOMPUTE:
            raise ValueError(f"no such job: metadata {self.metadata!r}, recompute {self.recompute!r}")
        if self.ranks < 1 or self.steps < 1 or self.microbatches < 1 or self.ranks_per_host < 1:
            raise ValueError(f"a job needs a rank, a step and a micro-batch, got {self}")
        if self.backend == "gloo" and (self.strategy != "ddp" or self.tensor > 1 or self.clip_norm):
            raise ValueError("the gloo backend trains with ddp only")
        if self.replicas > 1 and self.strategy != "fsdp":
            raise ValueError(f"strategy {self.strategy!r} has no replicas")
        if self.pipeline > 1 and self.strategy != "pipeline":
            raise ValueError(f"strategy {self.strategy!r} has no stages")
        if self.model.hidden % self.layout.tensor or self.model.layers % (self.pipeline * self.schedule.chunks):
            raise ValueError(f"the model's {self.model.layers} layers of {self.model.hidden} cannot be divided so")
        if self.schedule.chunks > 1 and self.microbatches % self.pipeline:
            raise ValueError("an interleaved schedule needs a multiple of its stages in micro-batches")

    @functools.cached_property
    def layout(self) -> Layout:
        """Which rank does what."""
        return Layout(self.ranks, self.tensor, self.pipeline, self.groups, self.replicas)

    @functools.cached_property
    def recorded_steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps."""
        return tuple(range(self.first_step, self.first_step + self.steps))

    @functools.cached_property
    def rank_model(self) -> ModelSpec:
        """The model as one rank sees it: tensor parallelism leaves it a part of the hidden dimension."""
        return dataclasses.replace(self.model, hidden=self.model.hidden // self.tensor)

    @functools.cached_property
    def _groups(self) -> dict[int, dict[str, Group]]:
        mine: dict[int, dict[str, Group]] = {rank: {} for rank in range(self.ranks)}
        for role, groups in self.layout.groups().items():
            for group in groups:
                for rank in group.ranks:
                    mine[rank][role] = group
        return mine

    def groups_of(self, rank: int) -> dict[str, Group]:
        """A rank's process groups by role; the default group is ``world``."""
        return self._groups[rank]

    def group(self, rank: int, role: str) -> Group | None:
        """A rank's group of one role, None where it would be alone in it. Data parallel ranks that are all the ranks
        use the default group."""
        groups = self._groups[rank]
        if role == "data" and self.layout.data == self.ranks > 1:
            return groups["world"]
        return groups.get(role)

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return self.layout.coordinates(rank)[2]

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Ranks of a pipeline stage."""
        return tuple(rank for rank in range(self.ranks) if self.stage_of(rank) == stage)

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.ranks // self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.ranks_per_host

    def host_name(self, rank: int) -> str:
        """What its host is called."""
        return f"node{self.host_of(rank)}"

    def device_of(self, rank: int) -> int:
        """The rank's device on its host: its local rank."""
        return rank % self.ranks_per_host

    def ranks_of_host(self, host: int) -> tuple[int, ...]:
        """Ranks on a host."""
        return tuple(rank for rank in range(self.ranks) if self.host_of(rank) == host)

    def layers_of(self, stage: int, chunk: int = 0) -> int:
        """Layers of one chunk of a stage; what a stage has too many is in its last chunk."""
        extra = [cause.layers for cause in self.causes if isinstance(cause, ExtraLayers) and stage in cause.stages]
        chunks = self.schedule.chunks
        return self.model.layers // (self.pipeline * chunks) + (sum(extra) if chunk == chunks - 1 else 0)

    def model_flops(self, rank: int) -> int:
        """Forward (2 products per layer) and backward (4) of one rank's part of a step, recomputation left out."""
        return 6 * self._layers(rank) * self.rank_model.matrix_flops * self.microbatches

    def hardware_flops(self, rank: int) -> int:
        """The same with recomputation: all of forward again, or, where it stops at the last tensor that backward
        needs, all but the last product of each layer."""
        again = {"none": 0, "reentrant": 2, "non_reentrant": 1}[self.recompute]
        return self.model_flops(rank) // 6 * (6 + again)

    def _layers(self, rank: int) -> int:
        return sum(self.layers_of(self.stage_of(rank), chunk) for chunk in range(self.schedule.chunks))

    def without(self, *causes: Cause) -> JobSpec:
        """The same job without these causes."""
        return dataclasses.replace(self, causes=tuple(cause for cause in self.causes if cause not in causes))

    def in_microbatches(self, count: int) -> JobSpec:
        """The same batch in ``count`` micro-batches, whose kernels all take in proportion."""
        times = count / self.microbatches
        model = dataclasses.replace(
            self.model,
            tokens=round(self.model.tokens / times),
            small_kernel_ns=round(self.model.small_kernel_ns / times),
        )
        return dataclasses.replace(self, microbatches=count, model=model)

    def factor(self, kind: type[SlowCompute | SlowHost | SlowCopy], rank: int, step: int) -> float:
        """Product of the factors of all causes of one kind that affect this rank in this step."""
        result = 1.0
        for cause in self.causes:
            if isinstance(cause, kind) and cause.hits(rank, step):
                result *= cause.factor
        return result

    def link_factor(self, step: int, ranks: tuple[int, ...] = ()) -> float:
        """How many times as long the network takes in this step for what these ranks exchange; without ranks, for what
        leaves no host."""
        slow = [cause for cause in self.causes if isinstance(cause, SlowLink)]
        if not slow:
            return 1.0
        hosts = {self.host_of(rank) for rank in ranks}
        return math.prod(
            cause.factor
            for cause in slow
            if (cause.steps is None or step in cause.steps)
            and (cause.hosts is None or (len(hosts) > 1 and not hosts.isdisjoint(cause.hosts)))
        )

    def load_ns(self, rank: int, step: int) -> int:
        """How long one batch takes to load."""
        slow = [cause.load_ns for cause in self.causes if isinstance(cause, SlowLoader) and cause.hits(rank, step)]
        return max([self.loader.load_ns, *slow])

    def pauses(self, rank: int, step: int) -> list[Pause]:
        """Pauses of this rank in this step."""
        return [
            cause
            for cause in self.causes
            if isinstance(cause, Pause)
            and (
                cause.pauses(rank, step, self.ranks) if isinstance(cause, RotatingPause) else cause.hits(rank, step)
            )
        ]  # fmt: skip

    def evaluations(self, rank: int, step: int) -> list[Evaluation]:
        """Evaluations that this rank makes after this step."""
        return [cause for cause in self.causes if isinstance(cause, Evaluation) and cause.hits(rank, step)]

    def syncs_forward(self, rank: int, step: int) -> bool:
        """Whether this rank synchronises between forward and backward."""
        return any(isinstance(cause, HostSync) and cause.hits(rank, step) for cause in self.causes)

    def reduces(self, microbatch: int) -> bool:
        """Whether gradients are reduced after this micro-batch."""
        each = any(isinstance(cause, ReduceEachMicrobatch) for cause in self.causes)
        return each or microbatch == self.microbatches - 1

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
