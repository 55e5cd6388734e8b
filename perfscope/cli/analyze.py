"""``perfscope analyze``: traces in, report and verdict out."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from perfscope.cli import outputs
from perfscope.cli.completion import complete_files
from perfscope.cli.number import Number, Whole
from perfscope.cli.progress import reading
from perfscope.execution import allocator
from perfscope.recording import paths, remote
from perfscope.results.prices import Price, priced
from perfscope.results.summary import Summary

if TYPE_CHECKING:
    from concurrent.futures import Executor

_OBJECTS: Final = 100_000
"""Made between two searches for unreachable cycles: an analysis makes many objects that stay, and next to no cycles."""


def _settle_process() -> None:
    """What pays in a process that ends after one analysis; its workers begin so, too."""
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
    allocator.settle()
    # Numpy would start a thread for each core as it is imported: for products of matrices, of which there are none.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextlib.contextmanager
def _executor(scheduler: str | None) -> Iterator[Executor | None]:
    if scheduler is None:
        yield None
    else:
        from perfscope.execution.executors import cluster

        with cluster(scheduler) as connected:
            yield connected


def _import_page() -> None:
    """What writes the page takes as long to import as to write it: done while other processes read ranks. What the last
    rank took in this one makes room for it.
    """
    allocator.give_back()
    importlib.import_module("perfscope.reports.page.page")


def _default_page(traces: str) -> Path:
    if remote.is_url(traces):
        return Path(paths.REPORT_FILE)
    place = Path(traces)
    return (place if place.is_dir() else place.parent) / paths.REPORT_FILE


def _single_recording(given: tuple[str, ...]) -> str:
    """The one recording given. Raises UsageError for several, as from a pattern that the shell expanded."""
    if len(given) == 1:
        return given[0]
    folders = {Path(each).parent for each in given}
    if len(folders) == 1 and all(Path(each).is_file() for each in given):
        raise click.UsageError(f"{len(given)} files given; give the folder of the job's traces: {folders.pop()}")
    raise click.UsageError(
        f"{len(given)} recordings given; analyze them one by one, or compare them: perfscope compare BASELINE CANDIDATE"
    )


def _write(summary: Summary, target: Path, json_file: Path | None, markdown: Path | None, figures: Path | None) -> None:
    """Everything that was asked for. Raises PerfscopeError naming what cannot be written."""
    from perfscope.reports.page import page

    with outputs.named(target, "--output"):
        page.write(summary, target)
    if json_file is not None:
        outputs.write_json(json_file, summary.to_dict(), "--json")
    if markdown is not None:
        from perfscope.reports import markdown as as_markdown

        outputs.write(markdown, as_markdown.of_summary(summary), "--markdown")
    if figures is not None:
        summary.figures.write_images(figures)


@click.command("analyze")
@click.argument("traces", nargs=-1, required=True, metavar="TRACES", shell_complete=complete_files)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Where to write the page.  [default: report.html in TRACES; for a URL, in the current folder]",
)
@click.option(
    "--json",
    "json_file",
    type=outputs.FILE,
    help="Also write the result as JSON (schema perfscope.summary/1); - prints it.",
)
@click.option(
    "--markdown", type=outputs.FILE, help="Also write a summary as Markdown, for a pull request; - prints it."
)
@click.option(
    "--figures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also write each chart of the page as PNG and SVG into DIR (needs kaleido).",
)
@click.option(
    "--capture",
    type=Whole(min=0),
    help="Which capture to analyze, counted from 0.  [default: the last one that most ranks have]",
)
@click.option(
    "--role",
    metavar="NAME",
    help="Analyze this role alone, of a folder with several (rollout, update).  [default: all side by side, and in "
    "full the one that trains]",
)
@click.option(
    "--workers",
    type=Whole(min=1),
    help="Processes that read ranks in parallel.  [default: as many as cores and memory allow]",
)
@click.option(
    "--scheduler", metavar="ADDRESS", help="Read ranks on the dask cluster of this scheduler (tcp://host:8786)."
)
@click.option(
    "--flops",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE.py",
    help="FLOP formulas of your own operators (see docs/metrics.md).",
)
@click.option(
    "--ncu",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    metavar="FILE.csv",
    help="CSV export of Nsight Compute, for the kernel table; may be given several times.",
)
@click.option(
    "--price",
    type=Number(min=0, min_open=True),
    metavar="AMOUNT",
    envvar="PERFSCOPE_PRICE",
    help="Price of one device-hour: adds the job's cost and the savings of each finding.  [env: PERFSCOPE_PRICE]",
)
@click.option(
    "--currency",
    default="USD",
    show_default=True,
    envvar="PERFSCOPE_CURRENCY",
    help="Currency label for --price.  [env: PERFSCOPE_CURRENCY]",
)
@click.option(
    "--anonymize",
    is_flag=True,
    help="Replace the names of hosts, users, paths, models, modules and ranges in all that is written, "
    "so that it can be shown outside.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the page's path, not the verdict.")
def command(
    traces: tuple[str, ...],
    output: Path | None,
    json_file: Path | None,
    markdown: Path | None,
    figures: Path | None,
    capture: int | None,
    role: str | None,
    workers: int | None,
    scheduler: str | None,
    flops: str | None,
    ncu: tuple[str, ...],
    price: float | None,
    currency: str,
    anonymize: bool,
    show: bool,
    quiet: bool,
) -> None:
    """Analyze the traces of all ranks in TRACES, print what limits the job, and write one self-contained HTML page.

    TRACES is a folder recorded by perfscope run, a folder of Chrome traces (torch.profiler's .json or .json.gz) of one
    job, a single trace file, flight-recorder dumps and stacks of a job that stands still, or the URL of one of these
    (s3://bucket/run). A rank that cannot be read is reported and left out. Traces that were read are cached;
    PERFSCOPE_CACHE=off turns the cache off.

    Exit code: 0 with or without findings, 1 when a result cannot be written, 2 when nothing in TRACES can be analyzed.

    \b
    perfscope analyze perfscope-recording
    perfscope analyze traces/ --output review.html --json review.json
    """
    _settle_process()
    from perfscope.analyzers.analyze import analyze

    recording = _single_recording(traces)
    if workers is not None and scheduler is not None:
        raise click.UsageError("--workers is for this machine, --scheduler for a cluster: give only one")
    target = output or _default_page(recording)
    if remote.is_url(recording) or Path(recording).exists():  # that it does not exist is reported first
        outputs.check(target, "--output")
        outputs.check(json_file, "--json")
        outputs.check(markdown, "--markdown")
    if figures is not None:
        from perfscope.reports.figures.figures import check_images

        check_images()
    with _executor(scheduler) as executor, reading() as progress:
        summary = analyze(
            recording,
            executor=executor,
            workers=workers,
            capture=capture,
            role=role,
            flops=flops,
            ncu=ncu,
            progress=progress,
            meanwhile=_import_page,
        )
    if anonymize:
        from perfscope.results.anonymous import anonymous

        summary = anonymous(summary)
    if price is not None:
        summary = priced(summary, Price(per_device_hour=price, currency=currency))
    _write(summary, target, json_file, markdown, figures)
    printed = "-" in (str(json_file), str(markdown))
    if not quiet and not printed:
        from perfscope.reports import terminal
        from perfscope.reports.paint import Paint

        click.echo(terminal.verdict(summary, Paint.of(sys.stdout)))
    click.echo(f"report: {target}", err=printed)
    if show:
        outputs.open_page(target)
