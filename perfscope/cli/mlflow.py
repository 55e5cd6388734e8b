"""``perfscope mlflow``: a job's numbers, curves and page in a run of MLflow."""

from __future__ import annotations

import click

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.merge.scalars import job_curves
from perfscope.cli.number import Whole
from perfscope.reports.trackers import log_mlflow


@click.command("mlflow", context_settings={"show_default": True})
@click.argument("traces")
@click.option("--experiment", default="perfscope", help="MLflow's experiment, made where there is none of that name.")
@click.option("--run", metavar="ID", help="Write into this run, such as the training's own.  [default: a new run]")
@click.option("--tracking-uri", "uri", metavar="URI", help="MLflow's server or store. Without: MLFLOW_TRACKING_URI.")
@click.option(
    "--ranks",
    metavar="LIST|all",
    help="Ranks to write besides the job, such as 0,3-7.  [default: all of up to 8, else the 8 most informative ones]",
)
@click.option("--capture", type=Whole(min=0), help="Which capture to write, counted from 0.  [default: all]")
@click.option("--workers", type=Whole(min=1), help="Processes that read ranks in parallel.")
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
