"""Waits for messages that came in time only because the host of the stage was late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.analyzers.measured import measured
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, US, Cause, Cpu, Job, Loader, Model, Network, Recording

JOB = Job(
    strategy="pipeline", ranks=4, stages=4, microbatches=8, noise=0.0, recording=Recording(steps=3),
    model=Model(blocks=4, tokens=8192, width=1024, small_kernels=3), loader=Loader(load_ns=1 * MS, jitter=0.0),
    cpu=Cpu(python_ns=6 * US, operator_ns=9 * US), network=Network(latency_ns=40 * US),
)  # fmt: skip


def test_a_stage_with_a_quicker_host_waits_for_messages(tmp_path: Path) -> None:
    """The first stage launches so slowly that every message is there before what needs it; else it is not."""
    slow = Cause("slow host", 4.0, (0,))
    emulation = emulate(replace(JOB, causes=(slow,)))
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.rank, row.cause) == (0, "launch")
    assert row.lost_us * 1e3 == pytest.approx(emulation.step_ns - step_ns(JOB), abs=0.015 * emulation.step_ns)
