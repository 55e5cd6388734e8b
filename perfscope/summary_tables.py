"""The summary's tables of work: kernels, operators, modules, launches, memory over time, groups, pipelines, curves.

They are keys beyond the contract of ``perfscope.summary`` and follow its rules: µs, fractions 0..1, None where the
data cannot support a number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One kernel (by name), over all ranks and used steps; the costliest first.

    A step has the work that begins in its window of the account. ``(other kernels)`` adds up those of its category that
    are not listed.
    """

    name: str
    category: str
    """``compute``, ``communication``, ``copy`` or ``memset``."""
    operator: str | None
    """Innermost operator that launches it most (by time); None where launches are not recorded."""
    operator_class: str
    """``matrix``, ``attention``, ``convolution``, ``normalisation``, ``elementwise``, ``reduction``, ``optimizer``,
    ``embedding``, ``communication``, ``copy``, ``memset`` or ``other``: of the operator or one that called it, else by
    its own name."""
    count_per_step: float
    """Per rank and step."""
    us_per_step: float
    """Sum of durations, per rank and step (concurrent kernels count each)."""
    mean_us: float
    min_us: float
    max_us: float
    share: float
    """Of all device time, sums of durations."""
    slowest_rank: int | None
    """Rank on which the mean duration is longest; None with one rank."""
    slowest_over_median: float | None
    """Its mean over the median of the ranks' means."""
    dtype: str | None
    """Type that its products ran in, by its operators' recorded types and its name; ``float32 or tf32`` where the name
    leaves that open; None where it does no products."""
    tensor_cores: bool | None
    """Whether its name says that it uses tensor (matrix) cores; None where it does no products or the name is mute."""
    tflops: float | None
    """FLOPs of the operators that it served, recomputation included, / its time in those; None without shapes."""
    share_of_peak: float | None
    """``tflops`` / the device's dense peak of ``dtype``; None where either is unknown, and where it would exceed 1."""
    roofline: RooflineRow | None = None
    """Measured by Nsight Compute, where its export was given."""
    worth_a_look: str | None = None
    """Why, in a phrase; None: not worth it."""


@dataclass(frozen=True, kw_only=True)
class RooflineRow:
    """What Nsight Compute measured of a kernel: shares of the device's peaks, 0..1."""

    compute_share: float | None
    memory_share: float | None
    dram_share: float | None
    occupancy: float | None
    instances: int
    bound: str
    """``compute``, ``memory``, ``latency`` (neither above 60 %) or ``unknown``."""


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """One operator (by name), over all ranks and used steps; the costliest first.

    Device time belongs to the innermost operator around the launch; host time is the operator's own, without what it
    calls.
    """

    name: str
    operator_class: str
    count_per_step: float
    device_us_per_step: float
    host_us_per_step: float
    kernels_per_step: float
    flops_per_step: float | None
    tflops: float | None
    share_of_peak: float | None
    dtype: str | None


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One named range (a module's, a phase's) and what was launched in it, per rank and step; the costliest first."""

    name: str
    depth: int
    """0 is outermost."""
    count_per_step: float
    host_us_per_step: float
    """Whole length of the range."""
    device_us_per_step: float
    """Union of the device work launched inside it."""
    kernels_per_step: float


@dataclass(frozen=True, kw_only=True)
class LaunchRow:
    """How one rank feeds its device, over the used steps; medians and percentiles are means of the steps' own."""

    rank: int
    launches_per_step: float
    call_us_mean: float | None
    """Mean length of a launch call."""
    delay_us_median: float | None
    """From a launch call's end to its work's start: 0 is a device that waits for the host."""
    delay_us_p95: float | None
    queue_depth_median: float | None
    """Work launched but not yet begun, over time."""
    starved_share: float | None
    """Share of launches that found the queue empty and the device idle."""
    short_kernels_share: float | None
    """Share of kernels shorter than 10 µs."""


