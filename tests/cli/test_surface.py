"""The command line that others rely on, frozen: a name removed breaks somebody's script, a name added is a promise."""

from __future__ import annotations

import importlib
import subprocess
import sys

import click
import pytest

from perfscope.cli.main import VERBS, main

SURFACE = {
    "run": {
        "arguments": {"command"},
        "options": {
            "--active",
            "--budget",
            "--cooldown",
            "--count-flops",
            "--hang-timeout",
            "--join",
            "--max-captures",
            "--memory",
            "--no-count-flops",
            "--no-memory",
            "--no-nvtx",
            "--no-shapes",
            "--no-stacks",
            "--nvtx",
            "--no-sampler",
            "--quiet",
            "--output",
            "--overwrite",
            "--ranks",
            "--repeat",
            "--sample-every",
            "--shapes",
            "--signal",
            "--stacks",
            "--steps-only",
            "--trigger",
            "--wait",
            "--warmup",
            "--with",
            "-o",
            "-q",
        },
    },
    "watch": {
        "arguments": {"folder"},
        "options": {
            "--interval",
            "--json",
            "--once",
            "--otlp",
            "--plain",
            "--prometheus",
            "--prometheus-address",
            "--quiet",
            "-i",
            "-q",
        },
    },
    "trigger": {"arguments": {"folder"}, "options": {"--steps", "--seconds"}},
    "analyze": {
        "arguments": {"traces"},
        "options": {
            "--anonymize",
            "--capture",
            "--currency",
            "--figures",
            "--flops",
            "--json",
            "--markdown",
            "--ncu",
            "--open",
            "--output",
            "--price",
            "--quiet",
            "--role",
            "--scheduler",
            "--workers",
            "-o",
            "-q",
        },
    },
    "gather": {"arguments": {"folders"}, "options": {"--force", "--output", "-o"}},
    "compare": {
        "arguments": {"baseline", "candidates"},
        "options": {
            "--baseline",
            "--fail-on",
            "--json",
            "--markdown",
            "--noise",
            "--open",
            "--output",
            "--quiet",
            "--workers",
            "-o",
            "-q",
        },
    },
    "check": {
        "arguments": {"traces"},
        "options": {
            "--baseline",
            "--budget",
            "--fail-on",
            "--json",
            "--junit",
            "--markdown",
            "--noise",
            "--quiet",
            "--workers",
            "-q",
        },
    },
    "whatif": {"arguments": {"traces", "changes"}, "options": {"--capture", "--json", "--list", "--set", "--sweep"}},
    "tune": {
        "arguments": {"command"},
        "options": {
            "--allow-numerics",
            "--budget",
            "--only",
            "--output",
            "--overwrite",
            "--steps",
            "--try",
            "-o",
        },
    },
    "mcp": {"arguments": {"folder"}, "options": {"--anonymize", "--http", "--max-characters", "--workers"}},
    "merge": {
        "arguments": {"traces"},
        "options": {
            "--capture",
            "--lanes",
            "--max-size",
            "--output",
            "--ranks",
            "--steps",
            "--window",
            "--workers",
            "-o",
        },
    },
    "wandb": {
        "arguments": {"traces"},
        "options": {"--capture", "--dir", "--offline", "--project", "--ranks", "--run", "--workers"},
    },
    "mlflow": {
        "arguments": {"traces"},
        "options": {"--capture", "--experiment", "--ranks", "--run", "--tracking-uri", "--workers"},
    },
    "export": {"arguments": {"traces"}, "options": {"--capture", "--chakra", "--steps", "--workers"}},
    "tensorboard": {"arguments": {"traces"}, "options": {"--capture", "--logdir", "--ranks", "--workers"}},
    "doctor": {"arguments": set(), "options": {"--json", "--output", "--python", "-o"}},
    "schema": {"arguments": {"name"}, "options": {"--output", "-o"}},
    "completion": {"arguments": {"shell"}, "options": set()},
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
    assert names == {"--version", "-V"}
    assert main.context_settings["help_option_names"] == ["-h", "--help"]


def test_an_unknown_verb_is_refused() -> None:
    assert main.get_command(click.Context(main), "no-such-verb") is None


def test_the_module_is_the_command() -> None:
    """``python -m perfscope``, for environments whose scripts are not on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "perfscope", "analyze", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: perfscope analyze")
