"""``perfscope merge``: the ranks of a job in one file for Perfetto."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from perfscope.analyzers.merge.merge import DEFAULT_MEGABYTES, merge
from perfscope.analyzers.merge.rank_view import DEFAULT_LANES, LANES
from perfscope.cli import outputs
from perfscope.cli.completion import complete_files
from perfscope.cli.number import Number, Whole
from perfscope.errors import UnusableInput
from perfscope.text import byte_size, rank_list, ranks_in_words


@click.command("merge")
@click.argument("traces", shell_complete=complete_files)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Where to write the file.  [default: merged.pftrace in TRACES; for a URL, in the current folder]",
)
@click.option(
    "--ranks",
    metavar="LIST|all",
    help="Ranks to show, such as 0,3-7.  [default: all of up to 8, else the 8 most informative ones]",
)
@click.option(
    "--steps", metavar="LIST|all", help="Steps to show, such as 12-14.  [default: a typical step and the longest]"
)
@click.option(
    "--window",
    metavar="FROM-TO",
    help="Time to show instead of steps, from the start of the first recorded step: 120ms-250ms.",
)
@click.option(
    "--lanes",
    metavar="LIST",
    default=",".join(DEFAULT_LANES),
    show_default=True,
    help=f"Lanes to show of each rank, from {', '.join(LANES)}.",
)
@click.option(
    "--max-size",
    type=Number(min=0, min_open=True),
    default=DEFAULT_MEGABYTES,
    show_default=True,
    metavar="MB",
    help="Largest size of the file: beyond it, the least informative ranks are left out.",
)
@click.option("--capture", type=Whole(min=0), help="Which capture to show, counted from 0.")
@click.option("--workers", type=Whole(min=1), help="Processes that read ranks in parallel.")
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
    """Write the ranks of the job in TRACES into one file for Perfetto, on one clock, with the analysis.

    The file shows the job's traces, the time breakdown of every rank, the findings, the critical path, and arrows
    between the ranks of a collective. Open it at https://ui.perfetto.dev: the page reads it in the browser and
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
    shown = f", steps {rank_list(merged.steps)}" if merged.steps else ""
    click.echo(f"{ranks_in_words(merged.ranks)}{shown}: {merged.slices:,} slices, {byte_size(merged.bytes)}")
    for sentence in merged.left_out:
        click.echo(f"note: {sentence}")
    click.echo(f"merged: {merged.path}")
    click.echo(f"open it at https://ui.perfetto.dev (Open trace file): {shlex.quote(merged.path.name)}")


def _lanes(text: str) -> tuple[str, ...]:
    lanes = tuple(lane.strip() for lane in text.split(",") if lane.strip())
    if not lanes:
        raise UnusableInput(f"--lanes is empty; choose from {', '.join(LANES)}")
    return lanes
