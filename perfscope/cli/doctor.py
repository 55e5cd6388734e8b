"""``perfscope doctor``: what works here, what does not, and what to do about it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from perfscope._version import __version__
from perfscope.cli.answers import Doctor, DoctorCheck
from perfscope.collectors.doctor.check import Level, Probe, Surroundings
from perfscope.collectors.doctor.doctor import default_python, examine
from perfscope.collectors.inprocess.options import DEFAULT_OUTPUT

EXIT_BROKEN = 1


@click.command("doctor")
@click.option(
    "--output", "-o", default=DEFAULT_OUTPUT, type=click.Path(path_type=Path), show_default=True,
    help="Where recordings will be written."
)  # fmt: skip
@click.option("--python", metavar="PATH", help="The interpreter of the training environment.  [default: this one]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema perfscope.doctor/1) instead of text.")
def command(output: Path, python: str | None, as_json: bool) -> None:
    """Test what a recording needs on this machine: Python, torch and its profiler, devices, the output folder.

    Run it where ranks run: inside the container, on a compute node.

    Exit code: 0 when recordings work here, 1 when they do not.

    \b
    perfscope doctor
    srun --nodes 1 --ntasks 1 perfscope doctor --output /shared/recordings
    """
    surroundings = Surroundings(python=python or default_python(), output=output, environment=os.environ)
    probes = list(examine(surroundings)) if as_json else examine(surroundings)
    works = True
    for probe in probes:
        works = works and probe.state is not Level.BROKEN
        if not as_json:
            _print(probe)
    if as_json:
        checks = (
            DoctorCheck(name=each.name, state=each.state.value, text=each.text, remedy=each.remedy) for each in probes
        )
        document = Doctor(
            works=works,
            python=surroundings.python,
            output=str(output),
            checks=tuple(checks),
            perfscope_version=__version__,
        )
        click.echo(json.dumps(document.to_dict(), indent=1))
    else:
        click.echo("recordings work here" if works else "recordings do not work here")
    if not works:
        sys.exit(EXIT_BROKEN)


def _print(probe: Probe) -> None:
    click.echo(f"{probe.state.value:<7} {probe.name}: {probe.text}")
    if probe.remedy:
        click.echo(f"{'':<7} → {probe.remedy}")
