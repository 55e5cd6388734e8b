"""The rule on CPU threads: what it fires on, and what looks like it and is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from perfscope.analyzers.rules import RULES
from perfscope.analyzers.rules.host import cpu_oversubscription
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.results.findings import Confidence, Finding, Obtained, Predict, Prediction, Severity
from perfscope.results.system import HostRow, ProcessRow, System
from tests.analyzers.rules.jobs import breakdown, context


def host(**changes: Any) -> HostRow:
    """Two ranks on a host of 8 cores, all busy with the job; a queue of 16 threads."""
    known: dict[str, Any] = {
        "host": "node7", "ranks": (0, 1), "samples": 10, "cores": 8, "cores_physical": 8, "cores_usable": 8.0,
        "cpu_share": 1.0, "runnable": 16.0, "job_cores": 8.0,
    }  # fmt: skip
    blank = dict.fromkeys(HostRow.__dataclass_fields__)
    return HostRow(**{**blank, **known, **changes})


def process(rank: int, **more: Any) -> ProcessRow:
    known: dict[str, Any] = {"cores": 4.0, "threads": 10.0, "waited_share": 0.3, "workers": 0, "worker_cores": None}
    return ProcessRow(**{"rank": rank, "host": "node7", "worker_cores_max": None, **known, **more})


def evaluate(
    machine: HostRow | None, *, threads: int | None = 8, device: str = "cpu", variable: str = "8",
    processes: tuple[ProcessRow, ...] = (process(0), process(1)), rows: dict[str, float] | None = None,
    steps: int = 8, settings: dict[str, Any] | None = None, predicted_ms: float | None = None,
) -> Finding | None:  # fmt: skip
    runs = {
        rank: RunMetadata(
            rank=rank,
            cpu_threads=threads,
            device=DeviceMetadata(type=device),
            environment={"OMP_NUM_THREADS": variable},
            settings=settings or {},
        )
        for rank in (0, 1)
    }
    machines = System(hosts=(machine,), devices=(), processes=processes, window_us=(0.0, 1.0)) if machine else None
    breakdowns = (breakdown(rank, **(rows or {})) for rank in (0, 1))
    return cpu_oversubscription.evaluate(
        context(*breakdowns, steps=tuple(range(steps)), runs=runs, system=machines, predict=_predictor(predicted_ms))
    )


def _predictor(step_ms: float | None) -> Predict | None:
    """Predicts a step of so many ms with fewer threads; None: it cannot be replayed."""
    if step_ms is None:
        return None

    def predict(settings: Mapping[str, str]) -> Prediction | None:
        answer = Prediction(low=0.9 * step_ms * 1e3, mid=step_ms * 1e3, high=1.1 * step_ms * 1e3)
        return answer if settings == {"env.OMP_NUM_THREADS": "4"} else None

    return predict


def test_it_is_asked() -> None:
    assert cpu_oversubscription.evaluate in RULES


def test_threads_that_crowd_the_cores() -> None:
    found = evaluate(host())
    assert found is not None
    assert found.title == "16 CPU threads of 2 ranks compete for 8 cores on node7"
    assert (found.action.setting, found.action.old, found.action.new) == ("OMP_NUM_THREADS", "8", "4")
    assert "export OMP_NUM_THREADS=4" in found.action.how
    assert "torch.set_num_threads(4)" in found.action.how
    # 16 threads run at half speed: without the queue the step takes at least half of its time.
    assert found.ceiling == pytest.approx(1.0)
    assert (found.obtained, found.severity, found.confidence) == (Obtained.BOUNDED, Severity.HIGH, Confidence.MEDIUM)
    values = {evidence.what: evidence.value for evidence in found.evidence}
    assert values == {
        "CPU threads per rank": 8, "ranks on the host": 2, "cores that they may use": 8,
        "threads running or waiting for a core": 16, "share of the host's CPU time in use": 1.0,
        "time the main thread waited for a core (worst rank)": 0.3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {"threads": 4}),  # as many threads as cores
        ({}, {"threads": None}),  # not recorded
        ({}, {"steps": 0}),
        ({"cpu_share": 0.5, "job_cores": 4.0}, {}),  # cores are free
        ({"runnable": 9.0}, {}),  # no queue to speak of
        ({"runnable": None}, {}),
        ({"job_cores": 2.0}, {}),  # the queue is others'
        ({"cores_usable": None}, {}),
    ],
)
def test_near_misses(changes: dict[str, Any], more: dict[str, Any]) -> None:
    assert evaluate(host(**changes), **more) is None


def test_nothing_was_sampled() -> None:
    assert evaluate(None) is None


def test_with_devices_only_the_hosts_part_of_the_step_counts() -> None:
    found = evaluate(host(), device="cuda", rows={"idle_launch": 20_000, "idle_dataloader": 10_000})
    assert found is not None
    # Half of 30 ms can be won.
    assert found.ceiling == pytest.approx(100 / 85 - 1)
    assert evaluate(host(), device="cuda", rows={"idle_launch": 9_000}) is None


def test_what_others_queue_for_stays() -> None:
    """Half of the busy cores are the job's, and so half of 24 threads: 12 others and its 8 that fit stay."""
    found = evaluate(host(runnable=24.0, job_cores=4.0))
    assert found is not None
    assert found.ceiling == pytest.approx(24 / 20 - 1)


