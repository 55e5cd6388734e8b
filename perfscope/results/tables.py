"""Tables of a summary: kernels, operators, modules, launches, memory over time, groups, pipelines, curves, lanes."""

from __future__ import annotations

from typing import Annotated

from perfscope.frozen import dataclass
from perfscope.results.fields import Bytes, Count, Flop, Ratio, Share, Tflops, Us


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One kernel (by name), over all ranks and used steps; the costliest first.

    A kernel belongs to the step in whose window it begins. ``(other kernels)`` adds up those of its category that are
    not listed.
    """

    name: str
    category: Annotated[str, "``compute``, ``communication``, ``copy`` or ``memset``."]
    operator: Annotated[
        str | None, "Innermost operator that launches it most (by time); None where launches are not recorded."
    ]
    operator_class: Annotated[
        str,
        "What it does, by the operator that launched it or one around that, else by its own name: ``matrix``, "
        "``attention``, ``convolution``, ``normalisation``, ``elementwise``, ``reduction``, ``optimizer``, "
        "``embedding``, ``communication``, ``copy``, ``memset`` or ``other``.",
    ]
    count_per_step: Annotated[Count, "Per rank and step."]
    us_per_step: Annotated[Us, "Sum of its durations per rank and step, kernels that run at once counted each."]
    mean_us: Us
    min_us: Us
    max_us: Us
    share: Annotated[Share, "Share of all device work, communication included, by sums of durations."]
    slowest_rank: Annotated[int | None, "Rank on which the mean duration is longest; None with one rank."]
    slowest_over_median: Annotated[
        Ratio | None, "The longest mean duration on any rank / the median of the ranks' means."
    ]
    dtype: Annotated[
        str | None,
        "Type of the factors of its products: the operator's recorded type, and for float32 by the kernel's name "
        "whether it computes in TF32 (``float32 or tf32`` where the name leaves that open); None where it does no "
        "products.",
    ]
    tensor_cores: Annotated[
        bool | None,
        "Whether its name says that it uses tensor (matrix) cores; None where it does no products or the name does "
        "not show it.",
    ]
    tflops: Annotated[
        Tflops | None,
        "FLOPs / time, of the calls whose shapes are recorded, recomputation included; None without shapes. Several "
        "kernels of one operator share its FLOPs by their time.",
    ]
    share_of_peak: Annotated[
        Share | None,
        "``tflops`` / the device's dense peak of ``dtype``; None where either is unknown, and where it would exceed 1.",
    ]
    roofline: Annotated[RooflineRow | None, "Measured by Nsight Compute, where its export was given."] = None
    worth_a_look: Annotated[str | None, "Why, in a phrase; None: not worth a look."] = None
    modules: Annotated[
        tuple[str, ...],
        "Of kernels in compiled code and annotated CUDA graphs: the modules whose operations they compute; empty where "
        "not known.",
    ] = ()
    lines: Annotated[
        tuple[str, ...], "``file:line`` of those operations in the program; the costliest calls first, at most 12."
    ] = ()


@dataclass(frozen=True, kw_only=True)
class RooflineRow:
    """What Nsight Compute measured of a kernel: shares of the device's peaks, 0..1."""

    compute_share: Annotated[Share | None, "Throughput of the cores / peak."]
    memory_share: Annotated[Share | None, "Throughput of the memory hierarchy / peak."]
    dram_share: Annotated[Share | None, "Throughput of the device's memory / peak."]
    occupancy: Annotated[Share | None, "Warps in flight / most that fit."]
    instances: Annotated[int, "Launches of the kernel that were measured."]
    bound: Annotated[str, "``compute``, ``memory``, ``latency`` (neither above 60 %) or ``unknown``."]


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """One operator (by name), over all ranks and used steps; the costliest first.

    Device time belongs to the innermost operator around the launch; host time is the operator's own, without what it
    calls. A call that it passes on to an overload of its own name is one.
    """

    name: str
    operator_class: Annotated[str, "Class of the operator: ``gemm``, ``attention``, ``norm`` …"]
    count_per_step: Count
    device_us_per_step: Annotated[
        Us, "Sum of the durations of the device work whose launch lies in this operator and in none that it calls."
    ]
    host_us_per_step: Annotated[
        Us, "Time in the operator itself, its launch calls included and the operators that it calls left out."
    ]
    kernels_per_step: Count
    flops_per_step: Annotated[Flop | None, "FLOPs of its kernels per rank and step, recomputation included."]
    tflops: Annotated[Tflops | None, "FLOPs / device time."]
    share_of_peak: Annotated[Share | None, "``tflops`` / the device's peak in that data type."]
    dtype: str | None
    modules: Annotated[
        tuple[str, ...], "Modules whose compiled code calls it; empty where none does or it is not known."
    ] = ()
    lines: Annotated[tuple[str, ...], "``file:line`` of what that compiled code computes, at most 12."] = ()
    called_by: Annotated[
        str, "The outermost operator around most of its time, of the costliest operators; empty where there is none."
    ] = ""
    function: Annotated[
        str, "The script's own Python function around most of its time, where stacks are recorded; empty otherwise."
    ] = ""


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One named range (a module's, a phase's) and what was launched in it, per rank and step; the costliest first."""

    name: str
    depth: Annotated[int, "How many ranges lie around it; 0 is outermost."]
    count_per_step: Count
    host_us_per_step: Annotated[Us, "Its whole length on the host."]
    device_us_per_step: Annotated[
        Us,
        "Time in which device work ran that was launched inside it, on the same thread: a module's backward is not in "
        "it, since autograd calls no modules.",
    ]
    kernels_per_step: Count


@dataclass(frozen=True, kw_only=True)
class CompiledRow:
    """A call in code that ``torch.compile`` made, or an annotated kernel of another CUDA graph, and what it computes,
    over all ranks and used steps; the costliest first.

    Calls of one name that compute the same lines are one row, such as those of all layers of a model.
    """

    name: Annotated[
        str,
        "The generated kernel or the operator called; in a CUDA graph the kernel. ``(C++ kernels)``: all of a graph on "
        "a CPU, which the profiler does not list one by one.",
    ]
    kernels: Annotated[tuple[str, ...], "Kernels that it runs on the device, by time; empty on a CPU."]
    direction: Annotated[
        str | None,
        "``forward`` or ``backward``; None where the graph was not noted, or the annotation does not say.",
    ]
    modules: Annotated[
        tuple[str, ...],
        "Modules whose operations it computes, as paths below what was compiled; ``*`` stands for the numbers of "
        "several, ``loss()`` for a function where no module is known. Of annotated kernels the module or the name that "
        "the program gave them. Empty where not known.",
    ]
    lines: Annotated[
        tuple[str, ...],
        "``file:line`` of those operations, at most 12; of a backward the lines of the forward. Empty where not known.",
    ]
    code: Annotated[tuple[str, ...], "The text of each of these lines."]
    operators: Annotated[tuple[str, ...], "Operators that it computes."]
    count_per_step: Annotated[Count, "Calls per rank and step; 0 in a CUDA graph, which calls nothing."]
    host_us_per_step: Annotated[Us, "Time of its calls on the host."]
    device_us_per_step: Annotated[Us, "Sum of the durations of its kernels."]
    share: Annotated[Share, "Share of all device work; without a device, its host time as a share of the steps."]


@dataclass(frozen=True, kw_only=True)
class CompiledModuleRow:
    """A module in compiled code or annotated CUDA graphs: time of the calls that compute its operations, per rank and
    step; the costliest first.

    Times are on the device, without one on the host. A kernel that computes operations of several modules counts in
    each of them, so rows do not add up.
    """

    module: Annotated[
        str,
        "Its path below what was compiled; ``*`` stands for the numbers of several. Of what was compiled itself the "
        "class, of code whose module is not known the function, ``loss()``.",
    ]
    kind: Annotated[str, "Class of the module; empty where no module is known."]
    instances: Annotated[int, "Modules that the row stands for."]
    forward_us_per_step: Annotated[
        Us, "Time of the calls in forward graphs that compute its operations, and of kernels whose pass is not known."
    ]
    backward_us_per_step: Annotated[Us, "Time of the calls in backward graphs that compute its operations."]
    shared_us_per_step: Annotated[Us, "The part of both in calls that compute operations of other modules too."]


@dataclass(frozen=True, kw_only=True)
class LaunchRow:
    """How one rank feeds its device, over the used steps; medians and percentiles are means of the steps' own."""

    rank: int
    launches_per_step: Count
    call_us_mean: Annotated[Us | None, "Mean length of the calls that launch kernels and copies."]
    delay_us_median: Annotated[
        Us | None, "From the end of a launch call to the start of its work. 0: the device waits for the host."
    ]
    delay_us_p95: Annotated[Us | None, "95 % of the kernels start no later than this after their launch."]
    queue_depth_median: Annotated[
        Count | None,
        "Kernels and copies launched but not yet begun, median over time. 0: the host is not ahead of the device.",
    ]
    starved_share: Annotated[
        Share | None, "Share of launches before which the device had finished all that was launched."
    ]
    short_kernels_share: Annotated[
        Share | None, "Share of kernels shorter than 10 µs, about the cost of launching one."
    ]


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """A rank's device memory over the used steps, thinned so that every local extreme that a picture can show survives.

    Values hold from one point to the next. Of more than 32 ranks only the fullest ones and an even choice are listed.
    """

    rank: int
    device: Annotated[
        int,
        "Device index; -1 is the host's memory, on a rank without a device: only what was allocated since the "
        "profiler started, and nothing reserved.",
    ]
    time_us: Annotated[
        tuple[Us, ...],
        "From the earliest start of the first used step on any rank's host, aligned (its own start where a rank's "
        "clock is not aligned).",
    ]
    allocated_bytes: Annotated[tuple[Bytes | None, ...], "Sum of live tensors."]
    reserved_bytes: Annotated[tuple[Bytes | None, ...], "Held from the device, in use or cached."]


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A process group and what it is for."""

    name: str
    ranks: tuple[int, ...]
    role: Annotated[
        str, "``data``, ``shard``, ``tensor``, ``pipeline``, ``context``, ``expert``, ``world`` or ``unknown``."
    ]
    role_from: Annotated[
        str, "How that is known: its recorded description, the kinds of its collectives, the shape of the job."
    ]
    comm_us: Annotated[Us, "Time of its collectives per step, mean over its ranks present."]
    across_hosts: Annotated[bool | None, "Whether its ranks live on several hosts; None where hosts are not known."]


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One pipeline stage, per step in µs, mean over its ranks."""

    stage: Annotated[int, "Number of the pipeline stage, from 0."]
    ranks: tuple[int, ...]
    busy_us: Annotated[
        Us, "The step less its bubbles: compute, transfers, waiting for its own copies, and idle time of its own."
    ]
    bubble_start_us: Annotated[Us, "Bubble until the stage's first micro-batch of the step has come."]
    bubble_steady_us: Annotated[Us, "Bubble from its first forward of the step to the end of its last backward."]
    bubble_drain_us: Annotated[
        Us, "Bubble after its last backward, until the step's end: what follows needs all stages."
    ]
    forward_us: Annotated[
        Us | None,
        "One micro-batch through one chunk of the stage's model, mean: from its first kernel's start to its last "
        "one's end; without a device, the range's time less what it waits for other stages. None where nothing marks "
        "it.",
    ]
    backward_us: Annotated[Us | None, "The same of its backward, both halves of it where a schedule takes them apart."]
    flops_per_step: Annotated[
        Flop | None, "Model FLOPs of one of its ranks per step, mean over its ranks; None where no shapes are recorded."
    ]
    kernels_per_step: Annotated[Count | None, "Compute kernels of one of its ranks; None without a device."] = None

    @property
    def bubble_us(self) -> float:
        """All of its bubbles, per step."""
        return self.bubble_start_us + self.bubble_steady_us + self.bubble_drain_us


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The job's pipeline."""

    stages: Annotated[tuple[StageRow, ...], "Those of which a rank is in the recording."]
    microbatches: Annotated[int | None, "Per step and virtual stage; None where not known."]
    virtual_stages: Annotated[int, "Model chunks per rank; 1: not interleaved."]
    schedule: Annotated[str, "``1f1b``, ``gpipe``, ``interleaved``, ``zero_bubble`` or ``unknown``."]
    bubble_share: Annotated[
        Share,
        "Bubble time / step time, mean over stages. A bubble is time in which a stage waits for other stages and does "
        "nothing else, in messages between them and in collectives across them.",
    ]
    ideal_bubble_share: Annotated[
        Share | None,
        "(p-1)/(v m + p-1), the bubble of p balanced stages, m micro-batches, v chunks (Narayanan et al., SC'21); "
        "None where one of these is not known, or the schedule fills bubbles with halves of backwards.",
    ]
    imbalance: Annotated[Ratio, "Busiest stage's own work over the stages' mean; 1: balanced."]
    degree: Annotated[int | None, "Number of stages, recorded or not; None where that is not known."] = None
    bubbles_are_bounds: Annotated[bool, "Neighbours of recorded ranks are missing: the bubbles are upper bounds."] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Predicted step time at one value of a setting."""

    value: Annotated[float, "Value of the setting."]
    low_us: Us
    mid_us: Us
    high_us: Us


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """Predicted step time over the values of a setting that can be replayed, as ``perfscope whatif --sweep`` gives."""

    setting: Annotated[
        str,
        "As ``perfscope whatif`` calls it: ``ddp.bucket_cap_mb``, ``dataloader.num_workers``, "
        "``pipeline.microbatches``.",
    ]
    unit: Annotated[str, "What its values count: ``MiB``, ``workers``, ``micro-batches``."]
    current: Annotated[float | None, "The value that the job was recorded with; None where that is not recorded."]
    best: Annotated[
        float,
        "The value with the least step time; of values within 2 % the current one (where that is not known the "
        "framework's default), else the lowest.",
    ]
    points: Annotated[tuple[CurvePoint, ...], "At most twelve, by value."]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What one lane of a rank's timeline held during one step, for a picture; arrays run in parallel, by start.

    Times are µs from the earliest start of that step on any rank shown, aligned. Runs of events too short to be seen
    are one entry, under the name of the longest among them. ``name``, ``operator`` and ``group`` are places in
    ``texts``, None where not known. At most eight ranks: the stragglers and an even selection of the others.
    """

    rank: int
    step: Annotated[int | None, "None where nothing marks steps."]
    kind: Annotated[
        str,
        "``phase`` (forward, backward, optimizer: from the first to the last kernel launched in it; on a rank without "
        "device the range on the host), ``compute`` (kernels; on a rank without device the main thread's outermost "
        "operators), ``communication``, ``copy``, ``host`` (outermost operators of the main thread; on a rank without "
        "device the time outside operators), ``backward`` (operators of autograd's thread), ``loader`` or ``range`` "
        "(outermost named ranges of the user's own that are shorter than the step, on the host).",
    ]
    start_us: Annotated[tuple[Us, ...], "From the earliest start of that step on any rank shown, aligned."]
    duration_us: tuple[Us, ...]
    texts: tuple[str, ...]
    name: Annotated[tuple[int | None, ...], "Of the longest event in the entry."]
    operator: Annotated[tuple[int | None, ...], "Innermost operator that launched it."]
    events: Annotated[tuple[int, ...], "Events in the entry: those too short to be seen are merged."]
    busy_us: Annotated[tuple[Us, ...], "Sum of their lengths: less than the entry's where there are gaps between them."]
    group: Annotated[tuple[int | None, ...], "Of collectives, as the next three; empty in other lanes."] = ()
    bytes: tuple[Bytes | None, ...] = ()
    wait_us: Annotated[
        tuple[Us | None, ...],
        "Until the last participant arrived; the rest of the entry is transfer. None where only one was recorded.",
    ] = ()
    waited_for: Annotated[tuple[int | None, ...], "The rank that arrived last, None where it is not known."] = ()

    def __post_init__(self) -> None:
        own = (self.duration_us, self.name, self.operator, self.events, self.busy_us)
        more = (self.group, self.bytes, self.wait_us) if self.kind == "communication" else ()
        if self.waited_for:  # earlier versions do not have it
            more = (*more, self.waited_for)
        if any(len(array) != len(self.start_us) for array in (*own, *more)):
            raise ValueError("arrays of a lane are not equally long")
        places = {place for array in (self.name, self.operator, self.group) for place in array if place is not None}
        if places and not 0 <= min(places) <= max(places) < len(self.texts):
            raise ValueError("a lane names a text that it does not have")
