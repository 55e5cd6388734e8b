"""The rule on waiting for a core: what it fires on, and what looks like it and is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.rules import RULES
from perfscope.analyzers.rules.host import cpu_contention
from perfscope.recording.metadata import CpuMetadata, DataLoaderMetadata, DeviceMetadata, RunMetadata
from perfscope.results.findings import Confidence, Finding, Obtained, Severity
from perfscope.results.rows import DataLoaderRow
from perfscope.results.system import HostRow, System
from tests.analyzers.rules.jobs import breakdown, context


def evaluate(
    *, ranks: int = 2, cores: int = 2, waited: float | None = 0.4, busy: float = 0.6, threads: int = 1,
    workers: int = 0, device: str = "cpu", rows: dict[str, float] | None = None, steps: int = 8,
    dataloader: tuple[DataLoaderRow, ...] = (), host: HostRow | None = None, own_cores: tuple[str, ...] = (),
) -> Finding | None:  # fmt: skip
    """Each rank runs for ``busy`` and waits for a core for ``waited`` of its steps' time."""
    cpu = CpuMetadata(
        steps=8, wall_ns=8_000_000, process_ns=round(busy * 8e6), thread_ns=round(busy * 8e6),
        waited_ns=None if waited is None else round(waited * 8e6),
    )  # fmt: skip
    runs = {
        rank: RunMetadata(
            rank=rank, host="node7", cpu_count=cores, cpu_threads=threads,
            cpu=replace(cpu, cores=own_cores[rank]) if own_cores else cpu,
            device=DeviceMetadata(type=device), dataloaders=(DataLoaderMetadata(num_workers=workers),),
        )
        for rank in range(ranks)
    }  # fmt: skip
    breakdowns = (breakdown(rank, **(rows or {})) for rank in range(ranks))
    machines = System(hosts=(host,), devices=(), processes=(), window_us=(0.0, 1.0)) if host is not None else None
    return cpu_contention.evaluate(
        context(*breakdowns, steps=tuple(range(steps)), runs=runs, dataloader=dataloader, system=machines)
    )


def test_it_is_asked() -> None:
    assert cpu_contention.evaluate in RULES


def test_ranks_that_share_cores() -> None:
    found = evaluate(ranks=4)
    assert found is not None
    assert found.title == "The training threads of ranks 0-3 wait for a core 40% of the time (2 cores on node7)"
    assert (found.action.setting, found.action.old, found.action.new) == ("cores per host", "2", "4")
    # Half of the samples in at least 60 % of the time.
    assert found.action.how.endswith("no more samples per second.")
    # A step of which 40 % is waiting takes at least 60 % without.
    assert found.ceiling == pytest.approx(1 / 0.6 - 1)
    assert (found.obtained, found.severity, found.confidence) == (Obtained.BOUNDED, Severity.HIGH, Confidence.MEDIUM)
    values = {evidence.what: evidence.value for evidence in found.evidence}
    assert values["cores' worth of CPU time that they use"] == pytest.approx(2.4)


def test_fewer_ranks_are_said_to_have_fewer_samples() -> None:
    found = evaluate(ranks=3, waited=0.41)
    assert found is not None
    assert found.action.how.endswith(f"at most {2 / 3 / 0.59:.2f}x as many samples per second.")


def test_loader_workers_that_take_the_cores() -> None:
    found = evaluate(cores=4, workers=3, busy=1.2)
    assert found is not None
    assert (found.action.setting, found.action.old, found.action.new) == ("DataLoader(num_workers=…)", "3", "1")


@pytest.mark.parametrize(
    ("batch_us", "setting"),
    [(30_000, "DataLoader(num_workers=…)"), (50_000, "cores per rank"), (None, "DataLoader(num_workers=…)")],
)
def test_fewer_workers_are_advised_where_they_keep_up(batch_us: float | None, setting: str) -> None:
    """Of 100 ms a rank waits 40 for a core; without workers it loads a batch itself, in so long."""
    rows = tuple(
        DataLoaderRow(rank=rank, wait_us=0, blocking_us=0, batch_us=batch_us, num_workers=2) for rank in range(2)
    )
    found = evaluate(workers=2, dataloader=rows)
    assert found is not None
    assert found.action.setting == setting


@pytest.mark.parametrize("ranks", [2, 4])
def test_other_processes_on_the_cores(ranks: int) -> None:
    found = evaluate(ranks=ranks, busy=0.2)
    assert found is not None
    assert found.action.setting == "other processes on the host"


@pytest.mark.parametrize(("others", "own"), [(0.1, True), (0.5, True), (0.7, False), (1.0, False)])
def test_whose_processes_take_the_cores_where_the_host_was_sampled(others: float, own: bool) -> None:
    """Two training threads wait for 0.3 of a core each, which 0.7 cores of the others would be enough for."""
    blank = dict.fromkeys(HostRow.__dataclass_fields__)
    known = {"host": "node7", "ranks": (0, 1), "samples": 10, "cores": 2, "cpu_share": 1.0, "job_cores": 2 - others}
    found = evaluate(waited=0.3, workers=1, host=HostRow(**{**blank, **known}))
    assert found is not None
    assert found.action.setting == ("DataLoader(num_workers=…)" if own else "other processes on the host")
    assert ("of which other processes use" in found.title) is not own
    values = {evidence.what: evidence.value for evidence in found.evidence}
    assert values["cores that other processes use"] == pytest.approx(others)


@pytest.mark.parametrize(("others", "setting"), [(0.0, "threads of the ranks"), (0.8, "other processes on the host")])
def test_threads_of_the_ranks_wait_for_one_another_where_nobody_else_runs(others: float, setting: str) -> None:
    """Of two cores the ranks use 1.2, without loader workers, and the others none, or the rest."""
    blank = dict.fromkeys(HostRow.__dataclass_fields__)
    known = {"host": "node7", "ranks": (0, 1), "samples": 10, "cores": 2, "job_cores": 1.2}
    found = evaluate(waited=0.3, host=HostRow(**{**blank, "cpu_share": (1.2 + others) / 2, **known}))
    assert found is not None
    assert found.action.setting == setting


def test_ranks_with_a_core_each_have_these_together() -> None:
    """Each may run on one of the two cores of the host."""
    found = evaluate(cores=1, own_cores=("0", "1"))
    assert found is not None
    assert found.title.endswith("(2 cores on node7)")


def test_with_devices_only_the_hosts_part_of_the_step_counts() -> None:
    assert evaluate(device="cuda") is None
    found = evaluate(device="cuda", rows={"idle_launch": 20_000})  # of 100,000
    assert found is not None
    assert found.ceiling == pytest.approx(1 / 0.8 - 1)


@pytest.mark.parametrize(
    "changes",
    [{"waited": None}, {"waited": 0.09}, {"steps": 0}, {"threads": 4}],  # the last is cpu-oversubscription's
)
def test_near_misses(changes: dict[str, Any]) -> None:
    assert evaluate(**changes) is None


def test_what_others_use_of_a_part_of_the_cores_is_not_known() -> None:
    """Each rank may run on one of the host's two cores."""
    blank = dict.fromkeys(HostRow.__dataclass_fields__)
    known = {"host": "node7", "ranks": (0, 1), "samples": 10, "cores": 2, "cpu_share": 1.0, "job_cores": 1.0}
    for usable, said in ((None, True), (2, True), (1, False)):
        found = evaluate(waited=0.3, workers=1, host=HostRow(**{**blank, **known, "cores_usable": usable}))
        assert found is not None
        assert ("of which other processes use" in found.title) is said
