"""The ``perfscope`` command: its verbs load on use, so that ``perfscope run`` starts without the analyzers."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Final

import click

from perfscope._version import __version__
from perfscope.errors import PerfscopeError, UnusableInput, did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VERBS: Final = {
    "run": "Profile a training command without changing its code.",
    "watch": "Show a running job: steps, stragglers, load, in the terminal or as metrics.",
    "trigger": "Make a running job record its next steps.",
    "gather": "Combine the folders that each node wrote into one recording.",
    "analyze": "Read every rank's trace, write the report, print what limits the job.",
    "whatif": "Predict the step time with settings changed.",
    "compare": "Report what changed between runs, and which changes are significant.",
    "check": "Check a recording against a budget, for continuous integration.",
    "mcp": "Let agents ask about recordings, over the Model Context Protocol.",
    "tune": "Try settings on a real training, and report which of them help.",
    "merge": "Write all ranks on one clock into one file for Perfetto.",
    "export": "Write the recorded steps as Chakra execution traces, for simulators.",
    "tensorboard": "Write the steps' measurements as curves for TensorBoard.",
    "wandb": "Write the job's numbers, curves and page into Weights & Biases.",
    "mlflow": "Write the job's numbers, curves and page into MLflow.",
    "doctor": "Test whether recording works on this machine, and say how to fix what does not.",
    "schema": "Print the JSON Schema of what is written or printed as JSON.",
    "completion": "Print the script with which a shell completes commands and options.",
}
"""Verb -> its line in ``perfscope --help``; each verb's module in this package defines ``command``."""

EXIT_DEFECT: Final = 1
EXIT_UNUSABLE: Final = 2


class LazyVerbs(click.Group):
    """Imports a verb's module only when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order in which one meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one verb; None when there is no such verb."""
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"perfscope.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that the arguments begin with. Raises UsageError naming the verb that was meant."""
        name = args[0]
        if name not in VERBS and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command '{name}'{did_you_mean(name, VERBS)}.", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """What the word may become: verbs without importing any of them, and the options."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=line) for name, line in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run the verb; print a failure the user can act on without a traceback."""
        try:
            return super().invoke(ctx)
        except PerfscopeError as error:
            click.echo(f"perfscope: {error}", err=True)
            ctx.exit(EXIT_UNUSABLE if isinstance(error, UnusableInput) else EXIT_DEFECT)


@click.group(cls=LazyVerbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", "-V", prog_name="perfscope")
def main() -> None:
    """Find out why a distributed training job is slow.

    \b
    perfscope run -- torchrun --nproc-per-node 8 train.py    record a few steps of every rank
    perfscope analyze perfscope-recording                    read them and write report.html
    """


def start() -> None:
    """The command as a process, which ends as soon as it is done.

    Python would first take apart, object by object, what the system frees at once. What was registered to be called at
    the end is called, and output is written, as ever; where another thread still works, Python ends the process.
    """
    try:
        main(prog_name="perfscope")
    except SystemExit as end:
        if threading.active_count() == 1 and isinstance(end.code, int | None):
            _end(end.code or 0)
        raise


def _end(status: int) -> None:
    """End the process; return where its output cannot be written, which Python reports."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
    os._exit(status)
