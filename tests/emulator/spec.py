"""A training job as its user would describe it: machines, model, loop, and what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from tests.emulator.chance import normal

US = 1_000
MS = 1_000_000
MIB = 1 << 20

RANK_CAUSES = ("slow compute", "slow host", "slow loader", "pause", "sync")
"""Causes that strike some ranks and not the others."""


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong. What ``value`` means depends on ``kind``:

    ``slow compute``, ``slow host``, ``slow loader``: times as long; ``pause``: ns that the host does something else
    (``how``: ``gc``, ``checkpoint``, ``log``) in every ``every``-th step, ``offset`` steps later; ``sync``: so many
    values are read in every step, after the forward; ``slow link``: bytes take times as long on every link, latency
    the root of that.
    """

    kind: str
    value: float = 1.0
    ranks: tuple[int, ...] | None = None
    """None: all."""
    every: int = 1
    how: str = ""
    offset: int = 0

    def strikes(self, rank: int) -> bool:
        """Whether it is this rank's."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True)
class Model:
    """A transformer of equal blocks, an embedding and a head; attention counts as one kernel."""

    blocks: int = 8
    tokens: int = 2048
    width: int = 1024
    expansion: int = 4
    small_kernels: int = 3
    """Element-wise kernels beside each block's five large ones."""
    flops_per_ns: float = 180_000.0
    small_gbps: float = 1200.0
    """What element-wise kernels move."""
    least_ns: int = 2_500
    element_bytes: int = 2


@dataclass(frozen=True)
class Cpu:
    """What host code costs."""

    python_ns: int = 6 * US
    """Between two operators of the forward."""
    engine_ns: int = 3 * US
    """The same in autograd's engine."""
    operator_ns: int = 7 * US
    launch_ns: int = 4 * US
    latency_ns: int = 5 * US
    """From a launch to its kernel's earliest begin."""
    wake_ns: int = 9 * US
    """From the end of work to the return of the call that waited for it."""
    collective_ns: int = 45 * US
    """Issuing a collective through Python and c10d."""
    profiler_ns: int = 0
    """What the profiler adds to each operator and launch, while it records."""


@dataclass(frozen=True)
class Network:
    """Latency and bus bandwidth, within a host and between hosts."""

    latency_ns: int = 25 * US
    gbps: float = 120.0
    between_latency_ns: int = 45 * US
    between_gbps: float = 40.0
    jitter: float = 0.0
    busy_every: int = 0
    """In every so many-th step others use the network; 0: in none."""
    busy_times: float = 1.0
    """Bytes take so many times as long then."""


@dataclass(frozen=True)
class Loader:
    """A DataLoader; ``load_ns`` is what one batch takes one worker."""

    workers: int = 4
    prefetch: int = 2
    load_ns: int = 4 * MS
    jitter: float = 0.1
    fetch_ns: int = 120 * US
    """Taking a finished batch from the queue."""
    pinned: bool = True
    batch_bytes: int = 4 * MIB
    ahead: bool = False
    """A batch is taken, and copied on a stream of its own, while the one before is computed on."""


@dataclass(frozen=True)
class Recording:
    """How the traces are written."""

    steps: int = 6
    first: int = 5
    """Number of the first recorded step."""
    annotated: bool = True
    """``ProfilerStep#N``."""
    metadata: str = "kernel"
    """Where collectives are described: ``kernel``, ``operator`` or ``none``."""
    described: bool = True
    """Process groups are listed in ``distributedInfo``."""
    shapes: bool = True
    old: bool = False
    """Whole µs since the epoch, as kineto wrote until 2024."""
    names: str = "rank{rank}.json"
    kept: bool = True
    """Is anything noted that a trace would hold? Else only how long steps take is known, sooner."""
    run: bool = False
    """By ``perfscope run``: with its ranges and its metadata, under its names."""
    missing: tuple[int, ...] = ()
    start_skew_ns: int = 0
    clock_ns: int = 0
    """Hosts' clocks are up to this far apart."""
    drift_ppm: float = 0.0


