"""Hosts that wait, or are far ahead, limit no faster step: against the emulated job with the change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator import MS, US, Cause, Job, Loader, Model, Network, Recording, emulate, step_ns
from tests.emulator.changes import apply

LOADER = Loader(load_ns=2 * MS)
FULL_QUEUE = Job(
    ranks=2, microbatches=2, bucket_mb=10, gradient_bytes=2, loader=LOADER, warmup=6,
    model=Model(blocks=3, tokens=4096, flops_per_ns=100_000.0, small_kernels=6), recording=Recording(first=21),
)  # fmt: skip
FULL_OF_GRADIENTS = Job(
    ranks=2, bucket_mb=10, loader=LOADER, warmup=6, network=Network(gbps=2.0), recording=Recording(first=21),
    model=Model(blocks=3, tokens=1024, flops_per_ns=100_000.0, small_kernels=20),
)  # fmt: skip
"""Hosts wait for a place in the queue until an all-reduce is taken out of it, as the one in front of it has ended."""
FULL_BEHIND_A_PAUSE = Job(
    strategy="fsdp", version=2, in_flight=1000, ranks=2, microbatches=2, noise=0.01, gradient_bytes=2, loader=LOADER,
    model=Model(blocks=4, tokens=8192, width=512, flops_per_ns=100_000.0, small_kernels=24),
    network=Network(gbps=20.0), recording=Recording(steps=5, first=20),
    causes=(Cause("pause", 400 * MS, ranks=(1,), every=5, how="log", offset=3),),
)  # fmt: skip
"""While the other rank waits for it, that rank's host waits in a launch, and launches copies for gathers behind it."""
ONE_RANK_READS_THE_LOSS = Job(
    ranks=2, model=Model(blocks=3, width=512), causes=(Cause("sync", ranks=(0,)),), network=Network(gbps=6.0),
    loader=LOADER, recording=Recording(steps=5, first=20),
)  # fmt: skip
ALL_IS_LAUNCHED_EARLY = Job(
    strategy="fsdp", ranks=2, microbatches=2, gradient_bytes=2, loader=LOADER, network=Network(gbps=20.0),
    model=Model(blocks=2, tokens=4096, width=2048, flops_per_ns=100_000.0, small_kernels=6),
)  # fmt: skip
GATHERS_IN_TIME = Job(
    strategy="fsdp", ranks=2, loader=LOADER, network=Network(gbps=24.0, latency_ns=10 * US),
    model=Model(blocks=4, tokens=4096, width=2048, flops_per_ns=100_000.0),
)  # fmt: skip
WAITS_FOR_EARLIER_STEPS = Job(
    strategy="fsdp", ranks=2, reshard=False, loader=LOADER, network=Network(gbps=80.0),
    model=Model(blocks=4, tokens=8192), recording=Recording(steps=2),
)  # fmt: skip
"""Its rate limiter makes hosts wait for the step before: in the first one for work that is not recorded."""
NO_UNIT_AHEAD = Job(
    strategy="fsdp", ranks=2, in_flight=1, loader=LOADER, network=Network(gbps=100.0),
    model=Model(blocks=5, tokens=8192),
)  # fmt: skip
"""Its rate limiter makes each gather wait for the unit in front, where torch's waits for the one before that."""
ONE_HOST_IS_SLOW = Job(
    strategy="fsdp", ranks=3, microbatches=2, reshard=False, noise=0.0, loader=LOADER, network=Network(gbps=25.0),
    model=Model(blocks=4, tokens=8192, width=512), causes=(Cause("slow host", 2.5, ranks=(2,)),),
)  # fmt: skip
ASKED = {
    "a full queue": (FULL_QUEUE, {"compute": "1.5x"}),
    "a queue that empties": (FULL_QUEUE, {"compute": "3x"}),
    "a queue that is full until a collective ends": (FULL_OF_GRADIENTS, {"network.bandwidth": "10x"}),
    "a full queue behind a pause": (FULL_BEHIND_A_PAUSE, {"rank.1": "peers"}),
    "one rank reads the loss": (ONE_RANK_READS_THE_LOSS, {"network.bandwidth": "10x"}),
    "all is launched early": (ALL_IS_LAUNCHED_EARLY, {"network.bandwidth": "10x"}),
    "gathers that nothing waited for": (GATHERS_IN_TIME, {"compute": "2x"}),
    "a recording that begins within waits": (WAITS_FOR_EARLIER_STEPS, {"compute": "1.5x"}),
    "gathers that wait for the unit in front": (NO_UNIT_AHEAD, {"compute": "1.5x"}),
    "gathers that do, none of them ahead": (replace(NO_UNIT_AHEAD, backward_prefetch=False), {"compute": "1.5x"}),
}


def recorded(job: Job, folder: Path) -> Context:
    emulate(job).write(folder)
    return context_of(folder, workers=1)


@pytest.mark.parametrize("name", ASKED)
def test_a_change_of_the_devices_brings_what_it_brings(name: str, tmp_path: Path) -> None:
    job, settings = ASKED[name]
    changed = apply(job, settings)
    assert changed is not None
    truth = step_ns(changed.job)
    assert truth < 0.8 * step_ns(job)  # else little shows
    assert predict(recorded(job, tmp_path), settings).mid_ns == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("beside_hosts", [True, False])
