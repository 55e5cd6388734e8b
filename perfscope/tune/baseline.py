"""What the recording of the unchanged job holds: its settings, its findings, and predictions of changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.errors import UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata
from perfscope.results.findings import Finding
from perfscope.results.summary import Summary
from perfscope.tune.candidates import Value, shown

WHATIF: Final = {
    "dataloader.num_workers": "dataloader.num_workers",
    "ddp.bucket_cap_mb": "ddp.bucket_cap_mb",
    "ddp.no_sync": "ddp.no_sync",
    "ddp.comm_dtype": "ddp.comm_dtype",
    "deepspeed.zero_optimization.overlap_comm": "zero.overlap_comm",
    "env.OMP_NUM_THREADS": "env.OMP_NUM_THREADS",
}
"""Settings that can be replayed, and their names in ``perfscope whatif``."""


@dataclass(frozen=True, eq=False)
class BaselineRecording:
    """The recording of the unchanged job, analyzed."""

    summary: Summary
    run: RunMetadata
    """The first rank's."""
    context: Context | None
    """None where the recorded steps cannot be replayed."""
    hosts: int

    @property
    def loader(self) -> DataLoaderMetadata | None:
        """The loader that the training draws from; None without one."""
        return self.run.dataloaders[0] if self.run.dataloaders else None

    @property
    def microbatches(self) -> int:
        """Backwards per step, one after the other; 1 without accumulation."""
        return int(self.setting("gradient_accumulation").get("backwards_per_step", 1))

    @property
    def cores(self) -> int | None:
        """Of the host, per rank there; None where it is not known."""
        return max(self.run.cpu_count // self.run.local_world_size, 1) if self.run.cpu_count else None

    def setting(self, name: str) -> Mapping[str, Any]:
        """A strategy's settings; empty where the job does not use it."""
        return self.run.settings.get(name, {})

    def finding(self, name: str) -> Finding | None:
        """The finding that asks for a setting of that name: it can be replayed, or its advice names the argument."""
        argument = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b")
        for finding in self.summary.findings:
            # The text of a finding may name several variables.
            how = finding.action.how if name.startswith("env.") else ""
            if WHATIF.get(name) in finding.whatif or argument.search(f"{finding.action.setting} {how}"):
                return finding
        return None

    def advised(self, name: str) -> float | None:
        """The number that a finding asks for; None where none does."""
        finding = self.finding(name)
        if finding is None:
            return None
        try:
            return float(finding.whatif.get(WHATIF.get(name, ""), finding.action.new or ""))
        except ValueError:
            return None

    def predict(self, changes: Mapping[str, Value]) -> WhatIfAnswer | None:
        """The replayed step with all ``changes`` that can be replayed; None where one cannot."""
        if self.context is None or not changes or not changes.keys() <= WHATIF.keys():
            return None
        try:
            return predict(self.context, {WHATIF[name]: shown(value) for name, value in changes.items()})
        except UnusableInput:
            return None


def baseline_of(recording: Path) -> BaselineRecording:
    """Analyze a recording. Raises UnusableInput where no rank of it can be analyzed."""
    summary = analyze(recording)
    context = context_of(recording)
    runs = context.runs
    if not runs:
        raise UnusableInput(f"{recording}: no rank wrote its metadata; the command's Python must read PYTHONPATH")
    return BaselineRecording(summary, runs[min(runs)], context, len({run.host for run in runs.values()}))
