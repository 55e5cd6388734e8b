"""Writes a job's numbers, curves and page into experiment trackers, with the trackers' own packages.

Each tracker gets the same: the numbers of ``Summary.flat`` as ``perfscope/…``, the curves as ``perfscope/per_step/…``
over the training's own step numbers, those of single ranks in ``rank-N``, and the page and the JSON as files.
"""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from perfscope.errors import PerfscopeError
from perfscope.results.scalars import Curves
from perfscope.results.summary import Summary

PREFIX: Final = "perfscope/"
CURVES: Final = "perfscope/per_step/"
STEP: Final = "perfscope/step"
"""W&B's name of the training's step number: a run's own step only ever grows."""

MOST_AT_ONCE: Final = 1000
"""Metrics in one call of MLflow: its servers refuse more."""


class TrackerError(PerfscopeError):
    """The tracker's package is missing, or the tracker refused; the message says which, and what to do."""


def log_wandb(
    summary: Summary, curves: Iterable[Curves], *, project: str, run: str | None, folder: Path | None, offline: bool
) -> str:
    """Write a job into a run of Weights & Biases, a new one or the one with the id ``run``; where it is.

    ``folder`` is W&B's own folder (``WANDB_DIR``); ``offline`` writes there and sends nothing. Raises TrackerError.
    """
    wandb = _package("wandb")
    options: dict[str, Any] = {"project": project, "job_type": "perfscope", "config": _settings(summary)}
    if run is not None:
        options |= {"id": run, "resume": "allow"}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        options["dir"] = str(folder)
    with _named("W&B"):
        # No console: the command's own few lines are none of the training's.
        started = wandb.init(
            **options, mode="offline" if offline else None, settings=wandb.Settings(console="off", silent=True)
        )
        started.define_metric(STEP)
        started.define_metric(f"{CURVES}*", step_metric=STEP)
        for step, values in sorted(_by_step(curves).items()):
            started.log({STEP: step, **values})
        started.summary.update(summary.flat(PREFIX))
        with _files(summary) as files:
            report = wandb.Artifact(f"perfscope-{started.id}", type="perfscope-report")
            for file in files:
                report.add_file(str(file))
            started.log_artifact(report)
            where = Path(started.dir).parent if started.offline else started.url
            started.finish()
    return str(where)


def log_mlflow(summary: Summary, curves: Iterable[Curves], *, experiment: str, run: str | None, uri: str | None) -> str:
    """Write a job into a run of MLflow, a new one of ``experiment`` or the one with the id ``run``; where it is.

    ``uri`` is the tracking server or folder; without, that of ``MLFLOW_TRACKING_URI`` or MLflow's default. Raises
    TrackerError.
    """
    mlflow = _package("mlflow")
    with _named("MLflow"):
        client = mlflow.MlflowClient(tracking_uri=uri)
        if run is None:
            known = client.get_experiment_by_name(experiment)
            number = known.experiment_id if known is not None else client.create_experiment(experiment)
            run = str(client.create_run(number, run_name="perfscope", tags={"perfscope": "analysis"}).info.run_id)
            ends = True
        else:
            client.get_run(run)
            ends = False
        metrics = list(_mlflow_metrics(mlflow, summary, curves))
        for first in range(0, len(metrics), MOST_AT_ONCE):
            client.log_batch(run, metrics=metrics[first : first + MOST_AT_ONCE])
        for name, value in _settings(summary).items():
            client.set_tag(run, f"perfscope.{name}", value)
        with _files(summary) as files:
            for file in files:
                client.log_artifact(run, str(file), artifact_path="perfscope")
        if ends:
            client.set_terminated(run)
    return f"{run} in {uri or mlflow.get_tracking_uri()}"


def _mlflow_metrics(mlflow: Any, summary: Summary, curves: Iterable[Curves]) -> Iterator[Any]:
    kind = mlflow.entities.Metric
    began_ms = 0
    for each in curves:
        for point in each.points:
            began_ms = max(began_ms, int(point.time_s * 1e3))
            for tag, value in point.values.items():
                yield kind(_curve(each.run, tag), value, int(point.time_s * 1e3), point.step)
    for name, value in summary.flat(PREFIX).items():
        yield kind(name, value, began_ms, 0)


def _by_step(curves: Iterable[Curves]) -> dict[int, dict[str, float]]:
    """All values of each step: a run of W&B is written step by step."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for each in curves:
        for point in each.points:
            rows[point.step].update({_curve(each.run, tag): value for tag, value in point.values.items()})
    return rows


def _curve(run: str, tag: str) -> str:
    """``perfscope/step_ms`` of ``rank-3`` is ``perfscope/per_step/rank-3/step_ms``; the job's has no folder."""
    return f"{CURVES}{'' if run == 'job' else f'{run}/'}{tag.removeprefix(PREFIX)}"


def _settings(summary: Summary) -> dict[str, str]:
    """What tells runs apart, in words."""
    job = summary.job
    said: Mapping[str, object] = {
        "headline": summary.verdict.headline,
        "strategy": ", ".join(job.strategies),
        "backend": job.backend or "",
        "source": summary.source,
        "perfscope_version": summary.perfscope_version,
    }
    return {name: str(value)[:500] for name, value in said.items() if value}


@contextmanager
def _files(summary: Summary) -> Iterator[list[Path]]:
    """The page and the JSON, for as long as the context lasts."""
    with TemporaryDirectory(prefix="perfscope-") as folder:
        page, numbers = Path(folder) / "report.html", Path(folder) / "summary.json"
        summary.write_html(page)
        numbers.write_text(json.dumps(summary.to_dict(), allow_nan=False), encoding="utf-8")
        yield [page, numbers]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrackerError(f"the package {name} is not installed; pip install 'perfscope-profiler[{name}]'") from error


@contextmanager
def _named(tracker: str) -> Iterator[None]:
    """What a tracker refuses is its own message, with its name before it."""
    try:
        yield
    except Exception as error:  # each has exceptions of its own, for everything from a wrong key to no network
        raise TrackerError(f"{tracker} refused: {type(error).__name__}: {error}") from error
