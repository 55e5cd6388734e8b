"""``RankPartial``: the analysis of one rank as plain values, small enough to travel between processes.

``rank/analyze.py`` computes it where the trace is read; ``job/`` compares the partials of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import Collectives
from perfscope.analyzers.rank.host_events import HostEvents
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.timeline import Progress, Timeline
from perfscope.analyzers.rank.work.tables import RankFlops, RankTables
from perfscope.frozen import dataclass
from perfscope.trace.trace import Bool, Device, Int32, Int64, ParseReport

if TYPE_CHECKING:
    from perfscope.analyzers.rank.work.gradients import ReducedGradients

FORWARD, BACKWARD, WEIGHTS = range(3)
"""Phases of a pass. Where a schedule splits the backward, ``BACKWARD`` is its input half and ``WEIGHTS`` the other."""


@dataclass(frozen=True, eq=False)
class Loading:
    """One rank's data loading.

    ``start_ns`` and ``end_ns`` have one entry for each call of ``__next__``, in order; own clock. The other arrays have
    one entry per step.
    """

    start_ns: Int64
    end_ns: Int64
    sampling: Intervals
    """When the loader's sampler draws indices, on a training thread; own clock."""
    waited_ns: Int64
    """Time inside ``__next__`` in the step's host window."""
    sampled_ns: Int64
    """The part of it in which the sampler draws indices."""
    batches: Int64
    """Calls of ``__next__`` begun in the step's host window, without those that are known to have ended an epoch."""
    single_process: bool | None
    """The iterator loads in the training process itself (no workers); None when the name does not show it."""


@dataclass(frozen=True, eq=False)
class LaneEvents:
    """Events of one lane inside the step's window, ascending; own clock, ns.

    ``name`` and ``operator`` index ``RankLanes.texts`` (NONE: not known). ``pieces`` is the number of events that were
    merged into one, ``busy_ns`` the sum of their lengths.
    """

    kind: str
    """``compute`` (without a device: the main thread), ``copy``, ``host`` (the main thread), ``backward`` (autograd's),
    ``loader``, ``phase`` or ``range`` (the user's own)."""
    start_ns: Int64
    end_ns: Int64
    name: Int32
    operator: Int32
    pieces: Int32
    busy_ns: Int64

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, eq=False)
class RankLanes:
    """Lanes of the middle step of a rank's recording: the same step on ranks that recorded the same steps."""

    step: int
    start_ns: int
    end_ns: int
    lanes: tuple[LaneEvents, ...]
    """Those with events."""
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of one rank in order of their ranges: parallel arrays.

    ``stage`` is the number of the stage in the schedule, several per rank where stages are interleaved (NONE: not
    recorded); ``step`` the index of the step in whose host window the range begins (-1: outside all). Times are ns on
    the rank's own clock: from the start of the first kernel launched in the range to the end of the last, without
    communication; on a rank without device work those of the range, which may include a wait for its input.
    """

    phase: Int64
    stage: Int64
    microbatch: Int64
    step: Int64
    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.phase)

    @classmethod
    def none(cls) -> Passes:
        """No passes."""
        return cls(*(np.empty(0, dtype=np.int64) for _ in range(6)))


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """The allocator of one device, or of the host, on one rank.

    ``time_ns`` (own clock, ascending), ``allocated`` and ``reserved`` (bytes, NONE where not recorded) are parallel
    arrays: what is held from each of these moments to the next, from the start of the first step to the end of the
    last. Peaks cover the whole recording, also outside the steps; None where not recorded. The host's numbers count
    only what was allocated since the profiler started; there, nothing more is reserved.
    """

    device: int
    """Device index; NONE is the host."""
    time_ns: Int64
    allocated: Int64
    """Sum of live tensors."""
    reserved: Int64
    """Held from the device, in use or cached."""
    peak_allocated: int | None
    peak_reserved: int | None
    allocated_at_peak: int | None
    """The most that was allocated while ``reserved`` was at its peak."""

    @property
    def peak(self) -> int:
        """The most that was held: reserved, where recorded, else allocated."""
        return self.peak_reserved or self.peak_allocated or 0


@dataclass(frozen=True, eq=False)
class ExtraWork:
    """Work of one rank that a setting would make unnecessary.

    ``host`` is when its host does it, own clock, ``device`` when its device does: from the first to the last piece of
    work that a stretch of the host launches (nothing on a rank without device work). ``count`` has for each step how
    often it is done, ``grown_bytes`` by how much the allocated memory grows in it; None where that is not recorded.
    """

    host: Intervals
    device: Intervals
    count: Int64
    grown_bytes: Int64 | None = None

    def of_rank(self, *, on_device: bool) -> Intervals:
        """The rank's time for it: of its device where it has work, else of its host."""
        return self.device if on_device else self.host


