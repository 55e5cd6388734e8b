"""``perfscope merge``: the ranks of a job in one file for Perfetto."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from perfscope.analyzers.merging.merge import DEFAULT_MEGABYTES, merge
from perfscope.analyzers.merging.view import DEFAULT_LANES, LANES
from perfscope.cli import outputs
from perfscope.errors import UnusableInput
from perfscope.reports.format import byte_size, rank_list


@click.command("merge")
@click.argument("traces")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Where to write the file.  [default: merged.pftrace in TRACES, or here where TRACES is a URL]",
)
@click.option(
    "--ranks",
    metavar="LIST|all",
    help="Ranks to show, such as 0,3-7.  [default: all of up to 8, else the 8 most telling ones]",
)
@click.option(
    "--steps", metavar="LIST|all", help="Steps to show, such as 12-14.  [default: a typical step and the longest]"
)
@click.option(
    "--window", metavar="FROM-TO", help="Time to show instead of steps, from the first recorded step on: 120ms-250ms."
)
@click.option(
    "--lanes",
    metavar="LIST",
    default=",".join(DEFAULT_LANES),
    show_default=True,
    help=f"What to show of each rank, of {', '.join(LANES)}.",
)
@click.option(
    "--max-size",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_MEGABYTES,
    show_default=True,
    metavar="MB",
    help="Leave out the least telling ranks beyond this size of the file.",
)
@click.option("--capture", type=click.IntRange(min=0), help="Which capture to show, counted from 0.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes that read ranks side by side.")
def command(
    traces: str,
    output: Path | None,
    ranks: str | None,
    steps: str | None,
    window: str | None,
    lanes: str,
    max_size: float,
    capture: int | None,
    workers: int | None,
) -> None:
    """Write the ranks of the job in TRACES into one file for Perfetto, on one clock, with what the analysis found.

    The file shows what the job's own traces show, the account of every rank, what was found, the critical path, and
    arrows between a collective's ranks. Open it at https://ui.perfetto.dev: the page reads it in the browser and
    uploads nothing.

    Exit code: 0; 2 when nothing in TRACES can be read or shown.

    \b
    perfscope merge perfscope-recording
    perfscope merge perfscope-recording --ranks 0,3 --steps 12-14 --lanes compute,comm -o two.pftrace
    """
    if output is not None:
        outputs.check(output, "--output")
    merged = merge(
        traces,
        output,
        ranks=ranks,
        steps=steps,
        window=window,
        lanes=_lanes(lanes),
        max_size_mb=max_size,
        capture=capture,
        workers=workers,
    )
    steps_told = f", steps {rank_list(merged.steps)}" if merged.steps else ""
    click.echo(f"ranks {rank_list(merged.ranks)}{steps_told}: {merged.slices:,} slices, {byte_size(merged.bytes)}")
    for sentence in merged.left_out:
        click.echo(f"note: {sentence}")
    click.echo(f"merged: {merged.path}")
    click.echo(f"open it at https://ui.perfetto.dev (Open trace file): {shlex.quote(merged.path.name)}")


def _lanes(text: str) -> tuple[str, ...]:
    lanes = tuple(lane.strip() for lane in text.split(",") if lane.strip())
    if not lanes:
        raise UnusableInput(f"--lanes names none; there is {', '.join(LANES)}")
    return lanes
