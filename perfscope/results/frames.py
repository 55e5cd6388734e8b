"""A summary's tables as pandas DataFrames: ``summary.frames.collectives``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Final

import pandas as pd

from perfscope.frozen import dataclass
from perfscope.results import rows, tables
from perfscope.results.columns import Table
from perfscope.results.communication.inspector import InspectorRow
from perfscope.results.cost import Cost, SavingRow
from perfscope.results.ending.crash import RankEnd
from perfscope.results.fields import Us
from perfscope.results.findings import Evidence, Finding
from perfscope.results.hang import Hang, HangCallSite, HangLastSeen, HangMismatch, HangVictim
from perfscope.results.history import (
    Goodput,
    HistoryBin,
    HistoryStraggler,
    OutlierStep,
    RankHistory,
    RecordingCost,
    SlowRank,
)
from perfscope.results.memory.snapshots import GrowthRow, HolderRow, OutOfMemoryRow, SnapshotRow
from perfscope.results.notes import Note
from perfscope.results.roles.side_by_side import RoleJobRow, RoleRow, RoleTurn, SharedDevice
from perfscope.results.system import DeviceRow, HostRow, ProcessRow, Series
from perfscope.results.time_breakdown import TimeBreakdown


@dataclass(frozen=True)
class _Steps:
    """The job's used steps."""

    step: Annotated[tuple[int, ...], "The job's own step number; counted from 0 where nothing numbers the steps."]
    step_time_us: Annotated[tuple[Us, ...], "From the last rank's begin of the step to its last rank's end."]

    @classmethod
    def of(cls, summary: Any) -> _Steps:
        times = summary.job.step_time_us_per_step
        return cls(summary.job.steps if len(summary.job.steps) == len(times) else tuple(range(len(times))), times)


@dataclass(frozen=True)
class _FindingsEvidence:
    """What one finding rests on."""

    finding: Annotated[int, "Row of the findings."]
    rule: str
    evidence: tuple[Evidence, ...]

    @classmethod
    def of(cls, summary: Any) -> tuple[_FindingsEvidence, ...]:
        return tuple(cls(at, finding.rule, finding.evidence) for at, finding in enumerate(summary.findings))


def _by_share(summary: Any) -> tuple[rows.CollectiveRow, ...]:
    """The collectives, the most frequent of their last arrivers first."""
    return tuple(
        dataclasses.replace(
            row, last_arriver=dict(sorted(row.last_arriver.items(), key=lambda item: (-item[1], item[0])))
        )
        for row in summary.collectives
    )


def _savings(summary: Any) -> tuple[SavingRow, ...]:
    if summary.cost is None:
        return ()
    return (*summary.cost.savings, *(() if summary.cost.plan is None else (summary.cost.plan,)))


