"""``perfscope tensorboard``: measures of each step as curves beside the training's own."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from perfscope.cli.completion import complete_files
from perfscope.cli.curves import curve_options
from perfscope.errors import PerfscopeError


@click.command("tensorboard")
@click.argument("traces", shell_complete=complete_files)
@click.option(
    "--logdir",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="TensorBoard's log folder; the files are written below its folder perfscope.",
)
@curve_options
def command(traces: str, logdir: Path, ranks: str | None, capture: int | None, workers: int | None) -> None:
    """Write step time, time breakdown, MFU, memory and stragglers of the job in TRACES for TensorBoard.

    The curves have the training's own step numbers, so that they align with its loss in the same LOGDIR. Writing again
    replaces earlier files. Needs neither TensorBoard nor TensorFlow.

    Exit code: 0; 2 when nothing in TRACES can be analyzed or no steps are marked.

    \b
    perfscope tensorboard perfscope-recording --logdir runs
    tensorboard --logdir runs
    """
    from perfscope.analyzers.merge.scalars import job_curves
    from perfscope.reports import tensorboard

    folder = logdir / "perfscope"
    try:
        files = tensorboard.write(job_curves(traces, ranks=ranks, capture=capture, workers=workers), folder)
    except OSError as error:
        raise PerfscopeError(
            f"{error.filename or folder}: cannot be written ({error.strerror}); choose another place with --logdir"
        ) from error
    runs = len({file.parent for file in files})
    click.echo(f"tensorboard: {len(files)} files of {runs} runs in {folder}")
    click.echo(f"open with: tensorboard --logdir {shlex.quote(str(logdir))}")
