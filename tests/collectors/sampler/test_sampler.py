"""The system sampler as a process: one a host, at the right moments, gone with its rank, and in nobody's way."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfscope.collectors.claims import claim_rank
from perfscope.collectors.launch.folder import package_root
from perfscope.collectors.sampler import process as sampler_process
from perfscope.collectors.sampler import sampler as sampler_module
from perfscope.collectors.sampler.process import Clock, LocalRanks
from perfscope.collectors.sampler.sampler import HostSampler, SamplerOptions, _environment
from perfscope.recording.paths import BOOTSTRAP_FOLDER, samples_file, trace_file
from perfscope.recording.samples import HOST_COLUMNS, LOADER, RANK, SCHEMA
from tests.collectors.harness import SCRIPTS, SHORT, Running, needs_torch, train
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")

SLOW_S = 60.0
"""A period that does not end during a test: whatever is sampled was asked for."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    return tmp_path


def options(folder: Path, period_s: float, **changes: Any) -> SamplerOptions:
    known = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "parent": os.getpid()}
    return SamplerOptions(folder=str(folder), period_s=period_s, **{**known, **changes})


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., HostSampler | None]]:
    started: list[HostSampler] = []

    def start(period_s: float = SLOW_S, restarts: int = 0) -> HostSampler | None:
        sampler = HostSampler.start(options(folder, period_s), restarts, package_root())
        started.extend([sampler] if sampler else [])
        return sampler

    yield start
    for sampler in started:
        sampler.stop()


def lines(folder: Path) -> list[Any]:
    """Those that are whole: another may be being written."""
    path = samples_file(folder, socket.gethostname())
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines() if line]


