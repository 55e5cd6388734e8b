"""The recording's folder as it is before anything is recorded, and what of it is this project's."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import perfscope
from perfscope._version import __version__
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch import inspector
from perfscope.recording.metadata import LaunchMetadata, now
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE, PARTIAL_SUFFIX, REPORT_FILE, further_jobs
from perfscope.redact import redact_command

_OURS: Final = re.compile(
    rf"^(?:rank-\d+\.(?:run\.json|compiled\.json|steps\.bin|stacks\.txt|flight\.(?:pickle|json)|capture-\d+\.(?:trace|et)\.json(?:\.gz)?|step-\d+\.et\.json)(?:{re.escape(PARTIAL_SUFFIX)})?"
    rf"|nsys-[0-9a-f]+\.\w[\w-]*|host-[\w.-]+\.samples\.jsonl|{re.escape(LAUNCH_FILE)}|{re.escape(REPORT_FILE)})$"
)
_OURS_IN_BOOTSTRAP: Final = re.compile(
    r"^(?:sitecustomize\.py|config\.json|failures\.txt|seen-\w+|hangs|stacks-\d+|opened\.json|opening-\w+|overrides\.json|stopped-\d+|claim-[\w.-]+|plans|requests|plan-\d+)$"
)


def holds_recording(folder: Path) -> bool:
    """Does the folder contain a recording, or anything of one? Raises OSError."""
    return folder.is_dir() and any(_OURS.match(path.name) for path in folder.iterdir())


def remove_recording(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove what this project wrote into a folder, and nothing else. Raises OSError.

    Of the bootstrap folder's files those in ``kept`` stay.
    """
    for path in folder.iterdir():
        if _OURS.match(path.name) and path.is_file():
            path.unlink()
    inspector.remove_logs(folder)
    remove_bytecode(folder)
    inside = folder / BOOTSTRAP_FOLDER
    for path in inside.iterdir() if inside.is_dir() else ():
        if _OURS_IN_BOOTSTRAP.match(path.name) and path.name not in kept:
            path.unlink()
    for job in further_jobs(folder):
        remove_recording(job)
        with suppress(OSError):  # something else is in there
            (job / BOOTSTRAP_FOLDER).rmdir()
            job.rmdir()


def remove_bytecode(folder: Path) -> None:
    """Remove what Python has compiled in the bootstrap's folder: the folder's path stands in it."""
    compiled = folder / BOOTSTRAP_FOLDER / "__pycache__"
    with suppress(OSError):  # there is none, or another node's processes write theirs
        for path in compiled.glob("sitecustomize.*"):
            path.unlink()
        compiled.rmdir()


def describe_launch(config: CollectorConfig, command: Sequence[str]) -> LaunchMetadata:
    """What is known of a command when its recording begins."""
    return LaunchMetadata(
        perfscope_version=__version__,
        command=redact_command(command),
        started_at=now("seconds"),
        host=socket.gethostname(),
        options={
            name: getattr(config, name)
            for name in (
                "ranks", "wait", "warmup", "active", "repeat", "shapes", "stacks", "memory", "nvtx", "count_flops",
                "sample_every", "mode", "trigger", "cooldown", "max_captures", "budget", "signal", "hang_timeout",
                "inspector", "execution_trace",
            )
        },
    )  # fmt: skip


def package_root() -> str:
    """The folder that contains this ``perfscope`` package."""
    return str(Path(perfscope.__file__).resolve().parent.parent)
