"""Jobs for the tests of rules: generated and read through the whole analysis, or context written down by hand."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import perfscope
from perfscope.analyzers import summarize
from perfscope.analyzers.rules.context import RuleContext
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata
from perfscope.results.categories import CATEGORIES
from perfscope.results.rows import DataLoaderRow, JobInfo, Verdict
from perfscope.results.summary import Summary
from perfscope.results.tables import CurveRow, KernelRow
from perfscope.results.time_breakdown import TimeBreakdown
from tests.analyzers.measured import without_curves
from tests.generator import JobSpec, ModelSpec, NetworkSpec, simulate
from tests.reports import examples

STEP_US = 100_000.0
MIB = 1 << 20
GIB = 1 << 30

QUICK = JobSpec(model=ModelSpec(tokens=2048), end_sync=True, network=NetworkSpec(busbw_gbps=600.0))
"""4 ranks, steps of about 3.4 ms, the host never ahead of the device by more than a step."""


@dataclasses.dataclass(frozen=True)
class Analyzed:
    """A generated job: what the rules are asked about, and what the user gets."""

    context: RuleContext

    @functools.cached_property
    def summary(self) -> Summary:
        """With all advice but the curves, which takes as long as the rest of an analysis: made for those who look."""
        with without_curves():
            return summarize._advised(self.context)

    @functools.cached_property
    def curves(self) -> tuple[CurveRow, ...]:
        """Those of the summary that a user gets."""
        return summarize._advised(self.context).curves

    @property
    def rules(self) -> set[str]:
        """Of the findings."""
        return {finding.rule for finding in self.summary.findings}

    def with_settings(self, **settings: dict[str, Any]) -> RuleContext:
        """The context as if the run had recorded these settings on every rank."""
        runs = {rank: RunMetadata(rank=rank, settings=settings) for rank in self.context.ranks}
        return dataclasses.replace(self.context, runs=runs)


def analyze(spec: JobSpec, folder: Path) -> Analyzed:
    """Generate a job, write its traces, analyze them as a user would."""
    simulate(spec).write(folder)
    return read(folder)


def read(folder: Path) -> Analyzed:
    """The same of traces that are there."""
    asked: list[RuleContext] = []

    def listening(case: RuleContext) -> Summary:
        asked.append(case)
        return case.summary

    with mock.patch.object(summarize, "_advised", listening):
        perfscope.analyze(folder, workers=1)
    return Analyzed(*asked)


def breakdown(rank: int, **rows: float) -> TimeBreakdown:
    """One rank's time breakdown: the time outside ``rows`` (µs) is compute."""
    values = {f"{name}_us": rows.get(name, 0.0) for name in CATEGORIES}
    values["compute_us"] = STEP_US - sum(values.values())
    exposed = values["exposed_comm_wait_us"] + values["exposed_comm_transfer_us"]
    return TimeBreakdown(rank=rank, step_time_us=STEP_US, comm_us=exposed, hidden_comm_us=0.0, **values)


def context(*ranks: TimeBreakdown, **others: Any) -> RuleContext:
    """Eight steps of a DDP job on one A100 per rank; ``others`` are fields of the context, its summary or its job."""
    info = examples.job(
        len(ranks), (STEP_US / 1e3,) * 8, perturbation=None, devices=("NVIDIA A100-SXM4-80GB",),
    )  # fmt: skip
    summary = examples.summary(
        job=info, time_breakdown=ranks, verdict=Verdict(headline="", healthy=True, first_action=None)
    )
    return changed(RuleContext(summary=summary, runs={}), **others)


def starved(
    blocking_us: float, *, workers: int | None = 0, batch_us: float | None = None, cores: int = 16
) -> RuleContext:
    row = DataLoaderRow(
        rank=0, wait_us=blocking_us, blocking_us=blocking_us, batch_us=batch_us or blocking_us, num_workers=workers
    )
    runs = {0: RunMetadata(rank=0, cpu_count=cores, local_world_size=1)}
    return context(breakdown(0, idle_dataloader=blocking_us), dataloader=(row,), runs=runs)


def changed(case: RuleContext, **others: Any) -> RuleContext:
    """The context with other fields: its own, its summary's or its job's."""
    parts = [{}, {}, {}]
    for name, value in others.items():
        owner = next(at for at, kind in enumerate((RuleContext, Summary, JobInfo)) if name in kind.__dataclass_fields__)
        parts[owner][name] = value
    own, of_summary, of_job = parts
    info = dataclasses.replace(case.info, **of_job)
    return dataclasses.replace(case, summary=dataclasses.replace(case.summary, job=info, **of_summary), **own)


def runs(
    ranks: int, loader: DataLoaderMetadata | None = None, environment: dict[str, str] | None = None, **settings: Any
) -> dict[int, RunMetadata]:
    """What ``ranks`` ranks on one host wrote, all the same."""
    return {
        rank: RunMetadata(
            rank=rank, world_size=ranks, host="node-a", environment=environment or {}, settings=settings,
            dataloaders=(loader,) if loader else (),
        )
        for rank in range(ranks)
    }  # fmt: skip


def kernel(name: str, us: float, **changes: Any) -> KernelRow:
    """A kernel that takes ``us`` per step."""
    values: dict[str, Any] = {
        "category": "compute", "operator": None, "operator_class": "other", "count_per_step": 1.0, "mean_us": us,
        "min_us": us, "max_us": us, "share": 0.1, "slowest_rank": None, "slowest_over_median": None, "dtype": None,
        "tensor_cores": None, "tflops": None, "share_of_peak": None,
    }  # fmt: skip
    return KernelRow(name=name, us_per_step=us, **{**values, **changes})
