"""The options of a recording in Python and in the variable PERFSCOPE are those of ``perfscope run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from perfscope.cli.run import command
from perfscope.collectors.config import HANG_TIMEOUT_S
from perfscope.collectors.inprocess.options import OPTIONS, configured, parse

SPELT_OTHERWISE = {"output", "join", "other", "no_sampler", "command"}
"""Of ``perfscope run``: ``output`` is the first argument, a folder is joined always, ``other`` is ``ranges_only``."""


def _of_the_command_line() -> dict[str, Any]:
    return {each.name: each for each in command.params if isinstance(each, click.Option) and each.name is not None}


def test_every_option_of_the_command_line_is_there() -> None:
    assert set(OPTIONS) - {"ranges_only"} == set(_of_the_command_line()) - SPELT_OTHERWISE


def test_the_defaults_are_those_of_the_command_line() -> None:
    config = configured(Path("/r"), {})
    for name, option in _of_the_command_line().items():
        if hasattr(config, name) and name not in ("output", "trigger", "hang_timeout"):
            assert getattr(config, name) == option.default, name
    assert (config.mode, config.hang_timeout, config.announce) == ("captures", 0.0, True)


@pytest.mark.parametrize(
    ("options", "mode", "hang_timeout"),
    [
        ({"steps_only": True}, "steps", HANG_TIMEOUT_S),
        ({"trigger": 2}, "trigger", HANG_TIMEOUT_S),
        ({"trigger": 2.0, "hang_timeout": 0}, "trigger", 0),
        ({"ranges_only": True}, "nvtx", 0.0),
    ],
)
def test_what_is_recorded(options: Any, mode: str, hang_timeout: float) -> None:
    config = configured(Path("/r"), options)
    assert (config.mode, config.hang_timeout) == (mode, hang_timeout)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"wiat": 2}, TypeError, "no option 'wiat'"),
        ({"wait": "2"}, TypeError, "wait must be of type int, not '2'"),
        ({"wait": True}, TypeError, "wait must be of type int, not True"),
        ({"wait": 0}, ValueError, "wait must be at least 1"),
        ({"ranks": "3-1"}, ValueError, "write 1-3"),
        ({"steps_only": True, "trigger": 2.0}, ValueError, "only one of"),
    ],
)
def test_what_is_wrong_is_named(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        configured(Path("/r"), options)


@pytest.mark.parametrize(
    ("words", "folder", "options"),
    [
        ("1", None, {}),
        ("rec", "rec", {}),
        ("--wait 2 --no-shapes", None, {"wait": 2, "shapes": False}),
        ("-o 'my rec' --trigger 1.5 -q", "my rec", {"trigger": 1.5, "quiet": True}),
        ("rec --steps-only --no-sampler", "rec", {"steps_only": True, "sample_every": 0.0}),
        ("rec --with nvtx --overwrite", "rec", {"ranges_only": True, "overwrite": True}),
    ],
)
def test_the_variable_is_read_as_the_command_line(words: str, folder: str | None, options: dict[str, Any]) -> None:
    assert parse(words) == (folder, options)
    configured(Path("/r"), parse(words)[1])


@pytest.mark.parametrize("words", ["rec --wiat 2", "rec --wait two", "rec 'open", "rec other"])
def test_a_variable_that_cannot_be_read(words: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(words)


@pytest.mark.parametrize(
    ("other", "says"), [("inspector", r"set them for the job yourself \(docs/inspector\.md\)"), ("nsys", "run` alone$")]
)
def test_a_tool_that_only_the_command_starts_is_named_with_what_to_do_instead(other: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(f"rec --with {other}")