@dataclass(frozen=True, eq=False)
class LoopPart:
    """A loop over many tensors in one part of the training loop. ``count`` are its operators in each step (on a device
    its kernels) that one call would spare, ``took_ns`` their time, ``operators`` what it mostly calls.
    """

    name: str
    count: Int64
    took_ns: Int64
    operators: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OperatorLoops:
    """Loops over many tensors outside the model, and what one call for all of them would spare."""

    parts: tuple[LoopPart, ...]
    optimizer: ExtraWork | None
    """In the optimizer's step, of a rank that computes on CPUs; None with a device (``RankPartial.optimizer_loops``).
    """
    others: ExtraWork


@dataclass(frozen=True, eq=False)
class LoopWork:
    """What one part of the training loop computes beside the training. ``took_ns`` is its time in each step,
    ``forwards`` the model's forwards without gradients in it, ``operators`` what takes longest; ``of_model``: some of
    these are layers of a model.
    """

    name: str
    took_ns: Int64
    forwards: Int64
    operators: tuple[str, ...]
    of_model: bool


@dataclass(frozen=True, eq=False)
class RankPartial:
    """The analysis of one rank. Times are ns on the rank's own clock."""

    source: str
    rank: int | None
    world_size: int | None
    backend: str
    host: str
    processes: frozenset[int]
    """Process ids of the threads with host events; empty where they are not recorded as numbers."""
    devices: tuple[Device, ...]
    """The devices that this rank's work ran on; empty on a rank without device work."""
    has_devices: bool
    """The trace describes devices, or has operators that only run on some, whether or not it has device work."""
    has_device_work: bool
    steps: Steps
    timeline: Timeline
    """All exposed communication is COMM_TRANSFER until the ranks are compared."""
    communication: Intervals
    pauses: Intervals
    """When the host was in no operator and no call for long (``HostActivity``)."""
    named_host: dict[str, Intervals]
    ranges: dict[str, Intervals]
    """The user's own ranges on the training threads over the whole recording, by name: the outermost ones."""
    collectives: Collectives
    progress: Progress
    loading: Loading
    host_events: HostEvents
    forwards: Int64
    """Forward passes of the model that is trained begun in each step, where ranges mark them (torch's of
    DistributedDataParallel, else the recorder's): micro-batches, where gradients accumulate."""
    keeps_gradients: Bool
    """Of each step: no gradients are cleared and no optimizer steps from its first function of autograd to its last, so
    that several backward passes accumulate."""
    passes: Passes
    """Forwards and backwards of micro-batches in a pipeline; empty where nothing marks them."""
    recomputation: ExtraWork
    conversions: ExtraWork
    optimizer_loops: ExtraWork
    loops: OperatorLoops
    loop_work: tuple[LoopWork, ...]
    bucket_copies: ExtraWork
    buffer_copies: ExtraWork
    searches: ExtraWork
    """For parameters that get no gradient."""
    gather_copies: ExtraWork
    reduced_gradients: ReducedGradients
    gradient_bytes: tuple[int, ...]
    """Of each gradient in the order in which they are ready, of all backwards of a step; empty where not recorded."""
    flops: RankFlops
    tables: RankTables
    lanes: RankLanes
    """Events of one step, for the picture on the page."""
    memory: tuple[MemoryUse, ...]
    """What its allocators held; empty where not recorded."""
    has_shapes: bool
    strategies: tuple[str, ...]
    """Parallel strategies that the names of ranges show; empty where none does."""
    versions: dict[str, str]
    parse_report: ParseReport

    def microbatches(self, step: int) -> int:
        """Micro-batches of a step (by its number), at least 1: forwards where ranges mark them, else the batches drawn
        from a loader.
        """
        index = int(self.steps.indices_of(np.array([step]))[0])
        return int(self.forwards[index] or self.loading.batches[index] or 1)