def test_a_question_changes_nothing_for_the_next_one(beside_hosts: bool, tmp_path: Path) -> None:
    """All begin with the same recorded ops, which are found once."""
    context = recorded(ONE_RANK_READS_THE_LOSS, tmp_path)
    if not beside_hosts:
        context = replace(context, recorded=replace(context.recorded, with_hosts=None))
    questions = ({"compute": "3x"}, {"host.sync": "0"}, {"network.bandwidth": "10x"})
    first = [predict(context, settings) for settings in questions]
    assert len({answer.mid_ns for answer in first}) == len(questions)
    assert [predict(context, settings) for settings in questions] == first


def test_gathers_of_a_slow_host_would_wait_for_no_computation(tmp_path: Path) -> None:
    """It has launched nothing else by then, so its own recording does not show that: those of its peers do."""
    changed = apply(ONE_HOST_IS_SLOW, {"rank.2": "peers"})
    assert changed is not None
    truth = step_ns(changed.job)
    assert truth < 0.8 * step_ns(ONE_HOST_IS_SLOW)  # else little shows
    assert predict(recorded(ONE_HOST_IS_SLOW, tmp_path), {"rank.2": "peers"}).mid_ns == pytest.approx(truth, rel=0.03)


def test_launches_that_wait_for_a_full_queue_come_back(tmp_path: Path) -> None:
    """Most of what the hosts take is that wait: what they do themselves is less than half of a step."""
    calls = [call for call in emulate(FULL_QUEUE).ranks[0].calls if call.launches]
    assert sum(call.end_ns - call.start_ns > 50 * US for call in calls) > 100  # else the case is not what it is about
    recording = recorded(replace(FULL_QUEUE, noise=0.02), tmp_path).recorded
    assert recording.with_hosts is not None
    found = replay(recording.with_hosts)
    assert np.array_equal(recording.steps_ns(found), recording.steps_ns(replay(recording.schedules)))
    assert found.host_mark_ns is not None
    begun = recording.begin[:, recording.used]
    hosts = found.host_mark_ns[begun[:, -1]] - found.host_mark_ns[begun[:, 0]]
    devices = found.mark_ns[begun[:, -1]] - found.mark_ns[begun[:, 0]]
    assert (hosts < 0.5 * devices).all()


READS_EVERY_LOSS = Job(
    strategy="fsdp", ranks=2, noise=0.0, model=Model(blocks=2, tokens=4096, width=2048), network=Network(gbps=60.0),
    loader=LOADER, causes=(Cause("sync"),),
)  # fmt: skip
READS_ITS_LOSS = Job(
    ranks=2, noise=0.0, item_every=1, loader=Loader(workers=0, load_ns=MS), recording=Recording(steps=1)
)
READS_SOME_LOSSES = Job(
    strategy="fsdp", ranks=4, noise=0.0, item_every=5, model=Model(blocks=3, tokens=8192),
    loader=Loader(workers=0, load_ns=MS), causes=(Cause("slow loader", 8.0, (0, 1)),), recording=Recording(steps=5),
)  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        # Units are then gathered while others compute, though the recording has a drained device before each gather.
        pytest.param(READS_EVERY_LOSS, id="a gather behind each wait"),
        # The wait that makes a host late to its first work is in the step before the recording.
        pytest.param(READS_ITS_LOSS, id="a lone step"),
        pytest.param(READS_SOME_LOSSES, id="late ranks"),
    ],
)
def test_hosts_that_do_not_wait_run_ahead(job: Job, tmp_path: Path) -> None:
    changed = apply(job, {"host.sync": "0"})
    assert changed is not None
    truth = step_ns(changed.job)
    assert truth < 0.96 * step_ns(job)  # else little shows
    assert predict(recorded(job, tmp_path), {"host.sync": "0"}).mid_ns == pytest.approx(truth, rel=0.02)


def test_a_host_that_is_kept_near_its_device_still_loads_before_each_step(tmp_path: Path) -> None:
    """FSDP's limit on gathers keeps it there, so without reading the loss one rank is as late in the first step too."""
    job = Job(
        strategy="fsdp", ranks=4, noise=0.0, model=Model(blocks=6, tokens=8192, width=512),
        recording=Recording(steps=2), loader=Loader(workers=0, load_ns=MS),
        causes=(Cause("sync"), Cause("slow loader", 8.0, (0,))),
    )  # fmt: skip
    changed = apply(job, {"host.sync": "0"})
    assert changed is not None
    truth = step_ns(changed.job)
    assert predict(recorded(job, tmp_path), {"host.sync": "0"}).mid_ns == pytest.approx(truth, rel=0.02)


def test_a_batch_that_is_copied_from_pageable_memory_is_waited_for_too(tmp_path: Path) -> None:
    job = Job(ranks=2, noise=0.0, model=Model(blocks=4, width=512), loader=replace(LOADER, pinned=False))
    changed = apply(job, {"host.sync": "0"})
    assert changed is not None
    truth = step_ns(changed.job)
    assert truth < 0.98 * step_ns(job)  # else little shows
    assert predict(recorded(job, tmp_path), {"host.sync": "0"}).mid_ns == pytest.approx(truth, rel=0.02)
