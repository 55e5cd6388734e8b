"""A network of its own for a command, whose loopback interface passes only so much: a slow link without a cable."""

from __future__ import annotations

import os
import shlex
import subprocess

BURST_BYTES = 128 << 10
"""At least the loopback's MTU of 64 KiB: larger packets than the bucket would never pass."""
QUEUE_BYTES = 64 << 20
"""Nothing is dropped: a slow link delays, and TCP repeats nothing."""

GLOO = {"GLOO_SOCKET_IFNAME": "lo"}
"""The machine's name may stand for an interface that is not in the namespace."""


def throttled(megabits: float) -> tuple[str, ...]:
    """What to write before a command so that its processes share one link of ``megabits`` per second."""
    bucket = f"rate {megabits:g}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"
    setup = f'ip link set lo up && tc qdisc add dev lo root tbf {bucket} && exec "$@"'
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    return ("unshare", "--net", *user, "sh", "-c", setup, "sh")


def why_not() -> str | None:
    """Why a command cannot be given a network here; None where it can."""
    command = (*throttled(1000), "true")
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"{shlex.join(command)}: {done.stderr.strip()}"


def busbw_gbps(megabits: float, ranks: int) -> float:
    """Bus bandwidth of an all-reduce when all ranks send through one link of that many Mbit/s: each sends 2(n-1)/n of
    the data, and the bus bandwidth is what each of them gets.
    """
    return megabits / 8e3 / ranks
