"""The first advice, taken in the simulator: what is judged right, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.generator import (
    MIB,
    MS,
    TENSORBOARD,
    US,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    RotatingPause,
    SlowLoader,
    SmallBuckets,
    simulate,
)
from tests.generator.truth import Truth
from tests.planted.advice import at_peers_pace, judge_advice

SMALL = JobSpec(
    model=ModelSpec(layers=24, tokens=4096, width=512, hidden=1024, small_kernel_ns=10 * US),
    network=NetworkSpec(alpha_ns=400 * US), bucket_bytes=100 * MIB, causes=(SmallBuckets(bucket_bytes=2 * MIB),),
)  # fmt: skip


def step_us(truth: Truth) -> float:
    return truth.step_time_ns / 1e3


def analyzed(spec: JobSpec, folder: Path) -> Summary:
    simulate(spec).write(folder, file_template=TENSORBOARD)
    return advised(folder)


@pytest.mark.scale
def test_larger_buckets_bring_what_is_promised(tmp_path: Path) -> None:
    summary = analyzed(SMALL, tmp_path)
    advice = judge_advice(SMALL, (), summary, step_us)
    assert advice is not None
    assert advice.wrong is None
    silent = judge_advice(SMALL, (), replace(summary, findings=()), step_us)
    assert silent is not None
    assert silent.wrong is not None
    assert silent.wrong[0] == "not the best advice"


def test_a_rank_is_spared_its_turn_and_no_other_gets_it() -> None:
    spec = JobSpec(causes=(RotatingPause(pause_ns=1000, steps=(10, 11, 12, 13)),))
    left = at_peers_pace(spec, {1})
    pauses = {
        (rank, step)
        for rank in range(spec.ranks)
        for step in spec.recorded_steps
        for cause in left.causes
        if isinstance(cause, Pause) and cause.hits(rank, step)
    }
    assert pauses == {(step % 4, step) for step in (10, 11, 12, 13) if step % 4 != 1}


@pytest.mark.scale
def test_what_would_help_missing_ranks_alone_need_not_be_advised(tmp_path: Path) -> None:
    slow = SlowLoader(ranks=(3,), load_ns=30 * MS)
    spec = JobSpec(steps=4, loader=LoaderSpec(workers=0, load_ns=50 * US), causes=(slow,))
    simulate(spec).write(tmp_path, ranks=(0, 1, 2))
    silent = replace(advised(tmp_path), findings=())
    assert judge_advice(spec, (3,), silent, step_us) is None
    seen = judge_advice(spec, (), silent, step_us)
    assert seen is not None
    assert seen.wrong is not None
    assert seen.wrong[0] == "not the best advice"
