"""Summary: everything ``perfscope analyze`` finds out about one job, as typed values.

The page and the terminal are rendered from it alone, ``to_dict`` writes it as JSON (schema ``perfscope.summary/1``).
Times are µs, as in the JSON; shares are 0..1; what the data cannot support is None, and ``notes`` give the reason.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from perfscope.frozen import dataclass
from perfscope.results import rows, tables
from perfscope.results.communication.inspector import InspectorRow
from perfscope.results.cost import Cost
from perfscope.results.display import Displayed
from perfscope.results.ending.crash import Crash
from perfscope.results.fields import document_of
from perfscope.results.findings import Finding, Findings
from perfscope.results.hang import Hang
from perfscope.results.history import History
from perfscope.results.memory.snapshots import MemorySnapshots
from perfscope.results.notes import Note
from perfscope.results.roles.side_by_side import Roles
from perfscope.results.system import System
from perfscope.results.time_breakdown import TimeBreakdown

if TYPE_CHECKING:
    from perfscope.results.frames import Frames

SCHEMA: Final = "perfscope.summary/1"


@dataclass(frozen=True, kw_only=True, repr=False)
class Summary(Displayed):
    """One job's analysis."""

    _shown_by = "summary"

    job: rows.JobInfo
    time_breakdown: tuple[TimeBreakdown, ...]
    clock: tuple[rows.ClockRow, ...]
    collectives: tuple[rows.CollectiveRow, ...]
    cost_model: tuple[rows.CostRow, ...]
    stragglers: tuple[rows.StragglerRow, ...]
    critical_path: Annotated[
        tuple[rows.PathRow, ...] | None,
        "The chain of dependent work that fixes the job's step time. Its segments add up to the step time. None until "
        "it is computed.",
    ]
    dataloader: tuple[rows.DataLoaderRow, ...]
    utilisation: rows.Utilisation
    memory: tuple[rows.MemoryRow, ...]
    replay: rows.Replay
    findings: tuple[Finding, ...]
    verdict: rows.Verdict
    notes: tuple[Note, ...]
    step_timeline: tuple[rows.StepTimeline, ...]
    kernels: tuple[tables.KernelRow, ...] = ()
    operators: tuple[tables.OperatorRow, ...] = ()
    modules: tuple[tables.ModuleRow, ...] = ()
    compiled: Annotated[
        tuple[tables.CompiledRow, ...],
        "Calls in compiled code and annotated kernels of CUDA graphs; empty where there are none.",
    ] = ()
    compiled_modules: tuple[tables.CompiledModuleRow, ...] = ()
    launches: tuple[tables.LaunchRow, ...] = ()
    ncu_command: Annotated[
        str | None,
        "Shell commands that measure the kernels worth a look with Nsight Compute; None where there is none or no "
        "NVIDIA device.",
    ] = None
    memory_timeline: tuple[tables.MemoryTimeline, ...] = ()
    groups: tuple[tables.GroupRow, ...] = ()
    plan: Annotated[rows.Plan | None, "None where fewer than two findings can be replayed."] = None
    curves: Annotated[
        tuple[tables.CurveRow, ...],
        "Predicted step time over the values of settings that can be replayed; of jobs of up to 64 ranks.",
    ] = ()
    pipeline: Annotated[tables.Pipeline | None, "None where the job has no pipeline."] = None
    history: Annotated[History | None, "None where the recording holds no step history."] = None
    hang: Annotated[Hang | None, "None where the job did not hang, or left no dumps and no stacks."] = None
    crash: Annotated[Crash | None, "None where no rank is known to have failed for a reason of its own."] = None
    inspector: Annotated[
        tuple[InspectorRow, ...], "Collectives as NCCL Inspector logged them; empty without logs."
    ] = ()
    snapshots: Annotated[
        MemorySnapshots | None, "What torch's memory snapshots show; None where the recording holds none."
    ] = None
    roles: Annotated[
        Roles | None,
        "The roles of the recording side by side; None where it has one. All else in the summary is of ``roles.main``.",
    ] = None
    system: Annotated[System | None, "None where no host was sampled during the used steps."] = None
    cost: Annotated[Cost | None, "None where no price was given (``perfscope analyze --price``)."] = None
    lanes: Annotated[
        tuple[tables.Lane, ...],
        "One step's timeline of at most eight ranks: the stragglers and an even choice of the others.",
    ] = ()
    perfscope_version: str = ""
    source: Annotated[str, "The folder or file analyzed, as the user named it."] = ""
    capture: Annotated[
        int | None, "Number of the capture analyzed, counted from 0; None where the recording holds only one."
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", Findings(self.findings))

    @property
    def is_one_window(self) -> bool:
        """True where no steps were found: what is said of a step holds for the whole recording."""
        return not self.job.steps and self.history is None

    @property
    def frames(self) -> Frames:
        """Every table as a pandas DataFrame: ``summary.frames.collectives``."""
        made: Frames = _loaded("perfscope.results.frames").Frames(self)
        return made

    @cached_property
    def figures(self) -> Any:
        """The page's charts as plotly figures (``reports.figures.figures.Figures``), by name and as attributes:
        ``summary.figures.time_breakdown``.
        """
        return _loaded("perfscope.reports.figures.figures").Figures(self)

    def flat(self, prefix: str = "") -> dict[str, float]:
        """The job in single numbers, for experiment trackers: ``wandb.log(summary.flat("perfscope/"))``.

        Names stay as they are from version to version (``docs/trackers.md`` lists them); a number that the recording
        lacks is left out. Names that end in ``_us`` are µs, in ``_bytes`` bytes; shares are 0..1.
        """
        numbers: dict[str, float] = _loaded("perfscope.analyzers.compare.flat").flat(self, prefix)
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """The JSON value of schema ``perfscope.summary/1``."""
        findings = [finding.to_dict() for finding in self.findings]
        # Not in two forms: those of the whole would be thrown away.
        whole = document_of(dataclasses.replace(self, findings=()))
        return {"schema": SCHEMA, **whole, "findings": findings}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Summary:
        """The summary that ``to_dict`` made ``document`` of; unknown keys are ignored. Raises UnusableInput."""
        summary: Summary = _loaded("perfscope.results.file").summary_from_dict(document)
        return summary

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (2020-12) of ``to_dict``, with the definition and the unit of each key."""
        schema: dict[str, Any] = _loaded("perfscope.results.schema").json_schema()
        return schema

    def write_html(self, path: str | PathLike[str]) -> None:
        """Write the page, as ``perfscope analyze`` does. Raises OSError where it cannot be written."""
        _loaded("perfscope.reports.page.page").write(self, Path(path))

    def __repr__(self) -> str:
        return f"<Summary of {self.source or 'a recording'}: {self.verdict.headline[:300]}>"

    def self_check(self) -> None:
        """Raise ValueError where a time breakdown breaks a conservation law."""
        for row in self.time_breakdown:
            row.self_check()


def _loaded(module: str) -> Any:
    """A module of higher layers, or one that needs pandas or msgspec: imported when a summary is asked for it."""
    return importlib.import_module(module)
