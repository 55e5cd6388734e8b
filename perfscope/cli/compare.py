"""``perfscope compare``: what changed between recordings, and which of the changes are real."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from perfscope.cli.outputs import EXIT_BROKEN, FILE, check, write, write_json
from perfscope.errors import PerfscopeError

if TYPE_CHECKING:
    from perfscope.comparison import Comparison


@click.command("compare")
@click.argument("before")
@click.argument("after", nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("comparison.html"),
    show_default=True,
    help="Where to write the page.",
)
@click.option("--json", "json_file", type=FILE, help="Also write JSON (schema perfscope.comparison/1); - prints it.")
@click.option("--markdown", type=FILE, help="Also write Markdown, for a pull request; - prints it.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="TRACES",
    help="A further recording of the job BEFORE: what differs between them is noise; may be given several times.",
)
@click.option(
    "--noise",
    type=click.FloatRange(min=0, max=100),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Differences below this share of the step are never claimed.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["slower", "new-finding"]),
    multiple=True,
    help="End with exit code 3 when AFTER is slower beyond the noise, or has a finding that BEFORE had not.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes that read ranks side by side.")
@click.option("--quiet", "-q", is_flag=True, help="No verdict on the terminal, only the page's path.")
def command(
    before: str,
    after: tuple[str, ...],
    output: Path,
    json_file: Path | None,
    markdown: Path | None,
    baselines: tuple[str, ...],
    noise: float,
    fail_on: tuple[str, ...],
    workers: int | None,
    quiet: bool,
) -> None:
    """Say what changed between the recordings BEFORE and AFTER…, and which of the changes are more than noise.

    Each is a recording, a folder of traces, or the JSON that perfscope analyze --json wrote of one. The first is what
    all others are compared with. With different numbers of devices, the page tells how the job scales.

    Exit code: 0; 3 when what --fail-on names has happened; 2 when a recording cannot be analyzed.

    \b
    perfscope compare before after
    perfscope compare main.json pull-request --markdown comment.md --fail-on slower
    perfscope compare 1-gpu 4-gpus 8-gpus --output scaling.html
    """
    from perfscope.analyzers.difference.compare import compare
    from perfscope.reports import difference, difference_terminal
    from perfscope.reports import markdown as as_markdown

    check(output, "--output")
    check(json_file, "--json")
    check(markdown, "--markdown")
    found = compare(before, *after, baselines=baselines, noise=noise / 100, workers=workers)
    try:
        difference.write(found, output)
    except OSError as error:
        raise PerfscopeError(
            f"{output}: cannot be written ({error.strerror}); choose another place with --output"
        ) from error
    if json_file is not None:
        write_json(json_file, found.to_dict(), "--json")
    if markdown is not None:
        write(markdown, as_markdown.of_comparison(found), "--markdown")
    printed = "-" in (str(json_file), str(markdown))
    if not quiet and not printed:
        click.echo(difference_terminal.comparison(found))
    click.echo(f"comparison: {output}", err=printed)
    if _fails(found, fail_on):
        click.get_current_context().exit(EXIT_BROKEN)


def _fails(found: Comparison, fail_on: tuple[str, ...]) -> bool:
    slower = any(difference.step.verdict == "slower" for difference in found.differences)
    new = any(finding.status == "new" for difference in found.differences for finding in difference.findings)
    return ("slower" in fail_on and slower) or ("new-finding" in fail_on and new)
