"""``perfscope.compare``: what changed between recordings, and which of the changes are significant."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from perfscope._version import __version__
from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.compare.advised import finding_changes, prediction_checks
from perfscope.analyzers.compare.causes import causes_of
from perfscope.analyzers.compare.metrics import metric_changes, scaling
from perfscope.analyzers.compare.noise import FLOOR, category_changes, step_change
from perfscope.analyzers.compare.parts import (
    collective_changes,
    kernel_changes,
    operator_changes,
    path_changes,
    rank_changes,
)
from perfscope.analyzers.compare.sample import breakdown_of
from perfscope.analyzers.compare.settings import cautions, setting_changes
from perfscope.analyzers.compare.stages import stage_changes
from perfscope.errors import UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording import remote
from perfscope.results.comparison import Comparison, Difference, RunRow
from perfscope.results.file import load_summary
from perfscope.results.findings import Predict, Prediction
from perfscope.results.summary import Summary

Recording = str | Path | Summary
"""A recording's folder, a folder of traces, a trace, a URL, a summary's JSON file, or a summary."""

_MARK: Final = b'"perfscope.summary/'


@dataclass(frozen=True)
class LoadedRecording:
    """The summary of a recording to compare, and where it came from."""

    summary: Summary
    path: str | None
    """Path of the traces, which can be replayed; None where only the summary is given."""
    name: str


def compare(
    baseline: Recording,
    *candidates: Recording,
    baselines: Sequence[Recording] = (),
    noise: float = FLOOR,
    workers: int | None = None,
) -> Comparison:
    """Compare each candidate with the baseline.

    ``baselines`` are further recordings of the baseline's job: what they differ by is noise. ``noise`` is the share of
    the step below which no difference is significant. ``workers`` bounds the processes that read traces.

    Raises UnusableInput where a recording cannot be analyzed, or where there is nothing to compare with.
    """
    if not candidates:
        raise UnusableInput("there is nothing to compare the recording with: name a second one")
    runs = [load(recording, workers=workers) for recording in (baseline, *candidates)]
    others = [load(recording, workers=workers) for recording in baselines]
    named = labels([*runs, *others])
    known = [run.summary for run in others]
    result = Comparison(
        runs=tuple(_run_row(run.summary, label) for run, label in zip(runs, named, strict=False)),
        differences=tuple(
            _difference(index, runs[0], run.summary, known, noise) for index, run in enumerate(runs[1:], start=1)
        ),
        scaling=scaling([run.summary for run in runs]),
        baselines=tuple(_run_row(run.summary, label) for run, label in zip(others, named[len(runs) :], strict=True)),
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
        categories_us=breakdown_of(summary),
        mfu=summary.utilisation.mfu,
        perturbation=job.perturbation,
    )


def _difference(
    index: int, first: LoadedRecording, candidate: Summary, baselines: Sequence[Summary], noise: float
) -> Difference:
    baseline = first.summary
    step = step_change(baseline, candidate, baselines, noise)
    changed = setting_changes(baseline, candidate)
    categories = category_changes(baseline, candidate, step)
    causes, significant = causes_of(step, categories)
    stages = stage_changes(baseline, candidate, step)
    checked = prediction_checks(baseline, candidate, step, changed, _predictor(first))
    return Difference(
        baseline=0,
        candidate=index,
        step=step,
        categories=categories,
        causes=causes,
        causes_significant=significant,
        path=path_changes(baseline, candidate),
        metrics=metric_changes(baseline, candidate, step),
        collectives=collective_changes(baseline, candidate, step),
        kernels=kernel_changes(baseline, candidate, step),
        operators=operator_changes(baseline, candidate, step),
        ranks=rank_changes(baseline, candidate, step),
        findings=finding_changes(baseline, candidate),
        predictions=checked,
        settings=changed,
        notes=tuple(cautions(baseline, candidate, step, changed, stages, checked)),
        stages=stages,
    )


def _predictor(run: LoadedRecording) -> Predict | None:
    """Predicts step times by replay of a recording with settings changed; None where only its summary is given."""
    path = run.path

    def ask(settings: Mapping[str, str]) -> Prediction | None:
        from perfscope.analyzers.whatif.change import CannotReplay
        from perfscope.analyzers.whatif.whatif import whatif

        try:
            return whatif(str(path), dict(settings)).predicted_us
        except (CannotReplay, UnusableInput):
            return None

    return ask if path is not None else None


def load(recording: Recording, *, workers: int | None = None) -> LoadedRecording:
    """Analyze a recording, or read the summary that ``analyze --json`` wrote of it.

    Raises UnusableInput, naming the path and the remedy.
    """
    if isinstance(recording, Summary):
        return LoadedRecording(recording, None, recording.source)
    path = str(recording)
    if not remote.is_url(path) and is_summary(Path(path)):
        return LoadedRecording(load_summary(path), None, path)
    return LoadedRecording(analyze(path, workers=workers), path, path)


def is_summary(path: Path) -> bool:
    """Is this file a summary? A trace may end in .json as well, but does not name the schema."""
    if path.suffix not in (".json", ".html") or not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_MARK) >= 0


def labels(runs: Sequence[LoadedRecording]) -> list[str]:
    """A short, unique name for each recording: as much of the end of its path as is needed."""
    paths = [PurePosixPath(run.name.rstrip("/").replace("\\", "/")) for run in runs]
    parts = [(path.with_suffix("") if path.suffix in (".json", ".html") else path).parts or ("run",) for path in paths]
    for depth in range(1, max(len(part) for part in parts) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    last = [part[-1] for part in parts]
    return [name if last.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(last, start=1)]
