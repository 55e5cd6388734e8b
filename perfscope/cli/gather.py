"""``perfscope gather``: one recording from the folders that each node wrote."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from perfscope import gathering
from perfscope.reports.format import rank_list


@click.command("gather")
@click.argument("folders", nargs=-1, required=True)
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder for the whole recording; a new one."
)
@click.option("--force", is_flag=True, help="Merge folders although they do not look like one run's.")
def command(folders: tuple[str, ...], output: Path, force: bool) -> None:
    """Put the recordings that the nodes of one run wrote into FOLDERS together in one, where no file system was shared.

    FOLDERS are local folders or URLs (s3://bucket/run/node0). Copy folders that lie on the nodes first, for example
    with rsync -a node1:/local/recording/ node1/.

    Exit code: 0; 2 when the folders are not of one run or hold the same rank twice.

    \b
    perfscope gather node0 node1 --output recording
    perfscope analyze recording
    """
    result = gathering.gather(folders, output, force=force)
    of = "" if result.missing else "all "
    click.echo(
        f"perfscope: gathered {of}{len(result.ranks)} of {result.world_size} ranks, {result.files} files, "
        f"{result.bytes / 1e6:.1f} MB in {output}",
        err=True,
    )
    if result.missing:
        click.echo(f"perfscope: missing: ranks {rank_list(result.missing)}; the analysis will say so", err=True)
    click.echo(f"perfscope: next: perfscope analyze {shlex.quote(str(output))}", err=True)