def samples(folder: Path) -> list[list[Any]]:
    return [line for line in lines(folder) if isinstance(line, list)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class TestProcess:
    def test_it_writes_a_header_the_rank_and_samples_in_the_traces_clock(self, folder: Path, start: Any) -> None:
        claim_rank(folder, 0, 0, recorded=False)
        begun = time.time_ns()
        sampler = start(0.05)
        until(lambda: len(samples(folder)) >= 4, "there are four samples")
        sampler.stop()
        ended = time.time_ns()
        header, rank, *_ = lines(folder)
        assert (header["schema"], header["host"], header["period_s"]) == (SCHEMA, socket.gethostname(), 0.05)
        assert header["host_columns"] == list(HOST_COLUMNS)
        assert rank == {"process": os.getpid(), "rank": 0, "kind": RANK, "cores": rank["cores"]}
        times = [sample[0] for sample in samples(folder)]
        assert times == sorted(times)
        assert begun < times[0] < times[-1] < ended
        assert all(sample[3][0][0] == os.getpid() for sample in samples(folder))

    def test_one_process_samples_a_host_until_the_job_restarts(self, folder: Path, start: Any) -> None:
        assert start() is not None
        code = (
            "import os; from perfscope.collectors.sampler.sampler import *; "
            f"o = SamplerOptions.from_json({options(folder, SLOW_S).to_json()!r}); "
            "print(HostSampler.start(o, {}, {!r}))"
        )

        def elsewhere(restarts: int) -> str:
            script = code.replace("{}", str(restarts), 1).replace("{!r}", repr(package_root()), 1)
            return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

        assert elsewhere(0) == "None\n"
        assert "HostSampler" in elsewhere(1)

    def test_it_samples_when_asked_and_once_more_at_the_end(
        self, folder: Path, start: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampler_module, "_END_S", PATIENCE_S)  # the end of a training waits for a second only
        sampler = start()
        until(lambda: len(samples(folder)) == 1, "there is a sample")
        sampler.look()
        until(lambda: len(samples(folder)) == 2, "there is another")
        sampler.stop()
        assert len(samples(folder)) == 3
        sampler.stop()

    def test_it_keeps_nothing_of_its_parent_open(self, folder: Path, start: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            os.set_inheritable(server.fileno(), True)
            sampler = start()
            until(lambda: samples(folder), "there is a sample")
            opened = [str(path.readlink()) for path in Path(f"/proc/{sampler._pid}/fd").iterdir()]
        assert sorted(name.partition(":")[0] for name in opened) == sorted(
            ["pipe", os.devnull, os.devnull, str(samples_file(folder, socket.gethostname()))]
        )

    def test_it_dies_with_its_parent_even_when_a_worker_lives_on(self, folder: Path) -> None:
        code = (
            "import os, time; from perfscope.collectors.sampler.sampler import *; import dataclasses; "
            f"o = SamplerOptions.from_json({options(folder, SLOW_S).to_json()!r}); "
            "o = dataclasses.replace(o, parent=os.getpid()); "
            f"s = HostSampler.start(o, 0, {package_root()!r}); "
            "child = os.fork() or time.sleep(600); print(s._pid, child, flush=True); time.sleep(600)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
            assert rank.stdout is not None
            sampler, worker = map(int, rank.stdout.readline().split())
            until(lambda: samples(folder), "there is a sample")
            assert runs(sampler)
            rank.kill()
            until(lambda: not runs(sampler), "the sampler has ended")
            assert runs(worker)
            os.kill(worker, signal.SIGKILL)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
    def test_it_ends_when_the_disk_is_full(self, folder: Path, start: Any) -> None:
        samples_file(folder, socket.gethostname()).symlink_to("/dev/full")
        sampler = start(0.05)
        until(lambda: not runs(sampler._pid), "the sampler has ended")
        sampler.look()
        sampler.stop()

    def test_a_script_that_closes_our_pipe_gets_nothing_written_into_its_files(self, folder: Path, start: Any) -> None:
        sampler = start()
        until(lambda: samples(folder), "there is a sample")
        os.close(sampler._pipe)
        with (folder / "checkpoint").open("wb") as file:
            assert os.dup2(file.fileno(), sampler._pipe) == sampler._pipe
            sampler.look()
            sampler.stop()
            os.close(sampler._pipe) if sampler._pipe >= 0 else None
        assert (folder / "checkpoint").read_bytes() == b""
        until(lambda: not runs(sampler._pid), "the sampler has ended")


def test_the_samplers_environment_is_not_a_ranks() -> None:
    environment = {
        "PYTHONPATH": os.pathsep.join(("/rec/.bootstrap", "/mine")),
        "LD_PRELOAD": "libprofiler.so",
        "CUDA_INJECTION64_PATH": "/x",
        "HOME": "/home/me",
    }
    assert _environment(environment, Path("/rec")) == {"PYTHONPATH": "/mine", "HOME": "/home/me"}


class TestClock:
    def test_samples_become_rarer_until_the_parent_asks_for_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sampler_process, "FULL_RATE", 3)
        theirs, ours = os.pipe()
        clock = Clock(0.001, os.getppid(), theirs)
        assert [(clock.wait(), clock._period)[1] for _ in range(7)] == [0.001] * 2 + [0.002] * 3 + [0.004] * 2
        os.write(ours, b"l")
        assert clock.wait()
        assert clock._period == 0.001
        os.close(ours)
        assert not clock.wait()
        os.close(theirs)

    def test_a_sampler_that_is_always_late_heeds_its_parent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whenever it looks at the clock, an hour has passed."""
        hours = itertools.count(step=3600)
        monkeypatch.setattr(sampler_process, "time", SimpleNamespace(monotonic=lambda: float(next(hours))))
        monkeypatch.setattr(sampler_process, "FULL_RATE", 1)
        theirs, ours = os.pipe()
        clock = Clock(1.0, os.getppid(), theirs)
        assert (clock.wait(), clock._period) == (True, 2.0)
        os.write(ours, b"l")
        assert (clock.wait(), clock._period) == (True, 1.0)
        os.write(ours, b"q")
        assert not clock.wait()
        os.close(ours)
        os.close(theirs)

    def test_another_parent_means_that_ours_has_gone(self) -> None:
        assert not Clock(SLOW_S, parent=1 if os.getppid() != 1 else 2).wait()


class TestLocalRanks:
    def claims(self, folder: Path, hosts: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
        for rank, host in hosts.items():
            (folder / BOOTSTRAP_FOLDER / f"claim-{rank:05d}.json").write_text(
                json.dumps({"host": host, "pid": 1000 + rank, "started": "", "attempt": 0})
            )
        monkeypatch.setattr("perfscope.collectors.claims.Claim.alive", lambda _: True)
        monkeypatch.setattr(socket, "gethostname", lambda: "here")

    def local(self, folder: Path, **place: int) -> LocalRanks:
        return LocalRanks(options(folder, 1.0, **place))

    def test_neighbours_are_found_as_they_come(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.claims(folder, {4: "here", 6: "here"}, monkeypatch)
        ranks = self.local(folder, rank=4, local_rank=0, world_size=8, local_world_size=4)
        assert ranks.newly_found() == [(4, 1004), (6, 1006)]
        self.claims(folder, {5: "here", 7: "here"}, monkeypatch)
        assert ranks.newly_found() == [(5, 1005), (7, 1007)]
        assert ranks.newly_found() == []

    def test_ranks_dealt_out_in_turn_are_found_too(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.claims(folder, {rank: "here" if rank % 2 else "there" for rank in range(8)}, monkeypatch)
        ranks = self.local(folder, rank=1, local_rank=0, world_size=8, local_world_size=4)
        assert sorted(ranks.newly_found()) == [(rank, 1000 + rank) for rank in (1, 3, 5, 7)]

    def test_ranks_that_never_come_are_not_waited_for(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = self.local(folder, rank=0, local_rank=0, world_size=2, local_world_size=2)
        self.claims(folder, {0: "here", 1: "here"}, monkeypatch)
        monkeypatch.setattr(sampler_process.time, "monotonic", lambda: 1e9)
        assert ranks.newly_found() == []


@pytest.mark.training
@needs_torch
class TestRecording:
    def test_the_ranks_of_a_host_leave_one_file(self, tmp_path: Path) -> None:
        folder = tmp_path / "recording"
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        script = (str(SCRIPTS / "paced.py"), "--until", str(Running.stop_file(folder)))
        with Running(folder, *command, *script, options=(*SHORT, "--sample-every", "0.05")) as training:
            # A job that ends at once does not wait for the sampler to begin.
            training.until(lambda: samples(folder) and len(samples(folder)[-1][3]) == 2, "both ranks are sampled")
            training.until_written(*(trace_file(folder, rank, 0).name for rank in (0, 1)))
            recording = training.stop()
        assert recording.exit_code == 0, recording.err
        assert recording.run().problems == recording.run(1).problems == ()
        processes = [line for line in lines(recording.folder) if isinstance(line, dict) and "process" in line]
        assert sorted((line["rank"], line["kind"]) for line in processes if line["kind"] == RANK) == [
            (0, RANK),
            (1, RANK),
        ]
        pids = {line["process"] for line in processes}
        assert {recording.run(rank).pid for rank in (0, 1)} <= pids
        assert not any(runs(pid) for pid in pids)
        assert recording.launch.options["sample_every"] == 0.05
        assert recording.run().cpu_threads == 1

    def test_loader_workers_are_distinguished(self, tmp_path: Path) -> None:
        folder = tmp_path / "recording"

        def used() -> dict[int, float]:
            """CPU time of each process between its first and its last sample, ms."""
            times: dict[int, list[float]] = {}
            for sample in samples(folder):
                for pid, cpu_ms, *_ in sample[3]:
                    times.setdefault(pid, []).append(cpu_ms)
            return {pid: max(cpu) - min(cpu) for pid, cpu in times.items()}

        command = (sys.executable, str(SCRIPTS / "loading.py"), str(Running.stop_file(folder)))
        options = ("--wait", "2", "--warmup", "1", "--active", "20", "--sample-every", "0.05")
        with Running(folder, *command, options=options) as training:
            # The workers do nothing but compute: each batch costs one of them 40 ms.
            training.until(lambda: sum(ms >= 100 for ms in used().values()) >= 3, "all three are seen to compute")
            recording = training.stop()
        assert recording.exit_code == 0, recording.err
        processes = [line for line in lines(folder) if isinstance(line, dict) and "process" in line]
        assert [line["kind"] for line in processes].count(LOADER) == 2
        (rank,) = [line["process"] for line in processes if line["kind"] == RANK]
        assert all(ms >= 100 for pid, ms in used().items() if pid != rank)

    def test_it_can_be_left_out(self, tmp_path: Path) -> None:
        recording = train(tmp_path / "recording", options=(*SHORT, "--no-sampler"))
        assert recording.exit_code == 0
        assert lines(recording.folder) == []
        assert recording.launch.options["sample_every"] == 0
