"""JobFacts: what is known of a job once its ranks were compared; rules and the summary are made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from perfscope.analyzers.rank_steps import RankSteps
from perfscope.analyzers.work.sync_table import SyncRow
from perfscope.findings import Prediction
from perfscope.metadata import RunMetadata
from perfscope.summary import AccountRow, CollectiveRow, CostRow, DataLoaderRow, MemoryRow, StragglerRow
from perfscope.summary_system import System
from perfscope.summary_tables import GroupRow, KernelRow, LaunchRow, ModuleRow, OperatorRow, Pipeline

Predict = Callable[[Mapping[str, str]], Prediction | None]
"""Settings of ``perfscope whatif`` -> predicted step time, ns; None where they cannot be replayed."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Results that rules look at. Times are µs, as in the summary."""

    step_time_us: float
    steps: int
    """Used steps; 0 when nothing marks steps."""
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    accounting: tuple[AccountRow, ...]
    dataloader: tuple[DataLoaderRow, ...]
    collectives: tuple[CollectiveRow, ...]
    cost_model: tuple[CostRow, ...]
    stragglers: tuple[StragglerRow, ...]
    strategies: tuple[str, ...]
    perturbation: float | None
    """Profiled over unprofiled step time; None when not known."""
    runs: Mapping[int, RunMetadata]
    """What the ranks wrote beside their traces; empty for traces of other tools."""
    system: System | None = None
    """What the system sampler saw of the machines; None where nothing did."""

    microbatches: int = 1
    """Forward passes of DistributedDataParallel per step; 1 also where that is not recorded."""
    pipeline: Pipeline | None = None
    """None where the job has no pipeline."""
    balanced_step_ns: Prediction | None = None
    """The step with the pipeline's work spread evenly over its stages, played; None where it is even already."""
    devices: tuple[str, ...] = ()
    """Distinct device names."""
    kernels: tuple[KernelRow, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    launches: tuple[LaunchRow, ...] = ()
    syncs: tuple[SyncRow, ...] = ()
    """Blocking calls that ran devices dry, the costliest first."""
    groups: tuple[GroupRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    step_numbers: tuple[int, ...] = ()
    """The used steps."""
    per_step: Mapping[int, RankSteps] = field(default_factory=dict)
    """Every rank's used steps one by one, in the order of ``step_numbers``."""
    predict: Predict | None = None
    """Plays the recorded steps with settings changed; None where they cannot be played."""

    @property
    def torch_ddp(self) -> bool:
        """Is torch's DistributedDataParallel at work? Frameworks that reduce gradients themselves say so."""
        theirs = any("implementation" in run.settings.get("ddp", {}) for run in self.runs.values())
        return "ddp" in self.strategies and not theirs

    @property
    def run(self) -> RunMetadata | None:
        """What the lowest rank wrote about its run; None for traces of other tools."""
        return self.runs[min(self.runs)] if self.runs else None

    def typical_us(self, row: str) -> float:
        """A row of the account per step, median over the ranks: what one rank alone suffers from is a straggler's."""
        return median(entry.rows()[row] for entry in self.accounting) if self.accounting else 0.0

    @property
    def few_steps(self) -> bool:
        """Too few steps for evidence: confidence is low."""
        return self.steps < 5
