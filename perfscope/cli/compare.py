"""``perfscope compare``: what changed between recordings, and which of the changes are significant."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from perfscope.cli.completion import complete_files
from perfscope.cli.number import Number, Whole
from perfscope.cli.outputs import EXIT_BROKEN, FILE, check, named, open_page, write, write_json


@click.command("compare")
@click.argument("baseline", shell_complete=complete_files)
@click.argument("candidates", nargs=-1, required=True, metavar="CANDIDATE...", shell_complete=complete_files)
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
    shell_complete=complete_files,
    help="Another recording of the job of BASELINE; differences between them count as noise. May be repeated.",
)
@click.option(
    "--noise",
    type=Number(min=0, max=100),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Smaller differences count as noise, in percent of the step.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["slower", "new-finding"]),
    multiple=True,
    help="End with exit code 3 when a CANDIDATE is significantly slower, or has a finding that BASELINE has not.",
)
@click.option("--workers", type=Whole(min=1), help="Processes that read ranks in parallel.")
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the page's path, not the verdict.")
def command(
    baseline: str,
    candidates: tuple[str, ...],
    output: Path,
    json_file: Path | None,
    markdown: Path | None,
    baselines: tuple[str, ...],
    noise: float,
    fail_on: tuple[str, ...],
    workers: int | None,
    show: bool,
    quiet: bool,
) -> None:
    """Show what changed from the recording BASELINE to each CANDIDATE, and which of the changes are more than noise.

    Each is a recording, a folder of traces, or the JSON written by perfscope analyze --json. Where the numbers of
    devices differ, the page shows how the job scales.

    Exit code: 0; 3 when a condition of --fail-on is met; 2 when a recording cannot be analyzed.

    \b
    perfscope compare baseline candidate
    perfscope compare main.json pull-request --markdown comment.md --fail-on slower
    perfscope compare 1-gpu 4-gpus 8-gpus --output scaling.html
    """
    from perfscope.analyzers.compare.compare import compare
    from perfscope.reports import markdown as as_markdown
    from perfscope.reports.compare import page, terminal, words
    from perfscope.reports.paint import Paint

    check(output, "--output")
    check(json_file, "--json")
    check(markdown, "--markdown")
    comparison = compare(baseline, *candidates, baselines=baselines, noise=noise / 100, workers=workers)
    with named(output, "--output"):
        page.write(comparison, output)
    if json_file is not None:
        write_json(json_file, comparison.to_dict(), "--json")
    if markdown is not None:
        write(markdown, as_markdown.of_comparison(comparison), "--markdown")
    printed = "-" in (str(json_file), str(markdown))
    if not quiet and not printed:
        click.echo(terminal.comparison(comparison, Paint.of(sys.stdout)))
    click.echo(f"comparison: {output}", err=printed)
    if show:
        open_page(output)
    failures = words.failures(comparison, fail_on)
    for failure in failures:
        click.echo(f"perfscope: {failure}", err=True)
    if failures:
        click.get_current_context().exit(EXIT_BROKEN)
