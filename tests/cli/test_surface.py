"""The command line that others rely on, frozen: a name removed breaks somebody's script, a name added is a promise."""

from __future__ import annotations

import importlib

import click
import pytest

from perfscope.cli.main import VERBS, main

SURFACE = {
    "run": {
        "arguments": {"command"},
        "options": {
            "--active",
            "--count-flops",
            "--join",
            "--memory",
            "--no-count-flops",
            "--no-memory",
            "--no-nvtx",
            "--no-shapes",
            "--no-stacks",
            "--nvtx",
            "--output",
            "--overwrite",
            "--ranks",
            "--repeat",
            "--shapes",
            "--stacks",
            "--wait",
            "--warmup",
            "-o",
        },
    },
    "analyze": {
        "arguments": {"traces"},
        "options": {"--capture", "--json", "--output", "--quiet", "--scheduler", "--workers", "-o", "-q"},
    },
}


def _command(verb: str) -> click.Command:
    command = main.get_command(click.Context(main), verb)
    assert command is not None
    return command


def test_verbs_are_these_and_each_has_its_module() -> None:
    assert set(main.list_commands(click.Context(main))) == set(VERBS) == set(SURFACE)
    for verb in VERBS:
        assert _command(verb) is importlib.import_module(f"perfscope.cli.{verb}").command


@pytest.mark.parametrize("verb", SURFACE)
def test_arguments(verb: str) -> None:
    arguments = {parameter.name for parameter in _command(verb).params if isinstance(parameter, click.Argument)}
    assert arguments == SURFACE[verb]["arguments"]


@pytest.mark.parametrize("verb", SURFACE)
def test_options(verb: str) -> None:
    options = [parameter for parameter in _command(verb).params if isinstance(parameter, click.Option)]
    assert {name for option in options for name in (*option.opts, *option.secondary_opts)} == SURFACE[verb]["options"]


def test_the_group_has_version_and_help_only() -> None:
    names = {name for parameter in main.params for name in parameter.opts}
    assert names == {"--version"}
    assert main.context_settings["help_option_names"] == ["-h", "--help"]


def test_an_unknown_verb_is_refused() -> None:
    assert main.get_command(click.Context(main), "no-such-verb") is None
