"""The emulator against cases that can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import MS, US, Cause, Cpu, Job, Loader, Model, Network, Recording, emulate
from tests.emulator import model as layers
from tests.emulator.emulate import GAP_NS
from tests.emulator.machine import Machine, Meeting, Waits, Work
from tests.emulator.rank import QUEUE
from tests.emulator.reducers import buckets

QUIET = Job(
    ranks=1,
    noise=0.0,
    model=Model(blocks=2),
    loader=Loader(load_ns=100 * US, jitter=0.0, batch_bytes=1200),
    recording=Recording(steps=3),
    warmup=3,
)


def _step_kernels(job: Job) -> list[float]:
    """Device time of each kernel of a step without communication."""
    one = layers.block(job, job.model.tokens)
    products = [kernel.ns for kernel in one if kernel.operator == "aten::addmm"]
    others = [kernel.ns for kernel in one if kernel.operator != "aten::addmm"]
    block = [kernel.ns for kernel in one] + products * 2 + [2 * ns for ns in others]
    elements = sum(layers.parameters(job)) * job.model.blocks / job.optimizer_kernels
    adam = [2_500 + 24 * elements / 1_500] * job.optimizer_kernels
    return block * job.model.blocks + adam + [8_000.0, 1_300.0]  # the loss, the batch


def test_a_busy_device_takes_its_kernels_and_the_gaps_between_them() -> None:
    job = replace(QUIET, model=Model(blocks=2, tokens=32768))
    kernels = _step_kernels(job)
    assert emulate(job).step_ns == pytest.approx(sum(kernels) + GAP_NS * len(kernels), rel=1e-4)


def test_a_launch_bound_step_takes_its_host_code() -> None:
    cpu = Cpu(python_ns=50 * US, operator_ns=50 * US, engine_ns=0, launch_ns=5 * US)
    job = replace(QUIET, model=Model(blocks=2, tokens=64, width=64), cpu=cpu)
    launches = len(_step_kernels(job)) - 1  # but for the batch
    forward = 2 * 11 + job.optimizer_kernels
    fixed = 15 * US + 10 * US + 20 * US + job.loader.fetch_ns + 55 * US
    assert emulate(job).step_ns == pytest.approx(launches * 55 * US + forward * 50 * US + fixed, rel=1e-3)


@pytest.mark.parametrize(("workers", "each_ms"), [(1, 40), (2, 20), (4, 10)])
def test_a_slow_loader_sets_the_pace(workers: int, each_ms: int) -> None:
    loader = Loader(workers=workers, load_ns=40 * MS, jitter=0.0)
    job = replace(QUIET, loader=loader, recording=Recording(steps=8), warmup=8)
    assert emulate(job).step_ns == pytest.approx(each_ms * MS, rel=0.01)


@pytest.mark.parametrize("age", [1, 2, 3, 42])
def test_workers_of_an_old_loop_have_in_hand_what_they_have_where_its_steps_are_emulated(age: int) -> None:
    """Four workers are waited for in every fourth step: which one of those recorded that is depends on the age."""
    quick = replace(QUIET, model=Model(blocks=2, tokens=16384), loader=replace(QUIET.loader, load_ns=1))
    load_ns = round(4.2 * emulate(quick).step_ns)
    slow = replace(quick, loader=replace(quick.loader, workers=4, load_ns=load_ns), recording=Recording(steps=8))
    old, whole = emulate(replace(slow, age=age)).ends_ns, emulate(replace(slow, warmup=slow.warmup + age)).ends_ns
    assert np.diff(old[-9:]) == pytest.approx(np.diff(whole[-9:]), rel=0.01)


def test_a_collective_ends_after_the_last_has_begun_and_its_transfer() -> None:
    machine = Machine(gap_ns=0)
    meeting = Meeting(2, transfer_ns=50)
    works = [Work(rank, 1, "kernel", "nccl", 0, queued_ns=queued) for rank, queued in enumerate((10, 300))]
    behind = Work(0, 1, "kernel", "next", 5, queued_ns=0)
    for work in works:
        work.meetings = (meeting,)
    machine.submit(works[0])
    machine.submit(behind)
    assert behind.end_ns is None
    machine.submit(works[1])
    assert [work.end_ns for work in (*works, behind)] == [350, 350, 355]


def test_programs_that_wait_for_each_other_forever_are_an_error() -> None:
    machine = Machine(gap_ns=0)
    work = Work(0, 1, "kernel", "nobody's", 0, 0)
    work.meetings = (Meeting(2, 1),)

    def program() -> Waits:
        machine.submit(work)
        yield work

    with pytest.raises(RuntimeError, match="nobody's"):
        machine.run([program()])


def test_the_host_runs_ahead_as_far_as_the_queue_allows() -> None:
    job = replace(QUIET, model=Model(blocks=8, tokens=32768), warmup=1, recording=Recording(steps=8))
    works = emulate(job).ranks[0].works
    begun = sorted(work.start_ns or 0 for work in works)
    ahead = [index - sum(ns <= work.queued_ns for ns in begun) for index, work in enumerate(works)]
    assert QUEUE - 50 < max(ahead) <= QUEUE


def test_removing_a_cause_gives_the_job_without_it() -> None:
    healthy = Job(model=Model(blocks=2), recording=Recording(steps=2), warmup=3)
    slow = replace(healthy, causes=(Cause("slow compute", 1.5, (1,)),))
    assert slow.without(*slow.causes) == healthy
    lost = emulate(slow).step_ns - emulate(healthy).step_ns
    own = sum(_step_kernels(replace(healthy, noise=0.0))[:-1])
    assert lost == pytest.approx(0.5 * own, rel=0.1)


def test_buckets_are_closed_from_the_last_parameter_on() -> None:
    job = Job(model=Model(blocks=2, width=1024), bucket_mb=25)
    found, bucket_of = buckets(job)
    # The last product of the last block holds 16 MiB of fp32 and closes the first bucket, of 1 MiB, alone.
    assert found[0] == (1, 4 * 1024 * 1024)
    assert bucket_of[1, len(layers.parameters(job)) - 1][0] == 0
    assert sum(count for count, _ in found) == 2 * len(layers.parameters(job))


@pytest.mark.parametrize(
    "job",
    [
        Job(strategy="fsdp"),
        Job(strategy="fsdp", microbatches=2, scatters_once=True),
        Job(strategy="manual"),
        Job(strategy="flat"),
        Job(strategy="tensor", tensor=2),
        Job(strategy="pipeline", ranks=4, stages=2, microbatches=4),
        Job(microbatches=2, no_sync=False),
    ],
    ids=lambda job: job.strategy,
)
def test_every_strategy_runs_and_a_faster_network_is_never_slower(job: Job) -> None:
    job = replace(job, model=Model(blocks=2, tokens=1024), recording=Recording(steps=2), warmup=2)
    fast = replace(job, network=Network(latency_ns=5 * US, gbps=1000.0))
    assert emulate(fast).ends_ns[-1] <= emulate(job).ends_ns[-1]


def test_a_trace_links_every_kernel_with_its_launch(tmp_path: Path) -> None:
    emulate(Job(ranks=2, model=Model(blocks=2), recording=Recording(steps=2))).write(tmp_path)
    events = json.loads((tmp_path / "rank1.json").read_text())["traceEvents"]
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert kernels
    assert all(calls[kernel["args"]["correlation"]]["ts"] < kernel["ts"] for kernel in kernels)
