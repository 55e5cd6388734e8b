"""Parts of a summary: the job, its clocks, collectives, stragglers, critical path, loading, memory and replay.

Times are µs, fractions 0..1; what the data cannot support is None.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Final

from perfscope.frozen import dataclass
from perfscope.results.fields import Bytes, Count, Flop, GBps, Ratio, Share, Signed, Tflops, Unit, Us
from perfscope.results.findings import Prediction

_SEVERAL: Final = 2
FEW_STEPS: Final = 5
"""Used steps below which the evidence is too thin for more than low confidence."""

UNLIKE_STAGES: Final = 0.1
"""Share of the step by which a stage of a pipeline must be slower than the others to be reported: stages are rarely
divided more evenly."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank (or file) that could not be analyzed, and why."""

    rank: Annotated[int | None, "Global rank; None where it is not known."]
    path: Annotated[str, "The file."]
    error: Annotated[str, "Why it could not be used."]

    @property
    def reason(self) -> str:
        """``error`` without the path that it may begin with, for where the path is shown beside it."""
        return self.error.removeprefix(f"{self.path}: ")


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """What was run and how long its steps took."""

    world_size: Annotated[int | None, "Ranks of the job; None where nothing states them."]
    ranks: tuple[int, ...]
    missing_ranks: Annotated[tuple[int, ...], "Ranks of the job that are not in the recording, or could not be read."]
    failures: tuple[Failure, ...]
    steps: Annotated[
        tuple[int, ...],
        "Step numbers used, common to all ranks present. Empty: nothing marks steps; the whole recording is one "
        "window.",
    ]
    step_time_us: Annotated[
        Us,
        "Mean advance per step of the last rank, on aligned clocks. A rank's step begins when its host has begun it "
        "and its device has done all earlier work, and ends where the next one begins; the job's where the last rank's "
        "does. A step cut by the recording's edge is dropped.",
    ]
    step_time_us_per_step: Annotated[
        tuple[Us, ...], "From the last rank's begin of each used step to the last rank's end; mean: ``step_time_us``."
    ]
    strategy: Annotated[
        str | tuple[str, ...],
        "How the job is parallel: ``ddp``, ``fsdp``, ``pipeline`` …; ``unknown`` where nothing shows it.",
    ]
    backend: Annotated[str | None, "Of the default process group: ``nccl``, ``gloo`` …"]
    devices: Annotated[tuple[str, ...], "Distinct device names."]
    perturbation: Annotated[
        Ratio | None,
        "Median profiled step / median unprofiled step, both on the host's clock: 1.1 means that profiling slowed the "
        "steps by 10%.",
    ]
    steps_from: Annotated[
        str, 'What marked the steps, as a phrase: "ProfilerStep annotations", "optimizer steps", "nothing: …".'
    ] = ""
    hosts: tuple[str, ...] = ()
    command: Annotated[tuple[str, ...], "The recorded command, without secrets."] = ()
    started_at: Annotated[str | None, "When the command was started, in ISO 8601."] = None
    model: Annotated[dict[str, Any] | None, "name, parameters, parameter_bytes … of the lowest rank present."] = None
    batch_shape: Annotated[tuple[int, ...] | None, "Shape of the first tensor of a rank's batch."] = None
    positions_per_sample: Annotated[
        Count | None,
        "Mean length of a sample, over all ranks, where batches begin with a tensor of two dimensions: its tokens, in "
        "language models.",
    ] = None
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    unprofiled_step_us: Annotated[
        Us | None,
        "Mean wall time of an unprofiled step, slowest rank; the longest 2% are left out unless more are as long. "
        "Predictions are of this step where it is known.",
    ] = None
    exit_code: Annotated[int | None, "Exit code of the recorded command."] = None
    batches_per_step: Annotated[
        Count | None, "Batches that one rank takes from its data loader in a used step, mean; None where none was seen."
    ] = None
    samples_per_step: Annotated[
        Count | None,
        "Samples that all ranks together take in a step; None where unknown, where ranks share samples, or where some "
        "steps draw no batch.",
    ] = None
    time_breakdown_us_per_step: Annotated[
        dict[str, tuple[Us, ...]],
        "Category of the time breakdown -> mean over the ranks in each used step, from which its noise is known. "
        "Empty without steps.",
    ] = field(default_factory=dict)

    @property
    def strategies(self) -> tuple[str, ...]:
        """``strategy`` as a tuple; ``("unknown",)`` where it is not known."""
        return (self.strategy,) if isinstance(self.strategy, str) else self.strategy

    @property
    def shows_wrappers(self) -> bool:
        """Would the recording name what wraps the model? ``perfscope run`` does; in traces of other tools a wrapper may
        have no range, as DDP has none in those of Nsight Systems.
        """
        return bool(self.settings)

    @property
    def rank_count(self) -> int:
        """Ranks of the job; those of the recording where the job's are not known."""
        return self.world_size or len(self.ranks)

    @property
    def may_lack_ranks(self) -> bool:
        """Ranks are missing, or there is one alone, whose collectives are with ranks that are not recorded."""
        return bool(self.missing_ranks) or len(self.ranks) < _SEVERAL

    @property
    def samples_per_rank(self) -> float | None:
        """``samples_per_step`` of one rank, mean over the ranks."""
        return self.samples_per_step / self.rank_count if self.samples_per_step and self.rank_count else None

    @property
    def step_us(self) -> float:
        """What a step of the job takes: without the profiler where that is known, else as recorded."""
        unprofiled = self.unprofiled_step_us
        return unprofiled if unprofiled is not None and unprofiled > 0 else self.step_time_us

    @property
    def few_steps(self) -> bool:
        """Too few used steps for evidence: confidence is low."""
        return len(self.steps) < FEW_STEPS


