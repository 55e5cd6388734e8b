"""Describes the process itself: all that is known of a rank before anything of it was recorded."""

from __future__ import annotations

import os
import socket
import sys
from datetime import datetime, timezone

from perfscope._version import __version__
from perfscope.collectors.identity import Identity, attempt, rendezvous
from perfscope.collectors.redact import performance_environment, redact_command
from perfscope.metadata import RunMetadata


def describe_process(identity: Identity, mode: str) -> RunMetadata:
    """Who and where this process is, and what it was told by its environment; ``mode`` says what is recorded."""
    affinity = getattr(os, "sched_getaffinity", None)
    return RunMetadata(
        perfscope_version=__version__,
        mode=mode,
        attempt=attempt(),
        rank=identity.rank,
        local_rank=identity.local_rank,
        world_size=identity.world_size,
        local_world_size=identity.local_world_size,
        host=socket.gethostname(),
        cpu_count=len(affinity(0)) if affinity is not None else os.cpu_count(),
        pid=os.getpid(),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Where the interpreter was installed says nothing about the run.
        command=redact_command([os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]),  # noqa: PTH119 - a mere name
        backend=identity.backend,
        rendezvous=rendezvous(os.environ),
        environment=performance_environment(os.environ),
    )
