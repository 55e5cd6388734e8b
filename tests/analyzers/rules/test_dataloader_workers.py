"""The number of workers, as each framework is told it, and where cores are the limit; when it is asked for is tested in
``test_rules``.
"""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules import dataloader_workers
from perfscope.findings import Confidence, Finding, Prediction
from perfscope.metadata import CpuRecord, DataLoaderRecord, RunMetadata
from perfscope.summary import DataLoaderRow
from tests.analyzers.rules.jobs import account, facts, runs


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({}, "DataLoader(dataset, …, num_workers=4, persistent_workers=True)."),
        ({"transformers": {"bf16": True}}, "--dataloader_num_workers 4 --dataloader_persistent_workers True."),
        ({"megatron": {"bf16": True}}, "--num-workers 4."),
        ({"lightning": {"precision": "bf16-mixed"}}, "DataLoader(dataset, …, num_workers=4, persistent_workers=True)."),
    ],
)
def test_the_framework_s_own_words(settings, typed):
    # Loading takes 80 ms, the rest of the step 20 ms: 4 workers finish a batch every 20 ms.
    row = DataLoaderRow(rank=0, wait_us=80_000.0, blocking_us=80_000.0, batch_us=80_000.0, num_workers=0)
    finding = dataloader_workers.evaluate(
        facts(account(0, idle_dataloader=80_000.0), dataloader=(row,), runs=runs(1, **settings))
    )
    assert finding is not None
    assert finding.action.how == typed


def loading(
    batch_ms: float, cpu_ms: float, *, cores: int, predicted_ms: float | None = None, waited_ms: float = 0.0
) -> Finding | None:
    """Two ranks that load a batch for ``batch_ms`` of each step of 100 ms, ``cpu_ms`` of a core in all, and compute for
    the rest, ``waited_ms`` of a step without a core.
    """
    load = DataLoaderRecord(timed_batches=1, load_ns=round(batch_ms * 1e6), load_cpu_ns=round(cpu_ms * 1e6))
    used = round((100 - batch_ms + cpu_ms) * 1e6)
    cpu = CpuRecord(
        cores="0-7", steps=1, wall_ns=100_000_000, process_ns=used, thread_ns=used, waited_ns=round(waited_ms * 1e6)
    )
    known = {
        rank: RunMetadata(
            rank=rank, host="a", cpu_count=cores, local_world_size=2, cpu_threads=1, cpu=cpu, dataloaders=(load,)
        )
        for rank in (0, 1)
    }
    us = batch_ms * 1e3
    rows = tuple(DataLoaderRow(rank=rank, wait_us=us, blocking_us=us, batch_us=us, num_workers=0) for rank in (0, 1))
    predict = None if predicted_ms is None else lambda settings: Prediction(low=0, mid=predicted_ms * 1e6, high=1e9)
    accounts = (account(0, idle_dataloader=us), account(1, idle_dataloader=us))
    return dataloader_workers.evaluate(facts(*accounts, dataloader=rows, runs=known, predict=predict))


def test_cores_that_are_busy_with_training_leave_none_for_workers():
    found = loading(30, 30, cores=2)
    assert found is not None
    assert found.title.endswith("and the cores are the limit")
    assert (found.action.old, found.action.new) == ("0", "0")
    assert "The one core that each rank has is the limit, not the number of workers" in found.action.how
    assert "num_workers" not in found.action.how
    assert found.whatif == {}
    # Loading that costs nothing would end the stall.
    assert found.ceiling == pytest.approx(100 / 70 - 1)
    told = {evidence.what: evidence.value for evidence in found.evidence}
    assert told["CPU time to load one batch"] == pytest.approx(30_000)
    assert told["CPU time of a step besides"] == pytest.approx(70_000)


def test_with_a_core_to_spare_workers_are_asked_for():
    found = loading(30, 30, cores=4)
    assert found is not None
    assert (found.action.new, found.whatif) == ("1", {"dataloader.num_workers": "1"})
    assert "limit" not in found.title


def test_workers_that_wait_may_be_more_than_the_cores():
    found = loading(80, 0.5, cores=2)
    assert found is not None
    assert found.action.new == "4", "a batch every 20 ms, from one core"
    assert "all the cores allow" not in found.action.how


def test_what_is_played_decides_whether_workers_help():
    for little in (97, 93):  # of a stall of 30 ms
        found = loading(30, 15, cores=2, predicted_ms=little)
        assert found is not None
        assert found.whatif == {}
    found = loading(30, 15, cores=2, predicted_ms=87)
    assert found is not None
    assert found.whatif == {"dataloader.num_workers": "1"}
    assert found.ceiling == pytest.approx(100 / 87 - 1)


@pytest.mark.parametrize(("waited_ms", "confidence"), [(0, Confidence.HIGH), (60, Confidence.MEDIUM)])
def test_other_processes_on_the_cores_make_it_less_sure(waited_ms, confidence):
    found = loading(80, 0.5, cores=2, waited_ms=waited_ms)
    assert found is not None
    assert found.confidence is confidence
