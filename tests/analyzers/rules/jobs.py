"""Jobs for the tests of rules: generated and read through the whole analysis, or facts written down by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import perfscope
from perfscope.analyzers import rules
from perfscope.analyzers.facts import JobFacts
from perfscope.findings import Finding
from perfscope.metadata import DataLoaderRecord, RunMetadata
from perfscope.summary import ROWS, AccountRow, Summary
from perfscope.summary_tables import KernelRow
from tests.generator import JobSpec, ModelSpec, NetworkSpec, simulate

STEP_US = 100_000.0

QUICK = JobSpec(model=ModelSpec(tokens=2048), end_sync=True, network=NetworkSpec(busbw_gbps=600.0))
"""4 ranks, steps of about 3.4 ms, the host never ahead of the device by more than a step."""


@dataclasses.dataclass(frozen=True)
class Analyzed:
    """A generated job: what the user gets, and what the rules were asked about."""

    summary: Summary
    facts: JobFacts

    @property
    def rules(self) -> set[str]:
        """Of the findings."""
        return {finding.rule for finding in self.summary.findings}

    def told(self, **settings: dict[str, Any]) -> JobFacts:
        """The facts as if the run had recorded these settings on every rank."""
        runs = {rank: RunMetadata(rank=rank, settings=settings) for rank in self.facts.ranks}
        return dataclasses.replace(self.facts, runs=runs)


def analyze(spec: JobSpec, folder: Path) -> Analyzed:
    """Generate a job, write its traces, analyze them as a user would."""
    simulate(spec).write(folder)
    asked: list[JobFacts] = []
    evaluate = rules.evaluate

    def listening(facts: JobFacts) -> tuple[Finding, ...]:
        asked.append(facts)
        return evaluate(facts)

    with mock.patch.object(rules, "evaluate", listening):
        summary = perfscope.analyze(folder)
    return Analyzed(summary, asked[0])


def account(rank: int, **rows: float) -> AccountRow:
    """A rank whose time outside ``rows`` (µs) is compute."""
    values = {f"{name}_us": rows.get(name, 0.0) for name in ROWS}
    values["compute_us"] = STEP_US - sum(values.values())
    exposed = values["exposed_comm_wait_us"] + values["exposed_comm_transfer_us"]
    return AccountRow(rank=rank, step_time_us=STEP_US, comm_us=exposed, hidden_comm_us=0.0, **values)


def facts(*ranks: AccountRow, **others: Any) -> JobFacts:
    """Eight steps of a DDP job on one A100 a rank; ``others`` are further fields."""
    known: dict[str, Any] = {
        "step_time_us": STEP_US, "steps": 8, "ranks": tuple(row.rank for row in ranks), "missing_ranks": (),
        "accounting": ranks, "dataloader": (), "collectives": (), "cost_model": (), "stragglers": (),
        "strategies": ("ddp",), "perturbation": None, "runs": {}, "devices": ("NVIDIA A100-SXM4-80GB",),
    }  # fmt: skip
    return JobFacts(**{**known, **others})


def runs(
    ranks: int, loader: DataLoaderRecord | None = None, environment: dict[str, str] | None = None, **settings: Any
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
