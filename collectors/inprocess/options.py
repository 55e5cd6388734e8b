"""The options of a recording, as Python and the variable PERFSCOPE spell them."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypedDict

from perfscope.collectors.config import ALWAYS_ON, HANG_TIMEOUT_S, CollectorConfig
from perfscope.collectors.launch.folder import package_root

DEFAULT_OUTPUT: Final = "perfscope-recording"


class Options(TypedDict, total=False):
    """Options of :class:`perfscope.record` and :func:`perfscope.start`: those of ``perfscope run``, with its defaults.

    Steps are counted from where the recording is started.
    """

    overwrite: bool
    """Replace a recording that the folder holds. Without, a number is put after the folder's name."""
    ranks: str
    """Ranks to record, such as ``0,3-7``, or ``all``."""
    wait: int
    """Steps to skip before each capture; at least 1 (default 5)."""
    warmup: int
    """Steps under the profiler before the recorded ones (3)."""
    active: int
    """Steps to record in a capture (8)."""
    repeat: int
    """Number of captures; each has its own ``wait`` and ``warmup`` (1)."""
    shapes: bool
    """Record the operators' input shapes (True)."""
    stacks: bool
    """Record Python stacks (False)."""
    memory: bool
    """Record allocations (False)."""
    nvtx: bool
    """Also write the ranges as NVTX (True)."""
    count_flops: bool
    """Count the FLOPs of one warm-up step, for MFU (False)."""
    steps_only: bool
    """Record no traces, only the time of each step and its stages (False)."""
    trigger: float | None
    """Record when a step takes so many times the median; None: as planned."""
    cooldown: int
    """With ``trigger``: steps to skip after a capture (100)."""
    max_captures: int
    """With ``trigger``: most captures that slow steps start (5)."""
    budget: float
    """With ``trigger``: share of the run that captures may take, per cent (5)."""
    signal: str
    """With ``trigger`` and ``steps_only``: signal that asks for a capture, ``USR1``, ``USR2`` or ``none`` (USR2)."""
    ranges_only: bool
    """Write PerfScope's ranges for a profiler that you start yourself, as ``--with nvtx`` does (False)."""
    sample_every: float
    """Seconds between two samples of each host; 0: none (0.5)."""
    hang_timeout: float | None
    """Seconds without a step after which a rank writes its stacks and last collectives; 0: never. None: 300 with
    ``trigger`` and ``steps_only``, else 0."""
    quiet: bool
    """Do not say when recording starts and stops (False)."""


def default_hang_timeout(asked: float | None, mode: str) -> float:
    """Seconds; what holds where nothing is asked depends on what is recorded."""
    if asked is not None:
        return asked
    return HANG_TIMEOUT_S if mode in ALWAYS_ON else 0.0


def configured(output: Path, options: Options) -> CollectorConfig:
    """The options as the collector takes them. Raises TypeError or ValueError naming the option that is wrong."""
    given: dict[str, Any] = dict(options)
    unknown = sorted(set(given) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"perfscope records with no option {unknown[0]!r}; choose from {', '.join(OPTIONS)}")
    given.pop("overwrite", None)
    asked = {
        "steps": bool(given.pop("steps_only", False)),
        "trigger": given.get("trigger") is not None,
        "nvtx": bool(given.pop("ranges_only", False)),
    }
    modes = [mode for mode, wanted in asked.items() if wanted]
    if len(modes) > 1:
        raise ValueError("give only one of steps_only, trigger and ranges_only: each sets what is recorded")
    mode = modes[0] if modes else "captures"
    if given.get("trigger") is None:
        given.pop("trigger", None)
    hang_timeout = default_hang_timeout(given.pop("hang_timeout", None), mode)
    quiet = given.pop("quiet", False)
    _check_kinds(given)
    return CollectorConfig(
        output=str(output),
        package_root=package_root(),
        mode=mode,
        hang_timeout=hang_timeout,
        announce=not quiet,
        **given,
    )


def _check_kinds(given: dict[str, Any]) -> None:
    kinds = {field.name: type(field.default) for field in dataclasses.fields(CollectorConfig)}
    for name, value in given.items():
        kind = kinds[name]
        if not isinstance(value, (int, float) if kind is float else kind) or (kind is not bool and value is True):
            raise TypeError(f"{name} must be of type {kind.__name__}, not {value!r}")


OPTIONS: Final = tuple(Options.__annotations__)
"""Names of all options."""

_DEFAULTS: Final = {field.name: field.default for field in dataclasses.fields(CollectorConfig)}


_INSTEAD: Final = {
    "inspector": ": NCCL reads its variables when it starts; set them for the job yourself (docs/inspector.md)",
}
"""What else does it, where something does."""


class _VariableParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(words: str) -> tuple[str | None, Options]:
    """The folder and the options in the variable PERFSCOPE: ``rec --wait 2 --steps-only``; a folder of ``1`` is the
    default one. Raises ValueError naming what is wrong.
    """
    parser = _VariableParser(prog="PERFSCOPE", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--output", "-o", dest="folder")
    for name in OPTIONS:
        _add(parser, name)
    parser.add_argument("--with", dest="other")
    parser.add_argument("--no-sampler", action="store_const", const=0.0, dest="sample_every")
    given = vars(parser.parse_args(_words(words)))
    folder = given.pop("folder", None)
    other = given.pop("other", None)
    if other is not None:
        if other != "nvtx":
            raise ValueError(f"--with {other} works with `perfscope run` alone{_INSTEAD.get(other, '')}")
        given["ranges_only"] = True
    options: Options = given  # type: ignore[assignment]
    return (None if folder in (None, "1") else str(folder)), options


def _words(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{error} in {text!r}") from error


def _add(parser: argparse.ArgumentParser, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    default = _DEFAULTS.get(name, 0.0 if name in ("trigger", "hang_timeout") else False)
    short = ("-q",) if name == "quiet" else ()
    if isinstance(default, bool):
        parser.add_argument(flag, *short, action=argparse.BooleanOptionalAction)
    else:
        parser.add_argument(flag, type=type(default))
