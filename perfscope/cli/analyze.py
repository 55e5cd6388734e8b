"""``perfscope analyze``: traces in, report and verdict out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from perfscope import paths
from perfscope.analyzers.analyze import analyze
from perfscope.errors import PerfscopeError
from perfscope.reports import page, terminal


def _progress(done: int, total: int) -> None:
    """Redraw one line on stderr; the last call leaves it empty."""
    click.echo(f"\r{f'reading traces: {done} of {total}' if done < total else '':<40}\r", err=True, nl=False)


@click.command("analyze")
@click.argument("traces", type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Where to write the page.  [default: report.html in TRACES]"
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Also write the result as JSON (schema perfscope.summary/1).",
)
@click.option(
    "--capture", type=click.IntRange(min=0), help="Which capture of a recording to analyze.  [default: the last]"
)
@click.option("--quiet", "-q", is_flag=True, help="No verdict on the terminal, only the page's path.")
def command(traces: Path, output: Path | None, json_file: Path | None, capture: int | None, quiet: bool) -> None:
    """Read every rank's trace in TRACES, say what limits the job, and write one self-contained HTML page.

    TRACES is a folder recorded by perfscope run, a folder of Chrome traces (torch.profiler's .json or .json.gz) of one
    job, or a single trace file. A rank that cannot be read is reported and costs only itself.

    Exit code: 0 with findings or without, 2 when nothing in TRACES can be analyzed.

    \b
    perfscope analyze perfscope-recording
    perfscope analyze traces/ --output review.html --json review.json
    """
    summary = analyze(traces, capture=capture, progress=_progress if sys.stderr.isatty() else None)
    target = output or (traces if traces.is_dir() else traces.parent) / paths.REPORT_FILE
    try:
        page.write(summary, target)
        if json_file is not None:
            json_file.write_text(json.dumps(summary.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise PerfscopeError(
            f"{error.filename or target}: cannot be written ({error.strerror}); choose another place with --output "
            "or --json"
        ) from error
    if not quiet:
        click.echo(terminal.verdict(summary))
    click.echo(f"report: {target}")
