"""``perfscope tune``: try settings on a training from outside, and report which of them help."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import click

from perfscope.cli.completion import complete_files
from perfscope.cli.number import Whole
from perfscope.errors import UnusableInput

DEFAULT_OUTPUT: Final = "perfscope-tuning"
DEFAULT_BUDGET: Final = 10
INTERRUPTED: Final = 130
"""The shell's exit code for what Ctrl-C ended."""


@click.command(
    short_help="Try settings on a real training, and report which of them help.",
    context_settings={"allow_interspersed_args": False, "show_default": True, "max_content_width": 100},
)
@click.option("--budget", default=DEFAULT_BUDGET, type=Whole(min=2), metavar="N", help="Most trial runs.")
@click.option(
    "--output", "-o", default=DEFAULT_OUTPUT, type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the recording, the trials and tune.json. With several nodes it must be shared.",
)  # fmt: skip
@click.option(
    "--steps", type=Whole(min=8), metavar="N",
    help="Steps to measure in each run; default: as many as take six seconds.",
)  # fmt: skip
@click.option(
    "--try", "tried", multiple=True, metavar="NAME=VALUE[,VALUE]", help="Values to try first; may be repeated."
)
@click.option("--only", multiple=True, metavar="PATTERN", help="Settings to try, such as 'ddp.*'; may be repeated.")
@click.option(
    "--allow-numerics", is_flag=True, help="Also try settings that change the numerics: gradients sent in bf16."
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier tuning in the folder.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete_files)
def command(
    budget: int,
    output: Path,
    steps: int | None,
    tried: tuple[str, ...],
    only: tuple[str, ...],
    allow_numerics: bool,
    overwrite: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND several times for a few steps each, with settings changed from outside, and report what helps.

    It must be safe to stop COMMAND after some steps and to start it again: make it write its checkpoints to a
    scratch folder, or not at all. Its code is not changed. The last lines show which settings help and how to make
    them permanent.

    \b
    perfscope tune -- torchrun --nproc-per-node 8 train.py
    perfscope tune --budget 4 --only 'dataloader.*' -- python train.py
    perfscope tune --try env.NCCL_ALGO=Ring,Tree -- torchrun --nproc-per-node 8 train.py
    """
    from perfscope.tune.proposals import parse
    from perfscope.tune.result import RESULT_FILE, as_text
    from perfscope.tune.tune import TuneRequest, tune

    try:
        own = dict(parse(text) for text in tried)
    except ValueError as error:
        raise click.UsageError(f"--try {error}") from error
    if (output / RESULT_FILE).exists() and not overwrite:
        raise UnusableInput(f"{output} already holds a tuning; choose another folder with --output, or add --overwrite")
    request = TuneRequest(
        command=command, folder=output, budget=budget, steps=steps, only=only, tried=own, numerics=allow_numerics
    )
    try:
        with _ended_as_by_ctrl_c():
            result = tune(request, _say)
    except KeyboardInterrupt:
        _say("interrupted before any run was measured; the command was ended")
        sys.exit(INTERRUPTED)
    except OSError as error:
        raise UnusableInput(f"{output} cannot be written ({error}); choose another folder with --output") from error
    click.echo(as_text(result), nl=False)
    _say(f"all numbers: {output / RESULT_FILE}")
    if result.outcome.interrupted:
        sys.exit(INTERRUPTED)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Signals that would end this process end the command first: it runs in a session of its own."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    click.echo(f"perfscope: {line}", err=True)
