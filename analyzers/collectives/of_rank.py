"""One rank's collectives with what the recording says of each: group, kind, type, size, sequence, step, peers."""

from __future__ import annotations

from perfscope.analyzers.collectives.communication import Collectives
from perfscope.analyzers.collectives.found import UNKNOWN_GROUP, assumed_group
from perfscope.analyzers.collectives.host import host_communication_rows, on_host
from perfscope.analyzers.collectives.kernels import on_device
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.trace import Trace

__all__ = ["UNKNOWN_GROUP", "assumed_group", "find_collectives", "host_communication_rows"]


def find_collectives(trace: Trace, work: DeviceWork, steps: Steps) -> Collectives:
    """Communication kernels where the rank has device work, the backend's host ranges otherwise."""
    found = on_device(trace, work) if len(work) else on_host(trace)
    return found.collectives(steps)
