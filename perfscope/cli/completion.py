"""``perfscope completion``: the script with which a shell completes commands, options and files."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS: Final = ("bash", "zsh", "fish")

_VARIABLE: Final = "_PERFSCOPE_COMPLETE"
"""By which click is asked for completions."""


def complete_files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, for arguments that may also be a URL or a command."""
    return [CompletionItem(incomplete, type="file")]


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script with which SHELL completes perfscope's commands, options and files.

    \b
    source <(perfscope completion bash)      in ~/.bashrc
    source <(perfscope completion zsh)       in ~/.zshrc, after compinit
    perfscope completion fish > ~/.config/fish/completions/perfscope.fish
    """
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(click.get_current_context().find_root().command, {}, "perfscope", _VARIABLE).source())