@dataclass(frozen=True)
class Job:
    """The whole job."""

    seed: int = 0
    strategy: str = "ddp"
    """``ddp``, ``fsdp``, ``manual`` (gradients all-reduced one by one after the backward), ``flat`` (all of them in one
    tensor), ``tensor``, ``pipeline``."""
    ranks: int = 4
    ranks_per_host: int = 4
    tensor: int = 1
    stages: int = 1
    microbatches: int = 1
    gpipe: bool = False
    """The stages do all forwards, then all backwards; else one of each in turn (1F1B)."""
    sends_awaited: bool = True
    """Stages compute only when what they sent has arrived; else GPipe's wait for that behind all forwards, and behind
    all backwards.
    """
    no_sync: bool = True
    averages: bool = False
    """What a loop reduces by hand are parameters, after the optimizer's step (local SGD)."""
    returned: bool = False
    """A loop reduces each gradient to rank 0, which divides it, and broadcasts it back."""
    in_hooks: bool = False
    """Hooks reduce each gradient by hand in the last backward, which waits for it; else a loop does after it."""
    bucket_mb: float = 25.0
    one_bucket_limit: bool = False
    """The first bucket has the limit of the others, as where a script sets it since torch 2.5; else 1 MiB."""
    gradient_bytes: int = 4
    """Of an element of a reduced gradient."""
    compressed: bool = False
    """DDP sends buckets in 16 bits: ``bf16_compress_hook``."""
    scatters_once: bool = False
    """FSDP adds gradients up whole and reduces them after the last micro-batch."""
    reshard: bool = True
    """FSDP frees a unit's parameters after its forward."""
    backward_prefetch: bool = True
    forward_prefetch: bool = False
    """FSDP gathers the next unit while one computes: issued before its compute, in the backward and in the forward."""
    version: int = 1
    """Of FSDP."""
    in_flight: int = 2
    """Gathers that FSDP's rate limiter allows."""
    optimizer_kernels: int = 6
    """Per step if ``foreach``, else per parameter."""
    foreach: bool = True
    item_every: int = 0
    """The loss is read (and printed) in every so many steps; 0 never."""
    buffers_mb: float = 0.0
    """Buffers that DDP broadcasts before each forward, copied together and back."""
    search_ns: int = 0
    """What DDP's search for unused parameters takes the host after each forward; 0: it does not search."""
    metrics: int = 0
    """All-reduces of one number after each optimizer step, each waited for on the compute stream."""
    metrics_in: str = "step"
    """Where else: in each ``forward``, before each ``backward``, or after each micro-``batch``, of the last one after
    the optimizer's step."""
    metrics_read: bool = False
    """The host reads each of them right after."""
    norms: str = ""
    """Each block ends with a batch normalization: ``own`` statistics of each rank, or ``synchronized``."""
    imbalance: float = 0.0
    """Standard deviation of a batch's tokens, as a share, by rank and step."""
    evened: bool = False
    """Each step's tokens are spread evenly over the ranks."""
    at_peers_pace: tuple[int, ...] = ()
    """Ranks whose batches have as many tokens as the median of the others'."""
    noise: float = 0.01
    """Of every kernel, every launch and every Python statement, as a share."""
    model: Model = field(default_factory=Model)
    cpu: Cpu = field(default_factory=Cpu)
    network: Network = field(default_factory=Network)
    loader: Loader = field(default_factory=Loader)
    recording: Recording = field(default_factory=Recording)
    causes: tuple[Cause, ...] = ()
    compute_speed: float = 1.0
    warmup: int = 6
    """Steps that are emulated before the recorded ones."""
    age: int = 0
    """Steps that the loop has made before those, which only its loader workers remember."""

    def factor(self, kind: str, rank: int) -> float:
        """How many times as long something takes on a rank because of the causes of a kind."""
        return math.prod(cause.value for cause in self.causes if cause.kind == kind and cause.strikes(rank))

    def struck(self, kind: str, rank: int) -> list[Cause]:
        """A rank's causes of a kind."""
        return [cause for cause in self.causes if cause.kind == kind and cause.strikes(rank)]

    def tokens_of(self, rank: int, step: int) -> float:
        """A batch's tokens against the usual ones."""
        if not self.imbalance:
            return 1.0
        ranks = range(self.ranks)
        drawn = [max(0.4, 1 + self.imbalance * normal(self.seed, each, step, "tokens")) for each in ranks]
        if self.evened:
            return fmean(drawn)
        return median(drawn[:rank] + drawn[rank + 1 :]) if rank in self.at_peers_pace else drawn[rank]

    def host_of(self, rank: int) -> int:
        """Number of a rank's host."""
        return rank // self.ranks_per_host

    def without(self, *causes: Cause) -> Job:
        """The same job with these causes removed."""
        return replace(self, causes=tuple(cause for cause in self.causes if cause not in causes))

    @property
    def replicas(self) -> int:
        """Ranks that share neither layers nor stages: the data parallel ones."""
        return self.ranks // (self.tensor * self.stages)

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """A rank's groups of more than one rank by role: ``world``, ``data``, ``tensor``; ranks are numbered tensor
        first, then data, then stage, as Megatron does."""
        tensor, data = rank % self.tensor, rank // self.tensor % self.replicas
        stage = rank // (self.tensor * self.replicas)
        first = stage * self.tensor * self.replicas
        groups = {
            "world": tuple(range(self.ranks)),
            "data": tuple(first + tensor + self.tensor * i for i in range(self.replicas)),
            "tensor": tuple(first + data * self.tensor + i for i in range(self.tensor)),
        }
        return {role: ranks for role, ranks in groups.items() if len(ranks) > 1}

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // (self.tensor * self.replicas)
