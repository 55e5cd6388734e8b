"""``perfscope check``: is a job within its budget? For continuous integration."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from perfscope.cli import outputs
from perfscope.cli.completion import complete_files
from perfscope.cli.number import Number, Whole
from perfscope.cli.outputs import EXIT_BROKEN, FILE, write, write_json
from perfscope.errors import UnusableInput
from perfscope.results.budget import SEVERITIES, Budget


@click.command("check")
@click.argument("traces", shell_complete=complete_files)
@click.option("--budget", "budget_file", type=click.Path(path_type=Path), metavar="FILE", help="The limits, as TOML.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="TRACES",
    shell_complete=complete_files,
    help="A recording, or its JSON, that regressions are measured from. May be repeated; differences between them "
    "count as noise.",
)
@click.option(
    "--fail-on",
    type=click.Choice([*SEVERITIES, "none"]),
    help="Fail on findings of this severity or above; overrides fail_on of the budget.",
)
@click.option("--junit", type=FILE, help="Write the checks as JUnit XML; - prints it.")
@click.option("--markdown", type=FILE, help="Write the checks as Markdown, for a pull request; - prints it.")
@click.option("--json", "json_file", type=FILE, help="Write the checks as JSON, schema perfscope.check/1; - prints it.")
@click.option(
    "--noise",
    type=Number(min=0, max=100),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="Smaller regressions count as noise, in percent of the step.",
)
@click.option("--workers", type=Whole(min=1), help="Processes that read ranks in parallel.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def command(
    traces: str,
    budget_file: Path | None,
    baselines: tuple[str, ...],
    fail_on: str | None,
    junit: Path | None,
    markdown: Path | None,
    json_file: Path | None,
    noise: float,
    workers: int | None,
    quiet: bool,
) -> None:
    """Check TRACES against the limits of a budget and, for regressions, against a baseline.

    TRACES is a recording, a folder of traces, or the JSON written by perfscope analyze --json. A check that cannot
    be judged, because the recording lacks the number, fails unless the budget has optional = true for it.

    Exit code: 0 when every check passes, 3 when one fails, 2 when the budget or a recording is unusable.

    \b
    perfscope check recording --budget perfscope-budget.toml --junit perfscope.xml
    perfscope check recording --budget budget.toml --baseline main.json --markdown comment.md
    perfscope check recording --fail-on high
    """
    from perfscope.analyzers.compare.check import check
    from perfscope.reports import junit as as_junit
    from perfscope.reports import markdown as as_markdown
    from perfscope.reports.compare import terminal
    from perfscope.reports.paint import Paint

    for path, option in ((junit, "--junit"), (markdown, "--markdown"), (json_file, "--json")):
        outputs.check(path, option)
    result = check(traces, _budget(budget_file, fail_on), baselines=baselines, noise=noise / 100, workers=workers)
    if junit is not None:
        write(junit, as_junit.render(result), "--junit")
    if markdown is not None:
        write(markdown, as_markdown.of_check(result), "--markdown")
    if json_file is not None:
        write_json(json_file, result.to_dict(), "--json")
    if not quiet and "-" not in (str(junit), str(markdown), str(json_file)):
        click.echo(terminal.check(result, Paint.of(sys.stdout)), nl=False)
    if not result.passed:
        click.get_current_context().exit(EXIT_BROKEN)


def _budget(file: Path | None, fail_on: str | None) -> Budget:
    """The budget of the file, with ``fail_on`` of the command line. Raises UnusableInput."""
    from perfscope.analyzers.compare.budget_file import read_budget

    if file is None:
        if fail_on in (None, "none"):
            raise UnusableInput("nothing to check: give --budget FILE (docs/check.md shows one), or --fail-on SEVERITY")
        return Budget(fail_on=fail_on, source="--fail-on")
    budget = read_budget(file)
    if fail_on is None:
        return budget
    return replace(budget, fail_on=None if fail_on == "none" else fail_on)
