"""``perfscope trigger``: have the ranks of a running job record the next steps."""

from __future__ import annotations

from pathlib import Path

import click

from perfscope.cli.number import Number, Whole
from perfscope.collectors.agreement import LEAD_S, ask
from perfscope.collectors.config import FOR_ANOTHER, CollectorConfig
from perfscope.errors import UnusableInput
from perfscope.recording.metadata import load_launch
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE, further_jobs


@click.command("trigger", short_help="Make a running job record its next steps.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--steps", type=Whole(min=1), metavar="N", help="Steps to record.  [default: --active of the run]")
@click.option(
    "--seconds",
    type=Number(min=0, min_open=True),
    metavar="S",
    help="Record as many steps as take so long, 500 at most; instead of --steps.",
)
def command(folder: Path, steps: int | None, seconds: float | None) -> None:
    """Make the job that perfscope run records into FOLDER capture its next steps.

    All ranks record the same steps, a few seconds from now. Where several trainings or roles record into FOLDER, each
    captures its own next steps; --seconds has them record the same time, whatever their steps take. Works while the job
    trains under perfscope run, with planned captures, --trigger or --steps-only, on any host that sees FOLDER.

    \b
    perfscope run --steps-only -o /shared/rec -- torchrun --nproc-per-node 8 train.py
    perfscope trigger /shared/rec --steps 5
    perfscope analyze /shared/rec
    """
    if steps is not None and seconds is not None:
        raise click.UsageError("--steps and --seconds exclude each other")
    config = _config_of_running_job(folder)
    try:
        for job in (folder, *further_jobs(folder)):
            ask(job, steps, seconds)
    except OSError as error:
        raise UnusableInput(
            f"{folder} cannot be written ({error}); run perfscope trigger as the user who runs the job"
        ) from error
    length = f"{seconds:g} s" if seconds is not None else f"{steps or config.active} steps"
    click.echo(
        f"perfscope: requested a capture of {length} after {config.warmup} of warm-up; it begins "
        f"within about {2 * LEAD_S:.0f} s. Next: perfscope analyze {folder}"
    )


def _config_of_running_job(folder: Path) -> CollectorConfig:
    """What the job was started with. Raises UnusableInput where there is none that could answer."""
    try:
        if not (folder / LAUNCH_FILE).is_file():
            raise ValueError("it holds no recording" if folder.is_dir() else "no such folder")
        launch = load_launch(folder / LAUNCH_FILE)
        config = CollectorConfig.load(folder / BOOTSTRAP_FOLDER)
    except (OSError, ValueError) as error:
        raise UnusableInput(
            f"{folder}: no recording under way ({error}); name the folder that perfscope run was given with --output"
        ) from error
    if launch.has_ended:
        code = "" if launch.exit_code is None else f" (exit code {launch.exit_code})"
        raise UnusableInput(f"{folder}: the job has ended{code}; nothing can be recorded")
    if config.mode in FOR_ANOTHER:
        raise UnusableInput(f"{folder}: the job runs with --with {config.mode}, where another profiler records")
    return config
