"""Predictions for gloo and for jobs on CPUs: collectives that share a link, slow reduce-scatters, busy cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.whatif import ddp
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.recording.metadata import RunMetadata
from tests.generator import MS, JobSpec, LoaderSpec, ModelSpec, NetworkSpec, simulate

MODEL = ModelSpec(layers=4, tokens=1024)
NETWORK = NetworkSpec(busbw_gbps=40.0, alpha_ns=100_000)


def recorded(folder: Path, spec: JobSpec) -> Context:
    simulate(spec).write(folder)
    return context_of(folder)


def with_metadata(context: Context, **known: Any) -> Context:
    """The same recording, of which ``perfscope run`` knew this."""
    return replace(context, runs={rank: RunMetadata(rank=rank, **known) for rank in context.result.partials})


def sending(*spans: tuple[int, int], arrival: int = 0) -> Any:
    """A job of one rank that reduced buckets of 1 MiB in these spans, the last rank coming to them at ``arrival``."""
    begin, end = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    count = len(spans)
    instances = SimpleNamespace(
        kinds=("broadcast", "all_reduce"),
        kind=np.ones(count, dtype=np.int64),
        group=np.zeros(count, dtype=np.int64),
        bytes=np.full(count, 1 << 20),
    )
    matched = SimpleNamespace(
        instances=instances,
        rank=np.zeros(count, dtype=np.int64),
        instance=np.arange(count),
        index=np.arange(count),
        last_arrival_ns=np.maximum(begin, arrival),
    )
    partial = SimpleNamespace(collectives=SimpleNamespace(end_ns=end))
    clocks = SimpleNamespace(offset_of=lambda rank: 0)
    return SimpleNamespace(result=SimpleNamespace(matched_before=matched, partials={0: partial}, clocks=clocks))


@pytest.mark.parametrize(
    ("job", "share"),
    [
        (sending((0, 100), (0, 100)), 0.5),
        (sending((0, 100), (100, 150)), 1.0),
        (sending((0, 100), (50, 150)), 0.75),
        # Waiting for the last rank is not sending.
        (sending((0, 100), (50, 150), arrival=100), 1.0),
    ],
)
def test_buckets_that_were_sent_at_once_would_be_quicker_alone(job: Any, share: float) -> None:
    assert ddp.alone_share(job, group=0) == share


def test_gloo_s_reduce_scatter_cost_an_all_reduce_already(tmp_path: Path) -> None:
    spec = JobSpec(ranks=2, model=MODEL, network=NETWORK, strategy="zero3", end_sync=True)
    context = recorded(tmp_path, spec)
    plain = {"zero.stage": "0"}

    gloo, nccl = (
        predict(with_metadata(context, backend="gloo"), plain),
        predict(with_metadata(context, backend="nccl"), plain),
    )
    assert gloo.mid_ns < nccl.mid_ns


def test_where_all_cores_are_busy_workers_may_save_nothing_and_cost_a_little(tmp_path: Path) -> None:
    spec = JobSpec(ranks=2, model=MODEL, loader=LoaderSpec(workers=0, load_ns=8 * MS), end_sync=True)
    context = recorded(tmp_path, spec)
    asked = {"dataloader.num_workers": "2"}

    crowded = predict(with_metadata(context, cpu_count=2, local_world_size=2), asked)
    roomy = predict(with_metadata(context, cpu_count=64, local_world_size=2), asked)
    assert crowded.mid_ns == roomy.mid_ns < crowded.measured_ns
    assert roomy.high_ns < crowded.measured_ns
    saving = crowded.measured_ns - crowded.mid_ns
    # Of the saving a fifth may be lost where there is room, and all of it and a quarter more where there is none.
    assert crowded.high_ns - roomy.high_ns == pytest.approx((1.25 - 0.2) * saving, rel=0.001)
    assert crowded.high_ns >= crowded.measured_ns + 0.25 * saving
