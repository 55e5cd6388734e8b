"""The campaign's commands; ``python -m tests.campaign --help``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click


@click.group(help=__doc__)
def main() -> None:
    """Set what all commands need."""
    os.environ["PERFSCOPE_CACHE"] = "off"


@main.command()
@click.option("--inputs", default=1_000_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--first", default=0, show_default=True, help="Number of the first input.")
@click.option("--only", multiple=True, help="Kinds whose names contain this.")
@click.option("--results", type=click.Path(path_type=Path), help="A file that the results go to, stretch by stretch.")
@click.option("--resume", is_flag=True, help="Leave out the stretches that are in that file.")
@click.option("--show", is_flag=True, help="Print the whole text of each fault.")
def inputs(
    inputs: int, seed: int, first: int, only: tuple[str, ...], results: Path | None, resume: bool, show: bool
) -> None:
    """Mutated files of every kind. A fault is repeated by its number: --first N --inputs 1."""
    from tests.campaign import supervise

    if results is not None and not resume:
        results.unlink(missing_ok=True)
    names = [name for name in supervise.KINDS if not only or any(each in name for each in only)]
    last = first + inputs
    stretches = [range(at, min(at + supervise.STRETCH, last)) for at in range(first, last, supervise.STRETCH)]
    found = supervise.campaign(seed, stretches, names, results)
    click.echo(supervise.report(found))
    for each in found.faults.values() if show else ():
        click.echo(f"\n--- {each['kind']} --first {each['first']}\n{each['text']}")
    sys.exit(bool(found.faults))


@main.command()
@click.option("--count", default=200, show_default=True, help="Processes to kill.")
@click.option("--seed", default=0, show_default=True)
def kills(count: int, seed: int) -> None:
    """Processes of real trainings killed at random moments: ranks, launchers, perfscope, samplers."""
    from tests.campaign import kills as trainings

    results, told = trainings.Results(), 0
    for results in trainings.run(count, seed):
        click.echo(f"{sum(results.kills.values())} of {count}, {len(results.faults)} faults", err=True)
        for each in results.faults[told:]:
            click.echo(each, err=True)
        told = len(results.faults)
    click.echo(trainings.report(results))
    sys.exit(bool(results.faults))


if __name__ == "__main__":
    main()
