"""``perfscope doctor``: what works here, what does not, and what to do about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from perfscope.cli.run import DEFAULT_OUTPUT
from perfscope.collectors.doctor.check import Level, Surroundings
from perfscope.collectors.doctor.doctor import default_python, examine

EXIT_BROKEN = 1


@click.command("doctor")
@click.option(
    "--output", "-o", default=DEFAULT_OUTPUT, type=click.Path(path_type=Path), show_default=True,
    help="Where recordings will be written."
)  # fmt: skip
@click.option("--python", metavar="PATH", help="The interpreter of the training environment.  [default: this one]")
def command(output: Path, python: str | None) -> None:
    """Test what a recording needs on this machine: Python, torch and its profiler, devices, the output folder.

    Run it where ranks run: inside the container, on a compute node.

    Exit code: 0 when recordings work here, 1 when they do not.

    \b
    perfscope doctor
    srun --nodes 1 --ntasks 1 perfscope doctor --output /shared/recordings
    """
    surroundings = Surroundings(python=python or default_python(), output=output, environment=os.environ)
    broken = False
    for check in examine(surroundings):
        broken |= check.state is Level.BROKEN
        click.echo(f"{check.state.value:<7} {check.name}: {check.text}")
        if check.remedy:
            click.echo(f"{'':<7} → {check.remedy}")
    click.echo("recordings do not work here" if broken else "recordings work here")
    if broken:
        sys.exit(EXIT_BROKEN)
