"""What doctor reports of machines: this one, and others as their files and programs would show them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfscope.collectors.doctor import doctor
from perfscope.collectors.doctor import host as doctor_host
from perfscope.collectors.doctor import torch as doctor_torch
from perfscope.collectors.doctor.check import Level, Probe, Surroundings
from perfscope.collectors.doctor.doctor import examine
from tests.collectors.harness import needs_torch, write_files

PATH = os.environ["PATH"]


def surroundings(tmp_path: Path, **changes: Any) -> Surroundings:
    known: dict[str, Any] = {"python": sys.executable, "output": tmp_path, "environment": {"PATH": PATH}}
    return Surroundings(**{**known, **changes})


def one(checks: Iterator[Probe], name: str) -> Probe:
    found = {check.name: check for check in checks}
    assert name in found, sorted(found)
    return found[name]


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def room(monkeypatch: pytest.MonkeyPatch, **bytes_: int) -> None:
    usage = {"total": 1 << 40, "used": 0, "free": 1 << 40, **bytes_}
    monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(**usage))


@pytest.mark.training
@needs_torch
def test_recordings_work_here(tmp_path: Path) -> None:
    checks = list(examine(surroundings(tmp_path, environment=dict(os.environ))))
    assert [check for check in checks if check.state is Level.BROKEN] == []
    assert {"python", "collector", "torch", "profiler", "output"} <= {check.name for check in checks}
    assert "records operators" in one(iter(checks), "profiler").text


class TestPython:
    def test_too_old(self, tmp_path: Path) -> None:
        old = program(tmp_path, "python", "echo '[3, 8, 10]'")
        check = one(doctor.check_python(surroundings(tmp_path, python=str(old))), "python")
        assert check.state is Level.BROKEN
        assert "Python 3.8.10" in check.text

    def test_none(self, tmp_path: Path) -> None:
        check = one(doctor.check_python(surroundings(tmp_path, python="/nowhere/python")), "python")
        assert (check.state, check.remedy) == (
            Level.BROKEN, "name the interpreter of the training environment with --python",
        )  # fmt: skip

    def test_a_python_that_ignores_pythonpath(self, tmp_path: Path) -> None:
        isolated = program(tmp_path, "python", f'exec {sys.executable} -I "$@"')
        check = one(doctor.check_travel(surroundings(tmp_path, python=str(isolated))), "collector")
        assert check.state is Level.BROKEN
        assert "-I" in check.remedy

    def test_a_sitecustomize_of_the_users_own_is_named(self, tmp_path: Path) -> None:
        theirs = write_files(tmp_path, {"theirs/sitecustomize.py": ""}) / "theirs"
        environment = {"PATH": PATH, "PYTHONPATH": str(theirs)}
        check = one(doctor.check_travel(surroundings(tmp_path, environment=environment)), "collector")
        assert check.state is Level.OK
        assert f"{theirs / 'sitecustomize.py'} runs after it" in check.text


class TestTorch:
    def probes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **found: Any) -> dict[str, Probe]:
        known = {
            "version": "2.4.1", "devices": [], "backends": ["gloo"], "kineto": True, "cpu_events": 9, "kernels": 0,
            "error": "",
        }  # fmt: skip
        monkeypatch.setattr(doctor_torch, "ask", lambda *_: {**known, **found})
        return {check.name: check for check in doctor_torch.check_torch(surroundings(tmp_path))}

    def test_on_devices_kernels_are_looked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checks = self.probes(tmp_path, monkeypatch, devices=["H100", "H100"], kernels=3)
        assert checks["torch"].text == "torch 2.4.1, 2 × H100, gloo"
        assert checks["device tracing"].state is Level.OK
        missing = self.probes(tmp_path, monkeypatch, devices=["H100"])["device tracing"]
        assert missing.state is Level.BROKEN
        assert "CUPTI" in missing.remedy

    @pytest.mark.parametrize(
        ("found", "name", "text"),
        [
            (
                {"version": "", "error": "ModuleNotFoundError: torch"},
                "torch",
                "cannot be imported (ModuleNotFoundError",
            ),
            ({"version": "2.0.1+cu118"}, "torch", "torch 2.0.1"),
            ({"kineto": False, "cpu_events": 0}, "profiler", "built without Kineto"),
            ({"error": "RuntimeError: no"}, "profiler", "RuntimeError: no"),
        ],
    )
    def test_what_does_not_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], name: str, text: str
    ) -> None:
        check = self.probes(tmp_path, monkeypatch, **found)[name]
        assert check.state is Level.BROKEN
        assert text in check.text
        assert check.remedy

    def test_an_import_that_ends_the_process(self, tmp_path: Path) -> None:
        broken = program(tmp_path, "python", "kill -9 $$")
        check = one(doctor_torch.check_torch(surroundings(tmp_path, python=str(broken))), "torch")
        assert check.state is Level.BROKEN


class TestOutput:
    def test_a_shared_file_system_and_a_local_one(self, tmp_path: Path) -> None:
        mounts = f"disk / ext4 rw 0 0\nserver:/x {tmp_path}/shared lustre rw 0 0\n"
        root = write_files(tmp_path / "root", {"proc/mounts": mounts})
        (tmp_path / "shared").mkdir()
        shared = one(
            doctor_host.check_output(surroundings(tmp_path, root=root, output=tmp_path / "shared" / "not" / "yet")),
            "output",
        )
        assert (shared.state, shared.remedy) == (Level.OK, "")
        assert "lustre: other nodes may see it" in shared.text
        local = one(doctor_host.check_output(surroundings(tmp_path, root=root)), "output")
        assert "ext4: only this node sees it" in local.text
        assert "perfscope gather" in local.remedy

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(**_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(doctor_host.tempfile, "NamedTemporaryFile", refuse)
        check = one(doctor_host.check_output(surroundings(tmp_path)), "output")
        assert check.state is Level.BROKEN
        assert "Permission denied" in check.text

    def test_little_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        room(monkeypatch, free=10 << 20)
        check = one(doctor_host.check_output(surroundings(tmp_path)), "output")
        assert (check.state, check.remedy) == (Level.NOTE, "a recording may not fit; free some space")


class TestMachine:
    def test_dockers_shared_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "dev" / "shm").mkdir(parents=True)
        room(monkeypatch, total=64 << 20)
        check = one(doctor_host.check_shared_memory(surroundings(tmp_path, root=tmp_path)), "shared memory")
        assert check.state is Level.NOTE
        assert "64.0 MiB" in check.text
        assert "--ipc=host" in check.remedy

    def test_a_quota_below_the_cores(self, tmp_path: Path) -> None:
        files = {
            "proc/meminfo": "MemTotal: 8 kB\n", "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.stat": "throttled_usec 0", "sys/fs/cgroup/cpu.max": "50000 100000",
        }  # fmt: skip
        check = one(doctor_host.check_cores(surroundings(tmp_path, root=write_files(tmp_path, files))), "cores")
        assert check.state is Level.NOTE
        assert "a CPU quota allows the time of 0.5" in check.text

    def test_counters_that_a_kernel_does_not_have(self, tmp_path: Path) -> None:
        root = write_files(tmp_path, {"proc/stat": "cpu  1 1 1 1 1 1 1 1 0 0\nprocs_running 2\n"})
        check = one(doctor_host.check_sampler(surroundings(tmp_path, root=root)), "host counters")
        assert "cpu_pressure_us" in check.text
        assert "user_ms" not in check.text

    @pytest.mark.parametrize(
        ("script", "state", "text"),
        [
            ("echo 8", Level.OK, "NVML reports those of 8 devices"),
            ('case "$2" in *Init*) exit 1;; *) echo true;; esac', Level.NOTE, "NVML does not answer"),
            ("exit 1", Level.NOTE, "nvidia-ml-py is missing"),
        ],
    )
    def test_device_counters(self, tmp_path: Path, script: str, state: Level, text: str) -> None:
        root = write_files(tmp_path, {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"})
        python = program(tmp_path, "python", script)
        checks = list(doctor_host.check_devices(surroundings(tmp_path, root=root, python=str(python))))
        assert (checks[0].name, checks[0].state) == ("GPU counters", state)
        assert text in checks[0].text
        assert "NVreg_RestrictProfilingToAdminUsers=0" in one(iter(checks), "GPU profiling").remedy

    def test_nothing_is_reported_of_devices_where_there_are_none(self, tmp_path: Path) -> None:
        assert list(doctor_host.check_devices(surroundings(tmp_path, root=tmp_path))) == []

    def test_nsight_systems(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        absent = one(doctor_host.check_tools(surroundings(tmp_path, environment={"PATH": str(tmp_path)})), "nsys")
        assert absent.text == "not found: needed only for perfscope run --with nsys"
        program(tmp_path, "nsys", "echo NVIDIA Nsight Systems version 2024.1")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        root = write_files(tmp_path, {"proc/sys/kernel/perf_event_paranoid": "4\n"})
        there = list(doctor_host.check_tools(surroundings(tmp_path, root=root, environment={"PATH": str(tmp_path)})))
        assert one(iter(there), "nsys").state is Level.OK
        assert "perf_event_paranoid is 4" in one(iter(there), "perf events").text

    def test_a_profiler_that_is_in_the_way(self, tmp_path: Path) -> None:
        found = doctor_host.check_other_profilers(
            surroundings(tmp_path, environment={"CUDA_INJECTION64_PATH": "/x.so"})
        )
        assert "CUDA_INJECTION64_PATH is set" in one(found, "other profilers").text


def test_a_check_that_fails_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> Iterator[Probe]:
        raise RuntimeError("unforeseen")
        yield

    broken.__name__ = "check_cores"
    monkeypatch.setattr(doctor_host, "check_cores", broken)
    monkeypatch.setattr(doctor_torch, "check_torch", lambda _: iter(()))
    checks = list(examine(surroundings(tmp_path)))
    assert one(iter(checks), "cores").text == "could not be examined (RuntimeError: unforeseen)"
    assert checks[-1].name == "nvtx"
