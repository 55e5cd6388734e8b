"""``perfscope export``: the recorded steps in the format of other tools."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from perfscope.cli.completion import complete_files
from perfscope.cli.number import Whole
from perfscope.text import plural, rank_list, ranks_in_words


@click.command("export")
@click.argument("traces", shell_complete=complete_files)
@click.option(
    "--chakra",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write Chakra execution traces into FOLDER: a file for each rank, and comm_group.json.",
)
@click.option(
    "--steps", metavar="LIST", help="Consecutive steps to write, such as 12-14.  [default: all that were recorded]"
)
@click.option("--capture", type=Whole(min=0), help="Which capture to write, counted from 0.")
@click.option("--workers", type=Whole(min=1), help="Processes that read ranks in parallel.")
def command(traces: str, chakra: Path, steps: str | None, capture: int | None, workers: int | None) -> None:
    """Write the recorded steps of the job in TRACES as Chakra execution traces, for simulators such as ASTRA-sim.

    Each rank's file has its kernels, what its host does between them, its collectives and messages with their groups
    and sizes, and what waits for what. Replayed with the recorded lengths it takes the recorded time.

    Exit code: 0; 2 when nothing in TRACES can be read or written.

    \b
    perfscope export perfscope-recording --chakra chakra
    AstraSim_Analytical_Congestion_Aware --workload-configuration=chakra/perfscope \\
        --comm-group-configuration=chakra/comm_group.json ...
    """
    from perfscope.analyzers.export.export import export_chakra

    written = export_chakra(traces, chakra, steps=steps, capture=capture, workers=workers)
    click.echo(
        f"{ranks_in_words(written.ranks)}, {plural(len(written.steps), 'step')} ({rank_list(written.steps)}): "
        f"{written.nodes:,} nodes, {written.communication:,} of them communication"
    )
    for note in written.notes:
        click.echo(f"note: {note}")
    click.echo(f"workload: {shlex.quote(str(written.workload))}")
    click.echo(f"groups: {shlex.quote(str(written.groups))}")
