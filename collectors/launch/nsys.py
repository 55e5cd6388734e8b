"""Nsight Systems around a command, and how not to get into its way: one process of a device may own CUPTI at a time."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from perfscope.collectors.config import FOR_ANOTHER, CollectorConfig
from perfscope.collectors.problems import Problems

PROGRAM_VARIABLE: Final = "PERFSCOPE_NSYS"
"""Names ``nsys`` where it is not on the path."""

SESSION_VARIABLE: Final = "NSYS_PROFILING_SESSION_ID"
"""In the environment of every process below ``nsys profile``."""

REPORT_SUFFIX: Final = ".nsys-rep"

_DRIVER: Final = Path("/proc/driver/nvidia/version")


class NsysNotFoundError(Exception):
    """There is no ``nsys`` on this machine."""


def find_nsys(environment: Mapping[str, str]) -> str | None:
    """The ``nsys`` to use; None where there is none."""
    return environment.get(PROGRAM_VARIABLE) or shutil.which("nsys", path=environment.get("PATH"))


def wrap(config: CollectorConfig, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """``command`` under ``nsys profile``, its report in the recording's folder. Raises NsysNotFoundError.

    With a device only the planned steps are recorded: the ranks open and close the range of the CUDA profiler's
    interface, which is nsys's own trigger. Without one, the whole run is.
    """
    program = find_nsys(environment)
    if program is None:
        raise NsysNotFoundError(
            f"there is no nsys on the path; install Nsight Systems, or set {PROGRAM_VARIABLE} to the path of nsys"
        )
    options = ["--sample=none", "--cpuctxsw=none", "--trace=nvtx,osrt"]
    if _DRIVER.exists():
        options[-1] = "--trace=cuda,nvtx,osrt"
        options += ["--cuda-graph-trace=node", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
        if config.memory:
            options.append("--cuda-memory-usage=true")
    # No host's name and no number that could be taken for a rank: the report itself holds whose processes it holds.
    report = config.folder / f"nsys-{secrets.token_hex(4)}"
    return [program, "profile", *options, "--output=" + str(report).replace("%", "%%"), *command]


def reports(folder: Path) -> list[Path]:
    """The reports in a recording's folder."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(REPORT_SUFFIX))


def make_way(config: CollectorConfig, environment: Mapping[str, str], problems: Problems) -> CollectorConfig:
    """The options that hold in a process: below somebody's ``nsys profile`` no trace is recorded, only ranges."""
    if config.mode in FOR_ANOTHER or SESSION_VARIABLE not in environment:
        return config
    problems.add(
        "this process runs under Nsight Systems, and two profilers cannot share a device: PerfScope only writes "
        "ranges. To record with PerfScope, run without nsys; to have PerfScope start it, use perfscope run --with nsys"
    )
    return dataclasses.replace(config, mode="nvtx")


def says_nsys(command: Sequence[str]) -> bool:
    """Does a command call ``nsys`` itself?"""
    return any(os.path.basename(word) == "nsys" for word in command)  # noqa: PTH119 - a mere name
