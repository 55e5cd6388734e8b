"""A trace of more events than memory holds ends with an error that names it, before memory ends."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers import readers
from perfscope.analyzers.readers import chrome_build, nsys_build
from perfscope.errors import TooLittleMemory, UnusableInput
from perfscope.execution import memory_bound
from perfscope.execution.memory_bound import MemoryBound
from tests.analyzers.readers.nsys_exports import Export
from tests.benchmarks import generate


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is looked at after a few events."""
    for module in (chrome_build, nsys_build):
        monkeypatch.setattr(module, "MemoryBound", functools.partial(MemoryBound, every=100))


def test_free_memory_bounds_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 110_000
    monkeypatch.setattr(memory_bound, "available_memory", lambda: free)
    bound = MemoryBound("rank0.json", every=10)
    for events in (9, 10, 500, 1000):
        bound.check(events)
    with pytest.raises(TooLittleMemory, match=r"^rank0\.json: its first 1,200 events .*--workers 1"):
        bound.check(1200)


def test_it_looks_again_only_after_as_many_events_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(memory_bound, "available_memory", lambda: looked.append(1) or 1 << 40)
    bound = MemoryBound("rank0.json", every=100)
    for events in range(0, 1000, 10):
        bound.check(events)
    assert len(looked) == 9


def test_the_user_s_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFSCOPE_MEMORY", "1MB")
    bound = MemoryBound("rank0.json", every=10)
    bound.check(5000)
    with pytest.raises(TooLittleMemory, match=r"^rank0\.json: .*PERFSCOPE_MEMORY allows 0\.0 GB.*--active"):
        bound.check(6000)


def test_a_rank_with_too_many_events_costs_itself(soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFSCOPE_CACHE", "off")
    for rank, size in ((0, 1_000), (1, 3_000_000)):
        generate.write_rank(tmp_path / f"rank{rank}.json", rank, 2, size)
    events = len(readers.read(tmp_path / "rank0.json"))
    monkeypatch.setenv("PERFSCOPE_MEMORY", str(170 * (events + 1)))
    summary = perfscope.analyze(tmp_path, workers=1)
    assert list(summary.job.ranks) == [0]
    (failure,) = summary.job.failures
    assert failure.path.endswith("rank1.json")
    assert "PERFSCOPE_MEMORY" in failure.error
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(UnusableInput, match=r"rank1\.json"):
        perfscope.analyze(tmp_path, workers=1)


def test_exports_of_nsight_systems_too(soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Export(tmp_path / "report.sqlite")
    made.process(100, "python")
    for at in range(200):
        made.kernel(100, "gemm", 10 * at, 10 * at + 5)
    path = made.close()
    assert len(readers.read(path)) == 200
    monkeypatch.setenv("PERFSCOPE_MEMORY", "20kB")
    with pytest.raises(TooLittleMemory, match=r"report\.sqlite"):
        readers.read(path)


def test_memory_that_the_system_refuses_is_no_word_of_python_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate.write_rank(tmp_path / "rank0.json", 0, 1, 1000)

    def refused(*_: object) -> None:
        raise MemoryError("Unable to allocate 3 GiB")

    monkeypatch.setenv("PERFSCOPE_CACHE", "off")
    monkeypatch.setattr(readers, "read", refused)
    with pytest.raises(UnusableInput, match=r"rank0\.json: needs more memory") as caught:
        perfscope.analyze(tmp_path, workers=1)
    assert "MemoryError" not in str(caught.value)