class Frames:
    """Every table of one summary as a DataFrame, made when it is first asked for.

    Each is an attribute (``frames.collectives``), and all are there by name: ``frames["collectives"]``,
    ``list(frames)``, ``frames.describe("collectives")``. Units stand in the columns' names (``_us``, ``_bytes``,
    ``_gbps``; shares are 0..1); what the data cannot support is missing (NaN, ``<NA>`` or None). A table without rows
    has its columns all the same, with the same types.
    """

    job = Table(
        rows.JobInfo,
        "What was run and how long its steps took: one row. Model, settings and versions are in ``summary.job``.",
        without=("failures", "step_time_us_per_step", "time_breakdown_us_per_step", "model", "settings", "versions"),
    )
    steps = Table(_Steps, "Time of each used step.", _Steps.of, each=("step", "step_time_us"))
    time_breakdown = Table(
        TimeBreakdown,
        "Where each rank's step went, means per step: the ten categories add up to ``step_time_us``.",
        without=("named_host_us", "own_us_per_step"),
    )
    named_host = Table(
        TimeBreakdown,
        "Parts of ``idle_host_us`` that have a visible name: garbage collection, checkpoints.",
        "time_breakdown",
        only=("rank", "named_host_us"),
        each=("named_host_us",),
        renamed={"key": "name", "named_host_us": "us"},
    )
    clock = Table(rows.ClockRow, "What was added to each rank's clock to meet the lowest rank's.")
    collectives = Table(
        rows.CollectiveRow,
        "Collectives by group, kind, type and size.",
        without=("last_arriver", "transfer_us_per_step"),
    )
    last_arrivers = Table(
        rows.CollectiveRow,
        "The ranks that came last in the collectives, with their share, the most frequent first.",
        _by_share,
        only=("group", "kind", "dtype", "bytes", "last_arriver"),
        each=("last_arriver",),
        renamed={"key": "rank", "last_arriver": "share"},
    )
    cost_model = Table(rows.CostRow, "The fitted cost of a collective by group and kind: t(S) = alpha + S·f(n)/B.")
    groups = Table(tables.GroupRow, "Process groups and what they are for.")
    stragglers = Table(rows.StragglerRow, "Ranks, hosts and stages that the others wait for, worst first.")
    critical_path = Table(
        rows.PathRow, "The work that fixes the step time; its rows add up to it. Empty where it was not computed."
    )
    dataloader = Table(rows.DataLoaderRow, "Each rank's data loading, per step.")
    utilisation = Table(
        rows.Utilisation, "Model FLOPs utilisation of the whole job: one row.", without=("flops_by_dtype",)
    )
    flops_by_dtype = Table(
        rows.Utilisation,
        "Types in which the model's FLOPs ran.",
        "utilisation",
        only=("flops_by_dtype",),
        each=("flops_by_dtype",),
        renamed={"key": "dtype", "flops_by_dtype": "share"},
    )
    memory = Table(rows.MemoryRow, "Peak memory, headroom and allocation retries of each rank.")
    memory_timeline = Table(
        tables.MemoryTimeline,
        "Memory over the used steps, a row for each point in time.",
        each=("time_us", "allocated_bytes", "reserved_bytes"),
    )
    kernels = Table(tables.KernelRow, "Device work by name, the costliest first.")
    operators = Table(tables.OperatorRow, "Operators by name, the costliest first.")
    modules = Table(
        tables.ModuleRow, "Named ranges (modules, phases) and the device work launched in them, costliest first."
    )
    compiled = Table(
        tables.CompiledRow,
        "Calls in compiled code and annotated kernels of CUDA graphs, with what they compute, costliest first.",
    )
    compiled_modules = Table(
        tables.CompiledModuleRow, "Modules in compiled code and the time of what computes them, costliest first."
    )
    launches = Table(tables.LaunchRow, "How each rank feeds its device.")
    plan = Table(rows.Plan, "All changes that can be replayed, replayed together: one row, none for fewer than two.")
    curves = Table(
        tables.CurveRow,
        "Predicted step time over the values of settings that can be replayed, a row for each point.",
        each=("points",),
        renamed={"unit": "setting_unit"},
    )
    pipeline = Table(
        tables.Pipeline, "The job's pipeline: one row, none where there is no pipeline.", without=("stages",)
    )
    stages = Table(tables.StageRow, "The pipeline's stages, per step, means over their ranks.", "pipeline.stages")
    history = Table(
        HistoryBin,
        "Every step of the run, captured or not, in segments of consecutive steps.",
        "history.bins",
        without=("stages_us",),
    )
    history_bin_stages = Table(
        HistoryBin,
        "The stages of those segments, per step, means over ranks.",
        "history.bins",
        only=("first_step", "last_step", "stages_us"),
        each=("stages_us",),
        renamed={"key": "stage", "stages_us": "us"},
    )
    history_ranks = Table(RankHistory, "Each rank's steps over the whole run.", "history.ranks", without=("stages_us",))
    history_stages = Table(
        RankHistory,
        "The stages of each rank's steps over the whole run; with ``other`` they add up to the step.",
        "history.ranks",
        only=("rank", "stages_us"),
        each=("stages_us",),
        renamed={"key": "stage", "stages_us": "us"},
    )
    outlier_steps = Table(
        OutlierStep,
        "Steps of the run that took far longer than those around them, the longest first.",
        "history.outliers",
    )
    slow_ranks = Table(
        SlowRank,
        "Ranks that spent more of the run's steps in a stage than their peers, the largest excess first.",
        "history.slow_ranks",
    )
    goodput = Table(Goodput, "Where the wall time of the run went: one row.", "history.goodput")
    recording_cost = Table(
        RecordingCost, "What recording takes of each step outside captures: one row.", "history.recording_cost"
    )
    history_stragglers = Table(
        HistoryStraggler,
        "Ranks that delayed steps of the run, found from the time in which each did not wait, the costliest first.",
        "history.stragglers",
        without=("stages_us",),
    )
    hang = Table(
        Hang,
        "Why the job stands still: one row, none where it does not.",
        without=("mismatches", "victims", "call_sites", "last_seen"),
    )
    hang_missing = Table(HangLastSeen, "The last that is known of each missing rank.", "hang.last_seen")
    hang_victims = Table(HangVictim, "Ranks that wait in consequence of a hang.", "hang.victims")
    hang_call_sites = Table(HangCallSite, "Where in the code ranks stand.", "hang.call_sites")
    hang_mismatches = Table(
        HangMismatch, "Collectives that ranks did not issue alike.", "hang.mismatches", each=("variants",)
    )
    crash = Table(RankEnd, "How the ranks of a failed job ended, those of the cause first.", "crash.ends")
    inspector = Table(
        InspectorRow,
        "Collectives as NCCL Inspector logged them, by communicator, kind and size.",
        without=("last_arriver",),
    )
    memory_snapshots = Table(
        SnapshotRow, "What the caching allocator of each device held, from memory snapshots.", "snapshots.devices"
    )
    memory_holders = Table(
        HolderRow, "Who holds the memory at the peak, by place in the code, from memory snapshots.", "snapshots.holders"
    )
    memory_growth = Table(
        GrowthRow, "What holds more memory at the begin of each step, from memory snapshots.", "snapshots.growth"
    )
    memory_failures = Table(
        OutOfMemoryRow, "Allocations that failed because memory ran out, and why.", "snapshots.ooms"
    )
    roles = Table(
        RoleRow, "Roles side by side: who is busy, and who waits for whom.", "roles.rows", without=("waits", "phases")
    )
    role_waits = Table(
        RoleRow,
        "How long each role is idle while another is busy.",
        "roles.rows",
        only=("role", "waits"),
        each=("waits",),
        renamed={"key": "waits_for", "waits": "share"},
    )
    role_phases = Table(
        RoleRow,
        "The user's own ranges of each role.",
        "roles.rows",
        only=("role", "phases"),
        each=("phases",),
        renamed={"key": "name", "phases": "share"},
    )
    role_jobs = Table(
        RoleJobRow, "Each job of a role by itself: the account of its own steps.", "roles.jobs",
        without=("time_breakdown",),
    )  # fmt: skip
    role_turns = Table(RoleTurn, "Stretches of every role on the common clock.", "roles.turns")
    shared_devices = Table(SharedDevice, "Devices that several roles use.", "roles.devices", without=("shares",))
    hosts = Table(HostRow, "What each host did during the used steps, where the system sampler ran.", "system.hosts")
    devices = Table(
        DeviceRow,
        "What each accelerator did during the used steps, where the system sampler ran.",
        "system.devices",
        without=("throttled",),
    )
    throttled = Table(
        DeviceRow,
        "Why devices ran below their highest clocks, a row for each reason.",
        "system.devices",
        only=("host", "index", "throttled"),
        each=("throttled",),
        renamed={"key": "reason", "throttled": "share"},
    )
    processes = Table(
        ProcessRow,
        "What each rank's process and its data loader workers did, where the system sampler ran.",
        "system.processes",
    )
    system_timeline = Table(
        Series,
        "Hosts and devices over time around the used steps, a row for each sample of each quantity.",
        "system.series",
        each=("time_us", "values"),
        renamed={"values": "value"},
    )
    cost = Table(Cost, "What the job costs: one row, none where no price was given.", without=("savings", "plan"))
    savings = Table(
        SavingRow,
        "What each finding saves in a day, where a price was given; the plan of all of them comes last.",
        _savings,
    )
    replay = Table(rows.Replay, "How well the unchanged step replays: one row.")
    findings = Table(
        Finding,
        "What to change, the most severe first.",
        without=("evidence",),
        renamed={"action_old": "action_from", "action_new": "action_to"},
    )
    evidence = Table(
        _FindingsEvidence, "The numbers that the findings rest on.", _FindingsEvidence.of, each=("evidence",)
    )
    notes = Table(Note, "What must be known to judge the numbers: what is missing, bounded, perturbed or assumed.")
    failures = Table(rows.Failure, "Ranks that could not be analyzed, and why.", "job.failures")
    step_timeline = Table(
        rows.StepTimeline,
        "One typical step of each rank, a row for each segment of one category.",
        each=("categories", "start_us", "duration_us"),
        renamed={"categories": "category"},
    )
    lanes = Table(
        tables.Lane,
        "One step's timeline of the ranks that show most, a row for each entry of a lane.",
        without=("texts",),
        each=(
            "start_us",
            "duration_us",
            "name",
            "operator",
            "events",
            "busy_us",
            "group",
            "bytes",
            "wait_us",
            "waited_for",
        ),
        texts=("name", "operator", "group"),
        renamed={"kind": "lane"},
    )

    def __init__(self, summary: Any) -> None:
        self._summary = summary
        self._made: dict[str, pd.DataFrame] = {}

    def describe(self, name: str) -> pd.DataFrame:
        """What each column of a table is: its name, unit, dtype and meaning. Raises KeyError for no such table."""
        stated = ("name", "unit", "dtype", "meaning")
        described: pd.DataFrame = pd.DataFrame(
            {
                "column" if what == "name" else what: [getattr(column, what) for column in _table(name).columns]
                for what in stated
            }
        )
        return described

    def __getitem__(self, name: str) -> pd.DataFrame:
        """The table of that name. Raises KeyError, naming those that there are."""
        if name not in self._made:
            self._made[name] = _table(name).frame(self._summary)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(TABLES)

    def __len__(self) -> int:
        return len(TABLES)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} ({sum(1 for _ in table.rows(self._summary))})" for name, table in TABLES.items())
        return f"<Frames of {self._summary.source or 'a summary'}: {sizes}>"


TABLES: Final[dict[str, Table]] = {name: table for name, table in vars(Frames).items() if isinstance(table, Table)}


def _table(name: str) -> Table:
    if name not in TABLES:
        raise KeyError(f"no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]
