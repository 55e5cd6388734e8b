"""``perfscope.compare``: what changed between recordings, and which of the changes are more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfscope._version import __version__
from perfscope.analyzers.difference.advised import Ask, finding_changes, tried_changes
from perfscope.analyzers.difference.cautions import cautions
from perfscope.analyzers.difference.metrics import metric_changes
from perfscope.analyzers.difference.noise import FLOOR, row_changes, rows_of, step_change
from perfscope.analyzers.difference.parts import collective_changes, path_changes, rank_changes
from perfscope.analyzers.difference.runs import Run, labels, load
from perfscope.analyzers.difference.scaling import scaling
from perfscope.analyzers.difference.settings import setting_changes
from perfscope.analyzers.difference.work import kernel_changes, operator_changes
from perfscope.comparison import Comparison, Difference, RunRow
from perfscope.errors import UnusableInput
from perfscope.summary import Summary

Recording = str | Path | Summary
"""A recording's folder, a folder of traces, a trace, a URL, a summary's JSON file, or a summary."""


def compare(
    before: Recording,
    *after: Recording,
    baselines: Sequence[Recording] = (),
    noise: float = FLOOR,
    workers: int | None = None,
) -> Comparison:
    """Compare one or more recordings with ``before``.

    ``baselines`` are further recordings of the first job: what differs among them is taken for noise. ``noise`` is the
    share of the step below which no difference is claimed. ``workers`` bounds the processes that read traces.

    Raises UnusableInput where a recording cannot be analyzed, or where there is nothing to compare with.
    """
    if not after:
        raise UnusableInput("one recording alone cannot be compared: name a second one")
    runs = [load(recording, workers=workers) for recording in (before, *after)]
    others = [load(recording, workers=workers) for recording in baselines]
    return compare_runs(runs, others, noise)


def compare_runs(runs: Sequence[Run], baselines: Sequence[Run] = (), noise: float = FLOOR) -> Comparison:
    """The same of runs that are loaded already."""
    summaries = [run.summary for run in runs]
    named = labels([*runs, *baselines])
    known = [run.summary for run in baselines]
    result = Comparison(
        runs=tuple(_run_row(run.summary, label) for run, label in zip(runs, named, strict=False)),
        differences=tuple(
            _difference(index, runs[0], run.summary, known, noise) for index, run in enumerate(runs[1:], start=1)
        ),
        scaling=scaling(summaries),
        baselines=tuple(_run_row(run.summary, label) for run, label in zip(baselines, named[len(runs) :], strict=True)),
        perfscope_version=__version__,
    )
    result.self_check()
    return result


def _run_row(summary: Summary, label: str) -> RunRow:
    job = summary.job
    return RunRow(
        label=label,
        source=summary.source,
        headline=summary.verdict.headline,
        started_at=job.started_at,
        world_size=job.world_size,
        ranks=len(job.ranks),
        devices=job.devices,
        steps=len(job.steps),
        step_time_us=job.step_time_us,
        step_time_us_per_step=job.step_time_us_per_step,
        rows_us=rows_of(summary),
        mfu=summary.utilisation.mfu,
        perturbation=job.perturbation,
    )


def _difference(index: int, first: Run, after: Summary, baselines: Sequence[Summary], noise: float) -> Difference:
    before = first.summary
    step = step_change(before, after, baselines, noise)
    changed = setting_changes(before, after)
    return Difference(
        before=0,
        after=index,
        step=step,
        rows=row_changes(before, after, step),
        path=path_changes(before, after),
        metrics=metric_changes(before, after, step),
        collectives=collective_changes(before, after, step),
        kernels=kernel_changes(before, after, step),
        operators=operator_changes(before, after, step),
        ranks=rank_changes(before, after, step),
        findings=finding_changes(before, after),
        tried=tried_changes(before, after, step, changed, _asking(first)),
        settings=changed,
        notes=tuple(cautions(before, after, step, changed)),
    )


def _asking(run: Run) -> Ask | None:
    """Plays the recording before with settings changed; None where only its summary is at hand."""
    if run.path is None:
        return None
    return _Played(run.path).ask


@dataclass
class _Played:
    """A recording, read for predictions when the first is asked for."""

    path: str

    def ask(self, settings: Mapping[str, str]) -> dict[str, float] | None:
        """low, mid, high in µs; None where these settings cannot be played."""
        from perfscope.analyzers.whatif.ask import whatif
        from perfscope.analyzers.whatif.change import CannotReplay

        try:
            found = whatif(self.path, dict(settings))
        except (CannotReplay, UnusableInput):
            return None
        return {"low": found.low_ns / 1e3, "mid": found.mid_ns / 1e3, "high": found.high_ns / 1e3}