@dataclass(frozen=True, kw_only=True)
class MemoryStrip:
    """A rank's device memory over the used steps, thinned so that every local extreme that a picture can show survives.

    Values hold from one point to the next. Of jobs of more than 32 ranks the fullest ones and an even choice are kept.
    """

    rank: int
    device: int
    """Device index; -1 is the host's memory, on a rank without a device: only what was allocated since the profiler
    started, and nothing reserved."""
    time_us: tuple[float, ...]
    """From the earliest start of the first used step on any rank's host, aligned (its own start where a rank's clock is
    not aligned)."""
    allocated_bytes: tuple[int | None, ...]
    reserved_bytes: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A process group and what it is for."""

    name: str
    ranks: tuple[int, ...]
    role: str
    """``data``, ``shard``, ``tensor``, ``pipeline``, ``context``, ``expert``, ``world`` or ``unknown``."""
    role_from: str
    """How that is known: its recorded description, the kinds of its collectives, the shape of the job."""
    comm_us: float
    """Time of its collectives per step, mean over its ranks present."""
    across_hosts: bool | None
    """Whether its ranks live on several hosts; None where hosts are not known."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One pipeline stage, per step in µs, mean over its ranks."""

    stage: int
    ranks: tuple[int, ...]
    busy_us: float
    """Own work of the stage: all but waiting for its neighbours."""
    bubble_start_us: float
    """Waiting before its first micro-batch arrives."""
    bubble_steady_us: float
    """Waiting between its first and last micro-batch."""
    bubble_drain_us: float
    """Waiting after its last micro-batch until the pipeline has drained."""
    forward_us: float | None
    """Mean of one micro-batch's forward; None where nothing marks it."""
    backward_us: float | None
    """The same of its backward, both halves of it where a schedule takes them apart."""
    flops_per_step: float | None
    """Model FLOPs of one of its ranks; None where no shapes tell."""
    kernels_per_step: float | None = None
    """Compute kernels of one of its ranks; None without a device."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The job's pipeline."""

    stages: tuple[StageRow, ...]
    """Those of which a rank is in the recording."""
    microbatches: int | None
    """Per step and virtual stage; None where it cannot be told."""
    virtual_stages: int
    """Model chunks per rank; 1: not interleaved."""
    schedule: str
    """``1f1b``, ``gpipe``, ``interleaved``, ``zero_bubble`` or ``unknown``."""
    bubble_share: float
    """Bubble time / step time, mean over stages."""
    ideal_bubble_share: float | None
    """(p-1)/(v m + p-1), the bubble of p balanced stages, m micro-batches, v chunks (Narayanan et al., SC'21); None
    where one of these is not known, or the schedule fills bubbles with halves of backwards."""
    imbalance: float
    """Busiest stage's own work over the stages' mean; 1: balanced."""
    degree: int | None = None
    """Stages there are, recorded or not; None where that is not known."""
    bubbles_are_bounds: bool = False
    """Neighbours of recorded ranks are missing: the waiting for those is the most that it can have been."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Predicted step time at one value of a setting."""

    value: float
    low_us: float
    mid_us: float
    high_us: float


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """Predicted step time over the values of a setting that can be replayed, as ``perfscope whatif --sweep`` gives."""

    setting: str
    """As ``perfscope whatif`` calls it: ``ddp.bucket_cap_mb``, ``dataloader.num_workers``, ``pipeline.microbatches``.
    """
    unit: str
    """What its values count: ``MiB``, ``workers``, ``micro-batches``."""
    current: float | None
    """The value that the job was recorded with; None where that is not recorded."""
    best: float
    """The value with the least step time; of values within 2 % the current one (where that is not known the
    framework's default), else the lowest."""
    points: tuple[CurvePoint, ...]
    """At most twelve, by value."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What one lane of a rank's timeline held during one step, for a picture; arrays run in parallel, by start.

    Times are µs from the earliest start of that step on any rank shown, aligned. Runs of events too short to be seen
    are one entry, under the name of the longest among them. ``name``, ``operator`` and ``group`` are places in
    ``texts``, None where not known. Of at most eight ranks: those blamed and an even choice of the others.
    """

    rank: int
    step: int | None
    """None where nothing marks steps."""
    kind: str
    """``compute`` (kernels; on a rank without device the main thread's outermost operators), ``communication``,
    ``copy``, ``host`` (outermost operators of the main thread), ``backward`` (those of autograd's) or ``loader``."""
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    texts: tuple[str, ...]
    name: tuple[int | None, ...]
    operator: tuple[int | None, ...]
    """Innermost operator that launched it."""
    pieces: tuple[int, ...]
    """Events in the entry."""
    busy_us: tuple[float, ...]
    """Sum of their lengths: less than the entry's where there are gaps between them."""
    group: tuple[int | None, ...] = ()
    """Of collectives, as the next two; empty in other lanes."""
    bytes: tuple[int | None, ...] = ()
    wait_us: tuple[float | None, ...] = ()
    """Until the last participant arrived; the rest of the entry is transfer. None where only one was recorded."""