@dataclass(frozen=True, kw_only=True)
class ClockRow:
    """One rank's clock: ``offset_us`` was added to it to meet the lowest rank's."""

    rank: int
    offset_us: Annotated[
        Us,
        Signed(),
        "What was added to this rank's clock to meet the lowest rank's; estimated from collectives, whose completion "
        "is nearly simultaneous on all participants.",
    ]
    residual_us: Annotated[
        Us | None,
        "Median distance of this rank's collective ends from the group's, after alignment; None when unaligned.",
    ]
    aligned: Annotated[bool, "Whether the rank's clock could be aligned with the others'."]
    drift_ppm: Annotated[
        float,
        Unit("ppm"),
        Signed(),
        "Added besides for each second since the middle of the rank's recording, µs; 0 where no trend stands out.",
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Collectives of one group, kind, dtype and size."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str | None
    bytes: Bytes | None
    count: Annotated[int, "Instances over the used steps."]
    transfer_us: Annotated[
        Us, "End − last arrival, mean of one instance. A collective's duration on one rank is not its cost."
    ]
    wait_us: Annotated[
        Us | None,
        "Last arrival − own arrival, mean over instances and participants; None with one participant recorded. A rank "
        "arrives where its kernel starts, on aligned clocks.",
    ]
    algbw_gbps: Annotated[
        GBps | None,
        "Bytes / transfer time, GB/s (10⁹ bytes per second); None where the transfer is only bounded by a single "
        "participant.",
    ]
    busbw_gbps: Annotated[
        GBps | None,
        "Algorithm bandwidth × 2(n−1)/n for all-reduce, (n−1)/n for all-gather, reduce-scatter and all-to-all, 1 for "
        "broadcast, reduce and send/receive (the convention of nccl-tests), for n ranks.",
    ]
    last_arriver: Annotated[dict[int, Share], "Rank -> share of the instances in which it came last."]
    complete: Annotated[bool, "All participants are in the recording."] = True
    transfer_us_per_step: Annotated[
        tuple[Us, ...],
        "Transfer of all of a used step's instances together; the mean over the steps is that of one instance times "
        "the instances in a step.",
    ] = ()


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """t(S) = alpha + S * f(n) / B, fitted on transfer times of one group and kind."""

    group: str
    kind: str
    alpha_us: Annotated[Us, "Cost of a collective without bytes."]
    busbw_gbps: Annotated[GBps | None, "Bus bandwidth of a very large collective."]
    residual: Annotated[Share, "Median relative error of the fitted transfer times."]


@dataclass(frozen=True, kw_only=True)
class StragglerRow:
    """A rank that made the others wait: step time that would be saved were it as fast as its peers."""

    rank: int
    cause: Annotated[
        str,
        "The category in which it spent more time of its own than the median of its peers: compute, dataloader, "
        "launch, host, sync, copy or communication.",
    ]
    lost_us: Annotated[
        Us,
        "The step time that would be saved were this rank as fast as the median of its peers, which do the same work.",
    ]
    confidence: str
    share_of_steps: Annotated[Share, "Share of the used steps in which this rank arrived last."] = 1.0
    host: str = ""
    scope: Annotated[
        str,
        "``rank``; ``host``, whose ranks are slow alike and cost more together than one by one; ``ranks``, several "
        "that hide each other, by one cause or several; ``stage``, a pipeline stage slower than others of the same "
        "work; ``link``, ranks between which the same transfers take longer than in other groups; or "
        "``job``, ranks that pauses strike in turn.",
    ] = "rank"
    ranks: Annotated[tuple[int, ...], "All ranks of that scope; ``rank`` is the slowest of them."] = ()
    pattern: Annotated[
        str,
        "``steady``: in 60 % of the steps or more. ``intermittent``: in some. ``rotating``: in turn with other ranks.",
    ] = "steady"
    steps: Annotated[tuple[int, ...], "Step numbers in which it delayed the job."] = ()
    causes: Annotated[
        tuple[str, ...],
        "The cause of each of ``ranks``, where these hide each other: ``cause`` is the one that costs most.",
    ] = ()
    alone_us: Annotated[
        tuple[Us, ...],
        "What each of ``ranks`` (of a host: all of it) saves alone at its peers' pace, where these hide each other.",
    ] = ()
    adds_us: Annotated[
        tuple[Us, ...],
        "Each rank's part of ``lost_us`` where ranks hide each other: half-way between what it saves alone and "
        "what is lost where only it stays slow, scaled to add up.",
    ] = ()
    replayed: Annotated[
        bool,
        "False where the recording does not show who waits for these ranks, so that no replay shows what they cost: "
        "``lost_us`` is then the most that it may be: what they take longer for the same work, as far as no other rank "
        "is as busy.",
    ] = True
    within_steps: Annotated[
        bool,
        "Of ``scope`` ``job``: the work of ``ranks`` differs from one collective to the next, so that another of them "
        "is the slowest each time. Over a whole step all may take about as long.",
    ] = False
    longest_steps: Annotated[
        tuple[int, ...],
        "Those of ``steps`` in which it delayed the job for twice as long as in the others or more; empty where "
        "these do not stand out.",
    ] = ()
    longest_us: Annotated[Us, "What it costs in one of ``longest_steps``, mean; 0 without any."] = 0.0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are this straggler, also where only one is named."""
        return self.ranks or (self.rank,)

    def step_without(self, step_time_us: float) -> Prediction:
        """The step (µs) without this straggler's cost. That cost was replayed, so this is a prediction.

        A rank at its peers' pace may have something in common with the next slowest; then less is saved.
        """
        mid = step_time_us - self.lost_us
        less = 0.15 if self.replayed else 1.0
        return Prediction(low=mid - 0.05 * self.lost_us, mid=mid, high=mid + less * self.lost_us)


@dataclass(frozen=True, kw_only=True)
class PathRow:
    """A stretch of the critical path: its rows add up to the step time."""

    rank: int
    category: Annotated[str, "What the critical path does: a category of the time breakdown, or another kind of time."]
    us: Annotated[Us, "Time per step, mean."]


@dataclass(frozen=True, kw_only=True)
class DataLoaderRow:
    """One rank's data loading, µs per step."""

    rank: int
    wait_us: Annotated[Us, "Time inside the data loader's ``__next__``, per step."]
    blocking_us: Annotated[
        Us, "The part of the wait in which nothing else of the step went on: idle_dataloader of the time breakdown."
    ]
    batch_us: Annotated[
        Us | None, "Time that one worker needs to load one batch, without the sampler; None where it is not known."
    ]
    num_workers: Annotated[int | None, "Worker processes of the loader; 0: it loads in the training process."]
    batches_per_step: Annotated[
        Count, "Calls of ``__next__`` per step, the mean: more than one where gradients accumulate over micro-batches."
    ] = 1.0
    sampler_us: Annotated[
        Us,
        "The part of the wait in which the sampler drew indices: on the training thread, however many workers there "
        "are. 0 in traces that do not record it.",
    ] = 0.0

    @property
    def fetching_us(self) -> float:
        """The part of ``blocking_us`` that workers can take from the training thread: all but the sampler's."""
        return max(self.blocking_us - self.sampler_us, 0.0)

    @property
    def workers_us(self) -> float | None:
        """What all workers together take for the batches of a step; None without workers or their time for a batch."""
        if not self.num_workers or self.batch_us is None:
            return None
        return self.batch_us * self.batches_per_step / self.num_workers


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Model FLOPs utilisation of the whole job."""

    mfu: Annotated[
        Share | None,
        "Model FLOPs / (step time × devices × dense peak of the type the matrix products ran in). Model FLOPs count "
        "the forward and backward matrix products, convolutions and attention, without recomputation.",
    ]
    hfu: Annotated[Share | None, "As MFU, with recomputed FLOPs counted too."]
    model_flops_per_step: Annotated[
        Flop | None,
        "Summed over the ranks present: the run's own count where there is one, else from the operators' recorded "
        "shapes. Embedding look-ups count nothing.",
    ]
    flops_coverage: Annotated[
        Share | None,
        "Share of matrix-operator time whose shapes were recorded. Below 100% the FLOPs, and MFU with them, are a "
        "lower bound.",
    ]
    peak_tflops: Annotated[
        Tflops | None,
        "Dense peak (no sparsity) of one device for ``dtype``, from a table that names its sources; where products "
        "ran in several types, what the device can reach on their mix.",
    ]
    dtype: Annotated[str | None, "Type in which most model FLOPs ran."]
    causal: Annotated[str, "``full``: causal attention is counted in full."]
    why_absent: Annotated[str | None, "Why MFU is not known."]
    peak_source: Annotated[str | None, "Where the peak is from."] = None
    hardware_flops_per_step: Annotated[
        Flop | None,
        "Model FLOPs and what was computed again: activation checkpointing, scores in attention's backward.",
    ] = None
    flops_by_dtype: Annotated[dict[str, Share], "Share of the model FLOPs that ran in each type."] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Peak memory of one rank."""

    rank: int
    peak_bytes: Annotated[Bytes | None, "The most that the framework's allocator held during the recording."]
    capacity_bytes: Annotated[Bytes | None, "Memory of the device."]
    allocated_peak_bytes: Annotated[
        Bytes | None,
        "The largest sum of live tensors. Of the host's memory only what was allocated since the profiler started is "
        "counted, so there it is a lower bound.",
    ] = None
    fragmentation: Annotated[
        Share | None,
        "1 − tensors / what the allocator held, when it held most and tensors filled most of it (a lower bound): "
        "memory lost to fragmentation and to sizes that were cached and did not come again.",
    ] = None
    headroom_bytes: Annotated[
        Bytes | None,
        "Capacity − peak memory: what the allocator could still have asked for; None where either is unknown. "
        "Other memory in use on the device (the driver's context, communication buffers) is not subtracted.",
    ] = None
    allocation_retries: Annotated[
        int | None,
        "Times that the allocator found no memory, freed its cache and asked the device again, since the "
        "process began; None where not recorded. Each waits for the device; more than none in steady training is "
        "memory running out.",
    ] = None
    kind: Annotated[
        str, "``device``, or ``host`` on a rank without one: of that only ``allocated_peak_bytes`` is known."
    ] = "device"


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """One step of one rank as consecutive segments of one category each, for a picture.

    Segments shorter than the picture can show are merged into their longer neighbour.
    """

    rank: int
    step: int | None
    categories: Annotated[tuple[str, ...], "Ids of the categories of the time breakdown."]
    start_us: Annotated[tuple[Us, ...], "From the earliest start of that step on any rank, aligned."]
    duration_us: tuple[Us, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All changes of the findings that can be replayed, together: their savings overlap and are never added."""

    whatif: Annotated[dict[str, str], "Settings of ``perfscope whatif``."]
    predicted_step_us: Prediction


NO_FIX: Final = "No fix is known"
"""What a verdict's first action begins with where there is none, but where to look for more."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer in one sentence, and what to do first."""

    headline: Annotated[str, "One sentence: what limits the job, who, and by how much; or that it is healthy."]
    healthy: Annotated[
        bool,
        "Nothing limits the job, and the recording can show that: 5 steps or more of all ranks, compute in 75% of the "
        "step or more, even stages, and an MFU, where known, of 25% or more.",
    ]
    first_action: Annotated[
        str | None, "What to do first, and the speedup; where to look where no fix is known; None when healthy."
    ]
    unsure: Annotated[bool, "Nothing limits what was recorded, but that is too little to call the job healthy."] = False

    @property
    def lead(self) -> str:
        """What stands before the first action: nothing where that only says where to look."""
        return "" if (self.first_action or "").startswith(NO_FIX) else "Do first"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How well the unchanged step replays. All None until a replay was run."""

    measured_step_us: Annotated[Us | None, "Mean used step."] = None
    replayed_step_us: Annotated[Us | None, "The same, replayed without a change."] = None
    error: Annotated[Share | None, "Difference of the replayed from the measured step, over the measured."] = None
