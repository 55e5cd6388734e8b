"""``perfscope mlflow``: a job's numbers, curves and page in a run of MLflow."""

from __future__ import annotations

import click

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.merge.scalars import job_curves
from perfscope.cli.completion import complete_files
from perfscope.cli.curves import curve_options
from perfscope.reports.trackers import log_mlflow


@click.command("mlflow", context_settings={"show_default": True})
@click.argument("traces", shell_complete=complete_files)
@click.option("--experiment", default="perfscope", help="MLflow's experiment, made where there is none of that name.")
@click.option("--run", metavar="ID", help="Write into this run, such as the training's own.  [default: a new run]")
@click.option("--tracking-uri", "uri", metavar="URI", help="MLflow's server or store. Without: MLFLOW_TRACKING_URI.")
@curve_options
def command(
    traces: str,
    experiment: str,
    run: str | None,
    uri: str | None,
    ranks: str | None,
    capture: int | None,
    workers: int | None,
) -> None:
    """Write the numbers, the curves over steps, and the page of the job in TRACES into a run of MLflow.

    The numbers are those of summary.flat(), the curves those of perfscope tensorboard. Needs the package mlflow, or
    mlflow-skinny.

    Exit code: 0; 1 when MLflow refuses; 2 when nothing in TRACES can be analyzed or no steps are marked.

    \b
    perfscope mlflow perfscope-recording --experiment training --run 0f3c…
    perfscope mlflow perfscope-recording --tracking-uri http://tracking:5000
    """
    summary = analyze(traces, capture=capture, workers=workers)
    curves = job_curves(traces, ranks=ranks, capture=capture, workers=workers)
    click.echo(f"mlflow: {log_mlflow(summary, list(curves), experiment=experiment, run=run, uri=uri)}")
