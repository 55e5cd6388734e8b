"""Curves over settings: which values, where the best lies, and when there is nothing to see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.whatif.curves import MOST_RANKS, curves
from perfscope.recording.metadata import RunMetadata
from perfscope.results.findings import Prediction
from perfscope.results.rows import DataLoaderRow
from perfscope.results.tables import CurveRow
from tests.analyzers.rules.jobs import STEP_US, analyze, breakdown, changed, context
from tests.generator import MS, JobSpec, LoaderSpec, ModelSpec, NetworkSpec

WORKERS = "dataloader.num_workers"


def drawn(case: RuleContext, recommended: Iterable[Mapping[str, str]] = ()) -> tuple[CurveRow, ...]:
    return curves(case.summary, case.runs, case.predict, recommended)


def loading(ranks: int = 1, workers: int = 0, *, flat: bool = False, batch_us: float | None = 80_000.0) -> RuleContext:
    """A step of 100 ms, 80 of them loading; w workers make it max(20, 80/w) ms, or nothing does anything."""
    rows = tuple(
        DataLoaderRow(rank=rank, wait_us=80_000, blocking_us=80_000, batch_us=batch_us, num_workers=workers)
        for rank in range(ranks)
    )
    runs = {rank: RunMetadata(rank=rank, cpu_count=8, local_world_size=1) for rank in range(ranks)}

    def predict(change: Mapping[str, str]) -> Prediction | None:
        count = int(change.get(WORKERS, workers))
        mid = STEP_US if flat or count == 0 else max(20e3, 80e3 / count)
        return Prediction(low=0.9 * mid, mid=mid, high=1.1 * mid)

    return context(*(breakdown(rank) for rank in range(ranks)), dataloader=rows, runs=runs, predict=predict)


def test_the_fewest_workers_that_do_are_best() -> None:
    (curve,) = drawn(loading())
    assert (curve.setting, curve.unit, curve.current, curve.best) == (WORKERS, "workers", 0.0, 4.0)
    assert [point.value for point in curve.points] == [0, 1, 2, 3, 4, 6, 8]
    assert [round(point.mid_us / 1e3) for point in curve.points] == [100, 80, 40, 27, 20, 20, 20]
    assert curve.points[1].low_us < curve.points[1].mid_us < curve.points[1].high_us


def test_a_recommended_value_is_among_the_points() -> None:
    (curve,) = drawn(loading(), [{WORKERS: "5"}, {"rank.2": "peers"}])
    assert 5.0 in [point.value for point in curve.points]


def test_nothing_to_see() -> None:
    assert drawn(loading(flat=True)) == ()
    assert drawn(loading(batch_us=None)) == ()
    assert drawn(loading(ranks=MOST_RANKS + 1)) == ()
    assert drawn(changed(loading(), predict=None)) == ()


def test_what_is_set_stays_where_others_are_no_better() -> None:
    (curve,) = drawn(loading(workers=6))
    assert (curve.current, curve.best) == (6.0, 6.0)


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    network = NetworkSpec(busbw_gbps=40.0, alpha_ns=100_000)
    loader = LoaderSpec(workers=0, load_ns=4 * MS)
    return JobSpec(ranks=4, model=ModelSpec(layers=12, tokens=2048), network=network, loader=loader, end_sync=True)


def test_of_a_simulated_job(spec: JobSpec, tmp_path: Path) -> None:
    by_name = {curve.setting: curve for curve in analyze(spec, tmp_path).curves}
    assert set(by_name) == {"ddp.bucket_cap_mb", WORKERS}
    buckets = by_name["ddp.bucket_cap_mb"]
    assert buckets.current is None
    assert 1 < len(buckets.points) <= 12
    best = next(point for point in buckets.points if point.value == buckets.best)
    assert best.mid_us <= 1.02 * min(point.mid_us for point in buckets.points)
    workers = by_name[WORKERS]
    assert workers.points[0].mid_us > workers.points[1].mid_us
