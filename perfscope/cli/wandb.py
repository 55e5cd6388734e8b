"""``perfscope wandb``: a job's numbers, curves and page in a run of Weights & Biases."""

from __future__ import annotations

from pathlib import Path

import click

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.merge.scalars import job_curves
from perfscope.cli.completion import complete_files
from perfscope.cli.curves import curve_options
from perfscope.reports.trackers import log_wandb


@click.command("wandb", context_settings={"show_default": True})
@click.argument("traces", shell_complete=complete_files)
@click.option("--project", default="perfscope", help="W&B's project.")
@click.option("--run", metavar="ID", help="Write into this run, such as the training's own.  [default: a new run]")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path, file_okay=False), help="W&B's folder, as WANDB_DIR says else."
)
@click.option("--offline", is_flag=True, help="Write into the folder only; wandb sync sends it later.")
@curve_options
def command(
    traces: str,
    project: str,
    run: str | None,
    folder: Path | None,
    offline: bool,
    ranks: str | None,
    capture: int | None,
    workers: int | None,
) -> None:
    """Write the numbers, the curves over steps, and the page of the job in TRACES into a run of Weights & Biases.

    The numbers are those of summary.flat(), the curves those of perfscope tensorboard. Needs the package wandb.

    Exit code: 0; 1 when W&B refuses; 2 when nothing in TRACES can be analyzed or no steps are marked.

    \b
    perfscope wandb perfscope-recording --project training --run 3kd8s1qx
    perfscope wandb perfscope-recording --offline
    """
    summary = analyze(traces, capture=capture, workers=workers)
    curves = job_curves(traces, ranks=ranks, capture=capture, workers=workers)
    click.echo(f"wandb: {log_wandb(summary, list(curves), project=project, run=run, folder=folder, offline=offline)}")
