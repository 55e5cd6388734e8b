"""``perfscope watch``: a running job in the terminal, in lines, or as metrics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

import click

from perfscope.analyzers.live.job import LiveJob
from perfscope.analyzers.live.state import LiveState
from perfscope.cli.number import Number, Whole
from perfscope.recording import remote
from perfscope.reports.live import line, terminal, watching
from perfscope.reports.live.view import LONGEST_S, SHORTEST_S, View


@click.command("watch")
@click.argument("folder")
@click.option(
    "--interval",
    "-i",
    type=Number(min=SHORTEST_S, max=LONGEST_S),
    default=2.0,
    show_default=True,
    help="Seconds between two looks at the files.",
)
@click.option("--plain", is_flag=True, help="One line every interval; pipes and dumb terminals get that anyway.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line every interval.")
@click.option("--once", is_flag=True, help="Look once, print it and exit.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing: with --prometheus or --otlp.")
@click.option(
    "--prometheus", type=Whole(min=1, max=65535), metavar="PORT", help="Serve metrics for Prometheus on this port."
)
@click.option(
    "--prometheus-address",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve them on; 0.0.0.0: to everybody who can reach this host.",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="Send metrics to an OpenTelemetry collector, such as http://localhost:4318/v1/metrics.",
)
def command(
    folder: str,
    interval: float,
    plain: bool,
    as_json: bool,
    once: bool,
    quiet: bool,
    prometheus: int | None,
    prometheus_address: str,
    otlp: str | None,
) -> None:
    """Show the job that perfscope run records into FOLDER while it runs.

    FOLDER is a local folder or a URL (s3://bucket/run), and need not exist yet. Only files are read: the job is not
    touched. On a terminal: q quits, h shows all keys. Elsewhere: a line every interval, until the job has ended.

    Exit code: 0; 2 when FOLDER is a URL that cannot be read, or a port cannot be used.

    \b
    perfscope run --steps-only -o /shared/rec -- torchrun --nproc-per-node 8 train.py
    perfscope watch /shared/rec
    """
    if quiet and prometheus is None and otlp is None:
        raise click.UsageError("--quiet needs --prometheus or --otlp: else there is nothing to do.")
    with ExitStack() as stack:
        path = stack.enter_context(remote.opened(folder, must_exist=False))
        takers = _exporters(stack, prometheus, prometheus_address, otlp, interval)

        def seen(state: LiveState) -> None:
            for take in takers:
                take(state)

        job = LiveJob(path)
        with suppress(KeyboardInterrupt):
            if not (plain or as_json or once or quiet) and terminal.usable():
                watching.on_terminal(job, stack.enter_context(terminal.opened()), View(interval_s=interval), seen)
                return
            if not quiet:
                takers.append(lambda state: click.echo(line.as_json(state) if as_json else line.plain(state)))
            watching.in_lines(job, interval, seen, once=once)


def _exporters(
    stack: ExitStack, port: int | None, address: str, otlp: str | None, interval_s: float
) -> list[Callable[[LiveState], None]]:
    """What takes each state besides the terminal."""
    takers: list[Callable[[LiveState], None]] = []
    if port is not None:
        from perfscope.reports.live.prometheus import served

        takers.append(stack.enter_context(served(port, address)))
        click.echo(f"perfscope: metrics on http://{address}:{port}/metrics", err=True)
    if otlp is not None:
        from perfscope.reports.live.otel import sent

        takers.append(stack.enter_context(sent(otlp, interval_s)))
    return takers
