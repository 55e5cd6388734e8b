"""Summary: everything ``perfscope analyze`` found out about one job, as typed values.

This is the contract between the analyzers and everything that shows results: the page and the terminal are rendered
from it alone, ``to_dict`` writes it as JSON (schema ``perfscope.summary/1``). Times here are µs, as in the JSON;
fractions are 0..1; what the data cannot support is None and ``notes`` says why.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from perfscope.summary_cost import Cost
from perfscope.summary_history import History
from perfscope.summary_system import System
from perfscope.summary_tables import (
    CurveRow,
    GroupRow,
    KernelRow,
    Lane,
    LaunchRow,
    MemoryStrip,
    ModuleRow,
    OperatorRow,
    Pipeline,
)

if TYPE_CHECKING:
    from perfscope.frames import Frames

SCHEMA: Final = "perfscope.summary/1"

ROWS: Final = (
    "compute",
    "exposed_comm_wait",
    "exposed_comm_transfer",
    "exposed_copy",
    "idle_dataloader",
    "idle_sync",
    "idle_launch",
    "idle_host",
    "idle_dependency",
    "idle_unknown",
)
"""The rows of the account, in order of precedence. Exclusive and complete: they add up to the step."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank (or file) that could not be analyzed, and why."""

    rank: int | None
    path: str
    error: str

    @property
    def reason(self) -> str:
        """``error`` without the path that it may begin with, for where the path is told beside it."""
        return self.error.removeprefix(f"{self.path}: ")


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something the reader must know to judge a number: what is missing, bounded, perturbed or assumed."""

    about: str
    """What it concerns: ``steps``, ``clock``, ``collectives``, ``utilisation``, ``reading`` …"""
    text: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was run and how long its steps took."""

    world_size: int | None
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    failures: tuple[Failure, ...]
    steps: tuple[int, ...]
    """Step numbers used, common to all ranks present. Empty: nothing marks steps; the whole recording is one window."""
    step_time_us: float
    """Mean advance per step of the slowest rank's window."""
    step_time_us_per_step: tuple[float, ...]
    """Windows of the slowest rank, one for each used step; their mean is ``step_time_us``."""
    strategy: str | tuple[str, ...]
    backend: str | None
    devices: tuple[str, ...]
    """Distinct device names."""
    perturbation: float | None
    """Median profiled step / median unprofiled step, both on the host's clock; 1.1: profiling slowed it by 10 %."""
    # Beyond the contract's keys:
    steps_from: str = ""
    """What marked the steps, as a phrase: "ProfilerStep annotations", "optimizer steps", "nothing: …"."""
    hosts: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    started_at: str | None = None
    model: dict[str, Any] | None = None
    """name, parameters, parameter_bytes … of the lowest rank present."""
    batch_shape: tuple[int, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    unprofiled_step_us: float | None = None
    """Median wall time of a step outside the recording, slowest rank."""
    exit_code: int | None = None
    """What the recorded command returned."""
    batches_per_step: float | None = None
    """Batches that one rank takes from its data loader in a used step, mean; None where none was seen."""
    account_us_per_step: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Row of the account -> mean over the ranks in each used step: what of a row is noise. Empty without steps."""


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """Where one rank's step went: means per step in µs. The ten rows of ``ROWS`` add up to ``step_time_us``."""

    rank: int
    step_time_us: float
    compute_us: float
    exposed_comm_wait_us: float
    exposed_comm_transfer_us: float
    exposed_copy_us: float
    idle_dataloader_us: float
    idle_sync_us: float
    idle_launch_us: float
    idle_host_us: float
    idle_dependency_us: float
    idle_unknown_us: float
    comm_us: float
    """Time in which a collective ran: hidden_comm_us + both exposed rows."""
    hidden_comm_us: float
    # Beyond the contract's keys:
    host: str = ""
    wait_is_bound: bool = False
    """Not every participant is in the recording: the wait is a lower bound (and transfer an upper one)."""
    named_host_us: dict[str, float] = field(default_factory=dict)
    """Parts of idle_host that have a visible name (garbage collection, checkpoint)."""
    own_us_per_step: tuple[float, ...] = ()
    """All but ``exposed_comm_wait`` in each used step: what is the rank's own, whoever it waits for."""

    def rows(self) -> dict[str, float]:
        """The ten rows by name (without ``_us``), in the order of ``ROWS``."""
        return {name: getattr(self, f"{name}_us") for name in ROWS}

    def self_check(self) -> None:
        """Raise ValueError where the rows do not add up to the step (to a picosecond's rounding)."""
        total = math.fsum(self.rows().values())
        if not math.isclose(total, self.step_time_us, rel_tol=1e-12, abs_tol=1e-6):
            raise ValueError(f"rank {self.rank}: rows add up to {total} us, the step is {self.step_time_us} us")
        exposed = self.exposed_comm_wait_us + self.exposed_comm_transfer_us
        if not math.isclose(self.hidden_comm_us + exposed, self.comm_us, rel_tol=1e-12, abs_tol=1e-6):
            raise ValueError(f"rank {self.rank}: hidden + exposed communication is not communication")


@dataclass(frozen=True, kw_only=True)
class ClockRow:
    """One rank's clock: ``offset_us`` was added to it to meet the lowest rank's."""

    rank: int
    offset_us: float
    residual_us: float | None
    """Median distance of this rank's collective ends from the group's after alignment; None when unaligned."""
    aligned: bool
    # Beyond the contract's keys:
    drift_ppm: float = 0.0
    """Added besides for each second since the middle of the rank's recording, µs; 0 where no trend stands out."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Collectives of one group, kind, dtype and size."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str | None
    bytes: int | None
    count: int
    """Instances over the used steps."""
    transfer_us: float
    """Mean of one instance, from the last arrival to the end."""
    wait_us: float | None
    """Mean over instances and participants; None with one participant recorded."""
    algbw_gbps: float | None
    """Bytes / transfer, GB/s (10^9); None where the transfer is only bounded by a single participant."""
    busbw_gbps: float | None
    last_arriver: dict[int, float]
    """Rank -> share of instances in which it came last."""
    complete: bool = True
    """All participants are in the recording."""
    transfer_us_per_step: tuple[float, ...] = ()
    """Transfer of all of a used step's instances together; the mean over the steps is that of one instance times the
    instances in a step."""


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """t(S) = alpha + S * f(n) / B, fitted on transfer times of one group and kind."""

    group: str
    kind: str
    alpha_us: float
    busbw_gbps: float | None
    residual: float
    """Median relative error of the fit."""


@dataclass(frozen=True, kw_only=True)
class StragglerRow:
    """A rank that made the others wait: step time that would be saved were it as fast as its peers."""

    rank: int
    cause: str
    """compute, dataloader, launch, host, sync, copy or communication."""
    lost_us: float
    confidence: str
    # Beyond the contract's keys:
    share_of_steps: float = 1.0
    """Share of the used steps in which it was the one that came last."""
    host: str = ""
    scope: str = "rank"
    """What is slow: ``rank``, ``ranks`` (several, alike and at once), ``host`` (its ranks alike), ``stage`` (a
    pipeline's) or ``job`` (any rank, in turn)."""
    ranks: tuple[int, ...] = ()
    """All ranks of that scope; ``rank`` is the slowest of them."""
    pattern: str = "steady"
    """``steady`` (most steps), ``intermittent`` (some) or ``rotating`` (some, on changing ranks)."""
    steps: tuple[int, ...] = ()
    """Step numbers in which it held the job up."""


@dataclass(frozen=True, kw_only=True)
class PathRow:
    """A stretch of the critical path: its rows add up to the step time."""

    rank: int
    category: str
    us: float


@dataclass(frozen=True, kw_only=True)
class DataLoaderRow:
    """One rank's data loading, µs per step."""

    rank: int
    wait_us: float
    """Time inside the loader's ``__next__``."""
    blocking_us: float
    """The part of it in which nothing else of the step went on: the account's idle_dataloader."""
    batch_us: float | None
    """Time to load one batch on one worker; None where it cannot be told."""
    num_workers: int | None


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Model FLOPs utilisation of the whole job."""

    mfu: float | None
    hfu: float | None
    model_flops_per_step: float | None
    """Summed over the ranks present."""
    flops_coverage: float | None
    """Share of matrix-operator time whose shapes were recorded; below 1 the FLOPs are a lower bound."""
    peak_tflops: float | None
    """Dense peak of one device for ``dtype``; where products ran in several types, what it can reach on their mix."""
    dtype: str | None
    """Type in which most model FLOPs ran."""
    causal: str
    """``full``: causal attention counted in full."""
    why_absent: str | None
    # Beyond the contract's keys:
    peak_source: str | None = None
    hardware_flops_per_step: float | None = None
    """Model FLOPs and what was computed again: activation checkpointing, scores in attention's backward."""
    flops_by_dtype: dict[str, float] = field(default_factory=dict)
    """Share of the model FLOPs that ran in each type."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Largest memory a rank's allocator held."""

    rank: int
    peak_bytes: int | None
    capacity_bytes: int | None
    # Beyond the contract's keys:
    allocated_peak_bytes: int | None = None
    """Largest sum of live tensors; ``peak_bytes`` is what the allocator held from the device, where known."""
    fragmentation: float | None = None
    """1 - allocated / reserved at the peak of reserved, allocated being the most that it was there: a lower bound."""
    headroom_bytes: int | None = None
    """Capacity - peak; None where either is unknown."""
    allocation_retries: int | None = None
    """Times that the allocator had to give its cache back and ask again, since the process began; None where not
    recorded."""
    kind: str = "device"
    """``device``, or ``host`` on a rank without one: of that only ``allocated_peak_bytes`` is known, counted from the
    profiler's start and so a lower bound."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One step of one rank as the exclusive account saw it, for a picture.

    Consecutive stretches; ``categories`` are names of ``ROWS``; times are µs from the earliest start of that step on
    any rank, aligned. Stretches shorter than the picture can show are merged into their longer neighbour.
    """

    rank: int
    step: int | None
    categories: tuple[str, ...]
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class EvidenceRow:
    """One number that a finding rests on."""

    what: str
    value: float
    unit: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ActionRow:
    """What to change; in JSON the keys are ``setting``, ``from``, ``to``, ``how``, ``costs``."""

    setting: str
    old: str | None
    new: str | None
    how: str
    costs: str | None = None
    """What the change takes besides time: memory, precision, statistics; None where nothing."""

    def to_dict(self) -> dict[str, Any]:
        """As in the contract, where two keys are Python keywords."""
        return {"setting": self.setting, "from": self.old, "to": self.new, "how": self.how, "costs": self.costs}


@dataclass(frozen=True, kw_only=True)
class FindingRow:
    """A finding as the contract writes it."""

    rule: str
    title: str
    severity: str
    evidence: tuple[EvidenceRow, ...]
    action: ActionRow
    predicted_step_us: dict[str, float] | None
    """low, mid, high; None where the change could not be replayed."""
    ceiling: float | None
    obtained: str
    confidence: str
    # Beyond the contract's keys:
    whatif: dict[str, str] = field(default_factory=dict)
    """The same change as settings of ``perfscope whatif``; empty where it cannot be replayed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All changes of the findings that can be replayed, played together: their savings overlap and are never added."""

    whatif: dict[str, str]
    predicted_step_us: dict[str, float]
    """low, mid, high."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer in one breath."""

    headline: str
    """One sentence: what limits the job, who, and by how much; or that it is healthy."""
    healthy: bool
    """No finding of medium severity or above."""
    first_action: str | None
    """What to do first, and what it can bring; None when healthy."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How well the unchanged step replays. All None until a replay was run."""

    measured_step_us: float | None = None
    replayed_step_us: float | None = None
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One job's analysis."""

    job: Job
    accounting: tuple[AccountRow, ...]
    clock: tuple[ClockRow, ...]
    collectives: tuple[CollectiveRow, ...]
    cost_model: tuple[CostRow, ...]
    stragglers: tuple[StragglerRow, ...]
    critical_path: tuple[PathRow, ...] | None
    """None until it is computed."""
    dataloader: tuple[DataLoaderRow, ...]
    utilisation: Utilisation
    memory: tuple[MemoryRow, ...]
    replay: Replay
    findings: tuple[FindingRow, ...]
    # Beyond the contract's keys:
    verdict: Verdict
    notes: tuple[Note, ...]
    strips: tuple[Strip, ...]
    kernels: tuple[KernelRow, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    launches: tuple[LaunchRow, ...] = ()
    ncu_command: str | None = None
    """Shell commands that measure the kernels worth a look with Nsight Compute; None where there is none or no NVIDIA
    device."""
    memory_timeline: tuple[MemoryStrip, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    plan: Plan | None = None
    """None where fewer than two findings can be replayed."""
    curves: tuple[CurveRow, ...] = ()
    """Predicted step time over the values of settings that can be replayed; of jobs of up to 64 ranks."""
    pipeline: Pipeline | None = None
    """None where the job has no pipeline."""
    history: History | None = None
    """None where the recording holds no step history."""
    system: System | None = None
    """None where no host was sampled during the used steps."""
    cost: Cost | None = None
    """None where no price was given (``perfscope analyze --price``)."""
    lanes: tuple[Lane, ...] = ()
    """One step's timeline of the most telling ranks."""
    perfscope_version: str = ""
    source: str = ""
    """The folder or file analyzed, as the user named it."""

    @property
    def frames(self) -> Frames:
        """Every table as a pandas DataFrame: ``summary.frames.collectives``."""
        made: Frames = _loaded("perfscope.frames").Frames(self)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The JSON value of schema ``perfscope.summary/1``."""
        document = {"schema": SCHEMA, **dataclasses.asdict(self)}
        for written, finding in zip(document["findings"], self.findings, strict=True):
            written["action"] = finding.action.to_dict()
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Summary:
        """The summary that ``to_dict`` made ``document`` of; unknown keys are left aside. Raises UnusableInput."""
        summary: Summary = _loaded("perfscope.summary_file").summary_from_dict(document)
        return summary

    def _repr_html_(self) -> str:
        """The verdict, as a notebook shows it."""
        html: str = _loaded("perfscope.reports.notebook").render(self)
        return html

    def self_check(self) -> None:
        """Raise ValueError where the account breaks a conservation law."""
        for row in self.accounting:
            row.self_check()


def _loaded(module: str) -> Any:
    """A module of higher layers (pandas, msgspec, jinja2), imported only when a summary is asked for what it makes."""
    return importlib.import_module(module)
