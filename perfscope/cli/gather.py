"""``perfscope gather``: one recording from the folders that each node wrote."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from perfscope.cli.completion import complete_files
from perfscope.recording import gather as gathering
from perfscope.text import byte_size, ranks_in_words


@click.command("gather")
@click.argument("folders", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the combined recording; must not exist.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Combine folders that do not look like one run: different number of ranks, rendezvous or time.",
)
def command(folders: tuple[str, ...], output: Path, force: bool) -> None:
    """Combine the FOLDERS that the nodes of one run wrote into one recording, where the nodes share no file system.

    FOLDERS are local folders or URLs (s3://bucket/run/node0). First copy folders from the nodes' own disks, for example
    with rsync -a node1:/local/recording/ node1/.

    Exit code: 0; 2 when the folders are not of one run, hold the same rank twice, or the output exists.

    \b
    perfscope gather node0 node1 --output recording
    perfscope analyze recording
    """
    result = gathering.gather(folders, output, force=force)
    ranks = f"{len(result.ranks)} of {result.world_size} ranks" if result.missing else f"all {result.world_size} ranks"
    click.echo(f"perfscope: gathered {ranks}, {result.files} files, {byte_size(result.bytes)} in {output}", err=True)
    if result.missing:
        click.echo(
            f"perfscope: {ranks_in_words(result.missing)} wrote no files; the analysis will report that", err=True
        )
    click.echo(f"perfscope: next: perfscope analyze {shlex.quote(str(output))}", err=True)
