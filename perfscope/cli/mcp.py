"""``perfscope mcp``: recordings, asked by agents."""

from __future__ import annotations

from pathlib import Path

import click

from perfscope.cli.completion import complete_files
from perfscope.cli.number import Whole
from perfscope.errors import PerfscopeError
from perfscope.server.pages import DEFAULT_CHARACTERS, LEAST_CHARACTERS


@click.command("mcp")
@click.argument("folder", type=click.Path(path_type=Path), default=Path(), shell_complete=complete_files)
@click.option(
    "--http",
    "port",
    type=Whole(min=1, max=65535),
    metavar="PORT",
    help="Serve over HTTP on this machine alone (http://127.0.0.1:PORT/mcp).  [default: standard input and output]",
)
@click.option(
    "--anonymize",
    is_flag=True,
    help="Replace the names of recordings, hosts, users, paths, models, modules and ranges in all answers.",
)
@click.option(
    "--max-characters",
    type=Whole(min=LEAST_CHARACTERS),
    default=DEFAULT_CHARACTERS,
    show_default=True,
    metavar="N",
    help="Longest answer; what does not fit comes page by page.",
)
@click.option("--workers", type=Whole(min=1), help="Processes that read ranks in parallel.")
def command(folder: Path, port: int | None, anonymize: bool, max_characters: int, workers: int | None) -> None:
    """Serve the recordings in FOLDER (and in the folders below) to agents, over the Model Context Protocol.

    An agent's configuration starts this command; docs/mcp.md shows how for common agents. Nothing outside of FOLDER is
    read, and nothing is written but the cache.

    Exit code: 0 when the client ends it, 1 where the package mcp is missing, 2 when there is no such folder.

    \b
    perfscope mcp recordings/
    perfscope mcp recordings/ --http 8642
    """
    try:
        from perfscope.server.serve import serve, server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        raise PerfscopeError("perfscope mcp needs the package mcp: pip install 'perfscope-profiler[mcp]'") from error
    made = server(folder, anonymize=anonymize, limit=max_characters, workers=workers)
    if port is not None:
        click.echo(f"serving {folder} on http://127.0.0.1:{port}/mcp", err=True)
    serve(made, port)