def test_a_quota_counts_as_well_as_a_queue() -> None:
    quota = host(cores_usable=4.0, cpu_share=0.5, runnable=4.0, job_cores=4.0, throttled_share=0.4)
    found = evaluate(quota)
    assert found is not None
    assert found.action.new == "2"
    assert found.ceiling == pytest.approx(100 / 60 - 1)
    assert "time throttled by a CPU quota" in [evidence.what for evidence in found.evidence]


def test_loader_workers_and_hyper_threads_leave_fewer_cores() -> None:
    processes = (process(0, workers=2, worker_cores=0.5), process(1, workers=2, worker_cores=0.5))
    found = evaluate(host(), processes=processes)
    assert found is not None
    assert found.action.new == "3"  # 8 cores less 2 that load, for 2 ranks
    found = evaluate(host(cores_physical=4))
    assert found is not None
    assert found.action.new == "2"


def test_accelerate_launch_has_an_argument_for_it() -> None:
    found = evaluate(host(), settings={"accelerate": {"mixed_precision": "no"}})
    assert found is not None
    assert (found.action.setting, found.action.new) == ("--num_cpu_threads_per_process", "4")
    assert "--num_cpu_threads_per_process 4" in found.action.how.splitlines()


def test_a_script_that_does_not_follow_the_variable() -> None:
    found = evaluate(host(), variable="4")
    assert found is not None
    assert (found.action.setting, found.action.old, found.action.new) == ("torch.set_num_threads", "8", "4")


def test_few_samples_make_it_a_hint() -> None:
    found = evaluate(host(samples=2))
    assert found is not None
    assert found.confidence is Confidence.LOW


def test_what_is_replayed_is_asked_for() -> None:
    found = evaluate(host(), predicted_ms=60.0)
    assert found is not None
    assert found.whatif == {"env.OMP_NUM_THREADS": "4"}
    unplayed = evaluate(host())
    assert unplayed is not None
    assert unplayed.whatif == {}


def test_a_queue_that_little_of_the_step_waits_for() -> None:
    assert evaluate(host(), predicted_ms=107.0) is None


def test_a_range_that_holds_the_gain_and_none_is_a_bound_and_a_doubt() -> None:
    found = evaluate(host(), predicted_ms=97.0)
    assert found is not None
    assert (found.whatif, found.obtained, found.confidence) == ({}, Obtained.BOUNDED, Confidence.LOW)
