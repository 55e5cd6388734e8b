"""Hand-made traces of DDP over gloo on devices: collectives are ranges of gloo's threads, with copies inside, and the
training thread waits for them in no call. What a slow rank costs, against the same steps without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.readers.chrome import read
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised, measured

RANKS, STEPS = 2, 6
MAIN, GLOO, STREAM, COPIES = 1, 50, 7, 20
FORWARD, BACKWARD, REDUCE, OPTIMIZER = 3_000.0, 6_000.0, 4_000.0, 1_000.0
"""µs; the all-reduce is of one bucket, issued as the backward ends."""
HEALTHY = FORWARD + BACKWARD + REDUCE + OPTIMIZER


class Rank:
    """The trace of one rank, written as time passes on its host. Its device is done as soon as its host."""

    def __init__(self, rank: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.rank, self.now, self.number = rank, 0.0, 0

    def compute(self, name: str, length: float) -> None:
        """An operator after another of 100 µs, each with a kernel of 80."""
        until = self.now + length
        while self.now < until - 1:
            self.number += 1
            self._add("cpu_op", name, self.now, self.now + 95, MAIN)
            call, kernel = {"correlation": self.number}, {"correlation": self.number, "stream": STREAM, "device": 0}
            self._add("cuda_runtime", "cudaLaunchKernel", self.now + 5, self.now + 10, MAIN, **call)
            self._add("kernel", "sm90_gemm", self.now + 15, self.now + 95, STREAM, **kernel)
            self.now += 100

    def issue(self) -> float:
        """torch's operator hands the bucket to gloo's thread; when that begins."""
        self._add("cpu_op", "c10d::allreduce_", self.now, self.now + 20, MAIN)
        self.now += 20
        return self.now + 10

    def reduce(self, begin: float, end: float) -> None:
        """The exchange, between two copies by gloo's thread; the training thread goes on 5 µs after it."""
        shape = {"Input Dims": [[1_000_000]], "Input type": ["float"]}
        self._add("user_annotation", "gloo:all_reduce", begin, end, GLOO, **shape)
        for name, at in (("DtoH (Device -> Pinned)", begin + 5), ("HtoD (Pinned -> Device)", end - 300)):
            self.number += 1
            copy = {"correlation": self.number, "stream": COPIES, "device": 0, "bytes": 4_000_000}
            self._add("cuda_runtime", "cudaMemcpyAsync", at, at + 5, GLOO, correlation=self.number)
            self._add("gpu_memcpy", f"Memcpy {name}", at + 10, at + 200, COPIES, **copy)
        self.now = end + 5

    def step(self, number: int, begin: float) -> None:
        """The profiler's marker."""
        self._add("user_annotation", f"ProfilerStep#{number}", begin, self.now, MAIN)

    def _add(self, category: str, name: str, begin: float, end: float, thread: int, **args: Any) -> None:
        process = 0 if category in ("kernel", "gpu_memcpy") else 1000 + self.rank
        event = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": begin}
        self.events.append({**event, "dur": end - begin, "args": args})

    def write(self, path: Path) -> None:
        """With what torch says about the job."""
        about = {"backend": "gloo", "rank": self.rank, "world_size": RANKS, "pg_count": 1}
        groups = [{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:gloo", "ranks": list(range(RANKS))}]
        devices = [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}]
        trace = {"deviceProperties": devices, "distributedInfo": {**about, "pg_config": groups}}
        path.write_text(json.dumps({**trace, "traceEvents": self.events}))


def job(folder: Path, pause: float) -> Path:
    """Rank 1 pauses so long before each forward."""
    folder.mkdir()
    ranks = [Rank(rank) for rank in range(RANKS)]
    for number in range(STEPS):
        begins = [rank.now for rank in ranks]
        ranks[1].now += pause
        for rank in ranks:
            rank.compute("aten::linear", FORWARD)
            rank.compute("aten::mm", BACKWARD)
        issued = [rank.issue() for rank in ranks]
        for rank, begin in zip(ranks, issued, strict=True):
            rank.reduce(begin, max(issued) + REDUCE)
            rank.compute("aten::_foreach_add_", OPTIMIZER)
        for rank, begin in zip(ranks, begins, strict=True):
            rank.step(number, begin)
    for rank in ranks:
        rank.write(folder / f"rank{rank.rank}.json")
    return folder


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job(tmp_path_factory.mktemp("slow") / "traces", pause=5_000.0)


@pytest.fixture(scope="module")
def summary(slow: Path) -> Summary:
    return advised(slow)


def test_the_slow_rank_is_named_with_what_it_costs(summary: Summary) -> None:
    (row,) = summary.stragglers
    assert (row.rank, row.cause) == (1, "host")
    assert row.lost_us == pytest.approx(5_000, rel=0.02)


def test_the_exchange_is_communication_and_its_copies_are_a_part_of_it(summary: Summary) -> None:
    waiting, late = summary.time_breakdown
    assert waiting.exposed_comm_wait_us == pytest.approx(5_000, rel=0.02)
    for row in (waiting, late):
        assert row.exposed_comm_transfer_us == pytest.approx(REDUCE, rel=0.02)
        assert row.exposed_copy_us == row.idle_sync_us == 0
    (reduced,) = summary.collectives
    assert (reduced.kind, reduced.bytes, reduced.count) == ("all_reduce", 4_000_000, STEPS)


def test_without_the_pause_the_step_is_that_of_the_healthy_job(slow: Path, tmp_path: Path) -> None:
    healthy = measured(job(tmp_path / "healthy", pause=0.0))
    assert not healthy.stragglers
    answer = predict(context_of(slow), {"rank.1": "peers"})
    assert answer.predicted_us.mid == pytest.approx(healthy.job.step_time_us, rel=0.02)


def test_no_change_of_the_script_frees_the_host_from_these_waits(slow: Path) -> None:
    context = context_of(slow)
    assert predict(context, {"host.sync": "0"}).predicted_us.mid == pytest.approx(HEALTHY + 5_000, rel=0.02)


def test_another_backend_is_advised_and_not_to_look_at_nccl(summary: Summary) -> None:
    found = {finding.rule: finding for finding in summary.findings}
    assert found["nccl-backend"].action.new == '"nccl"'
    assert found["nccl-backend"].ceiling == pytest.approx(1 / (1 - REDUCE / (HEALTHY + 5_000)) - 1, rel=0.05)
    assert "nccl-environment" not in found
    assert "host-syncs" not in found


def test_the_host_waits_until_the_exchange_ends(slow: Path) -> None:
    waits = analyze_rank(read(slow / "rank0.json")).progress.host
    assert waits is not None
    length = waits.waits.returned_ns - waits.waits.entered_ns
    assert len(length) == STEPS
    assert length.tolist() == pytest.approx([(REDUCE + 5_000) * 1e3] * STEPS, rel=0.02)


def test_a_thread_that_begins_before_its_operator_returns_is_launched_before_it_begins(tmp_path: Path) -> None:
    """The operators take 50 µs longer to return than gloo's thread takes to begin."""
    folder = job(tmp_path / "early", pause=5_000.0)
    for path in folder.iterdir():
        trace = json.loads(path.read_text())
        for event in trace["traceEvents"]:
            event["dur"] += 60 * (event["name"] == "c10d::allreduce_")
        path.write_text(json.dumps(trace))
    partial = analyze_rank(read(folder / "rank0.json"))
    assert partial.progress.host is not None
    assert (partial.progress.host.called_ns <= partial.collectives.start_ns).all()
    (row,) = measured(folder).stragglers
    assert (row.rank, row.lost_us) == (1, pytest.approx(5_000, rel=0.02))
