"""A run recorded both ways agrees: the same simulated job as Chrome traces and as one Nsight Systems export."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import perfscope
from perfscope.execution.serial import Serial
from perfscope.results.categories import CATEGORIES
from perfscope.results.summary import Summary
from tests.analyzers.readers.nsys_exports import GENERATIONS
from tests.analyzers.readers.nsys_jobs import write_report
from tests.generator import MS, JobSpec, LoaderSpec, SlowCompute, SlowLoader, simulate

SPEC = JobSpec(
    ranks=4,
    steps=6,
    end_sync=True,
    clock_offsets_ns={1: -2 * MS, 2: 3_217_001},
    loader=LoaderSpec(load_ns=4 * MS),
    causes=(SlowCompute(ranks=(2,), factor=1.3), SlowLoader(ranks=(1,), load_ns=90 * MS)),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, Summary]:
    """(from Chrome traces, from an export)."""
    job = simulate(SPEC)
    folder = tmp_path_factory.mktemp("both")
    job.write(folder / "chrome")
    report = write_report(job, folder / "report.sqlite")
    return perfscope.analyze(folder / "chrome", executor=Serial()), perfscope.analyze(report, executor=Serial())


def test_the_time_breakdown_is_the_same_to_the_nanosecond(both: tuple[Summary, Summary]) -> None:
    chrome, nsys = both
    nsys.self_check()
    assert [row.rank for row in nsys.time_breakdown] == [0, 1, 2, 3]
    for ours, theirs in zip(nsys.time_breakdown, chrome.time_breakdown, strict=True):
        for name in (*(f"{row}_us" for row in CATEGORIES), "step_time_us", "comm_us", "hidden_comm_us"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-3), name
    # The rows that were planted are there, so the two do not agree on nothing.
    assert min(row.compute_us for row in nsys.time_breakdown) > 1000
    assert max(row.exposed_comm_wait_us for row in nsys.time_breakdown) > 1000
    assert nsys.time_breakdown[1].idle_dataloader_us > 1000


def test_so_are_the_job_and_who_cost_it_what(both: tuple[Summary, Summary]) -> None:
    chrome, nsys = both
    for name in ("steps", "ranks", "world_size", "missing_ranks", "backend", "devices", "hosts", "strategy"):
        assert getattr(nsys.job, name) == getattr(chrome.job, name), name
    assert nsys.job.step_time_us == pytest.approx(chrome.job.step_time_us)
    assert [(row.rank, row.cause) for row in nsys.stragglers] == [(row.rank, row.cause) for row in chrome.stragglers]
    assert [row.lost_us for row in nsys.stragglers] == pytest.approx([row.lost_us for row in chrome.stragglers])
    assert nsys.stragglers
    assert [dataclasses.astuple(row) for row in nsys.clock] == [dataclasses.astuple(row) for row in chrome.clock]
    assert nsys.critical_path == chrome.critical_path


def test_collectives_take_and_wait_as_long(both: tuple[Summary, Summary]) -> None:
    """Their sizes are kineto's to know, so only totals can be compared."""
    chrome, nsys = both

    def totals(summary: Summary) -> dict[str, float]:
        rows = summary.collectives
        return {
            "count": sum(row.count for row in rows),
            "transfer": sum(row.count * row.transfer_us for row in rows),
            "wait": sum(row.count * row.wait_us for row in rows),
        }

    assert totals(nsys) == pytest.approx(totals(chrome))
    assert {row.kind for row in nsys.collectives} == {row.kind for row in chrome.collectives}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_gives_the_same(tmp_path: Path, both: tuple[Summary, Summary], generation: str) -> None:
    report = write_report(simulate(SPEC), tmp_path / "report.sqlite", generation)
    assert perfscope.analyze(report, executor=Serial()).time_breakdown == both[1].time_breakdown
