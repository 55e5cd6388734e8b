"""What is no longer sent takes no cores from the training threads: how far that goes into a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.predict import WhatIfAnswer, predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import CpuMetadata, RunMetadata
from tests.generator import MS, US, JobSpec, ReduceEachMicrobatch, cpu_job, simulate

CPUS = cpu_job(ranks=2, steps=6, microbatches=4, causes=(ReduceEachMicrobatch(),))
DEVICES = JobSpec(ranks=2, steps=6, end_sync=True, microbatches=4, causes=(ReduceEachMicrobatch(),))
STEPS = 8
NO_SYNC = {"ddp.no_sync": "true"}


def run_of(rank: int, waited_ns: int | None, others_ns: int, threads: int = 1) -> RunMetadata:
    """A rank whose training thread waited that long for a core in each step, while others computed for that long."""
    thread_ns = 10 * MS * STEPS
    cpu = CpuMetadata(
        cores="0-1", steps=STEPS, thread_ns=thread_ns, process_ns=thread_ns + others_ns * STEPS,
        waited_ns=None if waited_ns is None else waited_ns * STEPS,
    )  # fmt: skip
    return RunMetadata(rank=rank, world_size=2, local_world_size=2, cpu_count=2, cpu_threads=threads, cpu=cpu)


def answers(spec: JobSpec, folder: Path, *runs: RunMetadata) -> tuple[WhatIfAnswer, WhatIfAnswer]:
    """(with what these ranks recorded, without)."""
    simulate(spec).write(folder)
    context = context_of(folder)
    with_cpu = replace(context, runs={run.rank: run for run in runs})
    return predict(with_cpu, NO_SYNC), predict(replace(context, runs={}), NO_SYNC)


@pytest.mark.parametrize(
    ("runs", "freed_ns"),
    [
        # Of four rounds of reductions three go, and with them up to three quarters of the waits.
        pytest.param([(800 * US, 900 * US), (800 * US, 900 * US)], 600 * US, id="waits"),
        pytest.param([(5000 * US, 800 * US), (5000 * US, 800 * US)], 600 * US, id="no more than others computed"),
        pytest.param([(800 * US, 900 * US), (400 * US, 900 * US)], 300 * US, id="the rank that waited least"),
        pytest.param([(800 * US, 900 * US), (None, 900 * US)], 0, id="not known of one"),
        pytest.param([(800 * US, 900 * US, 4), (800 * US, 900 * US, 4)], 0, id="threads of operators"),
    ],
)
def test_half_of_the_waits_for_cores_is_predicted_to_go(
    runs: list[tuple[int | None, int]], freed_ns: int, tmp_path: Path
) -> None:
    found, without = answers(CPUS, tmp_path, *(run_of(rank, *run) for rank, run in enumerate(runs)))
    assert without.mid_ns - found.mid_ns == pytest.approx(freed_ns / 2, rel=0.05)
    assert without.low_ns - found.low_ns == pytest.approx(freed_ns, rel=0.05)
    assert found.high_ns == without.high_ns


def test_devices_sum_what_they_send_themselves(tmp_path: Path) -> None:
    found, without = answers(DEVICES, tmp_path, run_of(0, 800 * US, 900 * US), run_of(1, 800 * US, 900 * US))
    assert found.mid_ns == without.mid_ns
