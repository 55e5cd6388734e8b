"""Hosts, devices and processes from a sampler's file: every figure can be worked out by hand from what is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.job.system.notes import system_notes
from perfscope.analyzers.job.system.samples import read_samples
from perfscope.analyzers.job.system.table import listed_cores, system, trains_on
from perfscope.recording.job import Job
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.recording.paths import samples_file
from perfscope.recording.samples import (
    DEVICE_COLUMNS,
    HOST_COLUMNS,
    LOADER,
    PROCESS_COLUMNS,
    RANK,
    SCHEMA,
    SampledDevice,
)
from perfscope.results.system import System

SECOND = 10**9
T0 = 1_700_000_000 * SECOND
"""Start of the used steps, which last 4 s."""

DEVICE = {
    "index": 0, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-aa", "memory_bytes": 80 << 30, "power_limit_mw": 700_000,
    "sm_mhz_max": 1980, "pcie_width": 16, "pcie_width_max": 16,
}  # fmt: skip


def row(columns: dict[str, bool], **values: float) -> list[float | None]:
    assert set(values) <= set(columns)
    return [values.get(name) for name in columns]


def header(host: str = "node7", devices: tuple[dict[str, Any], ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "host": host, "period_s": 0.5, "cores": 8, "cores_physical": 4, "cores_quota": None,
        "memory_bytes": 64 << 30, "devices": list(devices), "host_columns": list(HOST_COLUMNS),
        "device_columns": list(DEVICE_COLUMNS), "process_columns": list(PROCESS_COLUMNS), **more,
    }  # fmt: skip


def cpu(at_s: float, busy: float, **values: float) -> list[float | None]:
    """The host's counters after ``at_s`` seconds in which ``busy`` of 8 cores were busy."""
    user, idle = round(1000 * busy * at_s), round(1000 * (8 - busy) * at_s)
    return row(HOST_COLUMNS, user_ms=user, system_ms=0, idle_ms=idle, iowait_ms=0, steal_ms=0, **values)


def sample(at_s: float, host: list[Any], devices: Sequence[Any] = (), processes: Sequence[Any] = ()) -> list[Any]:
    return [T0 + round(at_s * SECOND), host, devices, processes]


def write(folder: Path, *lines: Any, host: str = "node7") -> Path:
    path = samples_file(folder, host)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def analyzed(folder: Path, runs: dict[int, RunMetadata], offsets: dict[int, int] | None = None) -> System | None:
    """The system of ranks whose used steps are the 4 s after T0 on their hosts' clocks."""
    paths = tuple(sorted(folder.glob("host-*.jsonl")))
    offset = offsets or {}
    window = (np.array([T0, T0 + 2 * SECOND]), np.array([T0 + 2 * SECOND, T0 + 4 * SECOND]))
    result: Any = SimpleNamespace(
        windows={rank: (window[0] - offset.get(rank, 0), window[1] - offset.get(rank, 0)) for rank in runs},
        clocks=SimpleNamespace(offset_of=lambda rank: offset.get(rank, 0)),
    )
    return system(Job(folder, (), runs, samples=paths), result, runs)


def run(rank: int, host: str = "node7", **more: Any) -> RunMetadata:
    return RunMetadata(rank=rank, host=host, **more)


def seen(folder: Path, *lines: Any) -> System:
    write(folder, header(), *lines)
    found = analyzed(folder, {0: run(0)})
    assert found is not None
    return found


class TestHost:
    def test_counters_are_rates_over_the_used_steps_alone(self, tmp_path: Path) -> None:
        # 2 of 8 cores busy before and after; in the 4 s of the steps 6 of them. Counters: 1 MB each second, then 3.
        def after(at_s: float) -> list[Any]:
            busy = 2 * 10 + 4 * min(max(at_s, 0), 4) + 2 * at_s
            read = 10 + at_s + 2 * min(max(at_s, 0), 4)
            values = row(
                HOST_COLUMNS, user_ms=1000 * busy, system_ms=0, idle_ms=1000 * (8 * (10 + at_s) - busy), iowait_ms=0,
                steal_ms=0, disk_read_bytes=1e6 * read, runnable=20 if 0 <= at_s <= 4 else 1,
            )  # fmt: skip
            return sample(at_s, values)

        host = seen(tmp_path, *(after(at / 2) for at in range(-10, 20))).hosts[0]
        assert host.cpu_share == pytest.approx(6 / 8)
        assert host.disk_read_bytes_per_s == pytest.approx(3e6)
        assert host.runnable == pytest.approx(20)
        assert host.samples == 9
        assert (host.cores, host.cores_physical, host.cores_usable) == (8, 4, 8.0)
        assert host.network_sent_bytes_per_s is None

    def test_a_counter_is_shared_out_between_samples(self, tmp_path: Path) -> None:
        """Samples at -2, 1 and 5 s; the steps take 2/3 of what came before 1 s from it, and 3/4 of the rest."""
        counts = {-2: 0, 1: 300, 5: 700}
        lines = [sample(at, cpu(at + 2, 1, network_sent_bytes=sent)) for at, sent in counts.items()]
        host = seen(tmp_path, *lines).hosts[0]
        assert host.network_sent_bytes_per_s == pytest.approx((300 / 3 + 400 * 3 / 4) / 4)

    def test_a_counter_that_was_reset_gives_no_rate(self, tmp_path: Path) -> None:
        lines = [sample(at, cpu(at + 1, 1, loopback_bytes=sent)) for at, sent in ((-1, 10), (1, 20), (3, 5), (5, 50))]
        assert seen(tmp_path, *lines).hosts[0].loopback_bytes_per_s is None

    def test_samples_that_span_less_than_half_of_the_steps_say_nothing(self, tmp_path: Path) -> None:
        write(tmp_path, header(), *(sample(at, cpu(at, 1)) for at in (2.5, 3, 9)))
        assert analyzed(tmp_path, {0: run(0)}) is None
        write(tmp_path, header(), *(sample(at, cpu(at, 1)) for at in (0.1, 0.5, 1.5)))
        assert analyzed(tmp_path, {0: run(0)}) is None

    def test_pressure_and_quota_are_shares_of_the_time(self, tmp_path: Path) -> None:
        def after(at: float) -> list[Any]:
            return cpu(at + 1, 1, cpu_pressure_us=at * 5e5, io_pressure_us=at * 1e5, throttled_us=at * 2.5e5)

        host = seen(tmp_path, *(sample(at, after(at)) for at in range(-1, 6))).hosts[0]
        assert host.cpu_pressure_share == pytest.approx(0.5)
        assert host.io_pressure_share == pytest.approx(0.1)
        assert host.throttled_share == pytest.approx(0.25)
        assert host.memory_pressure_share is None

    def test_cores_that_the_ranks_may_use(self, tmp_path: Path) -> None:
        lines = [
            {"process": 10, "rank": 0, "kind": RANK, "cores": "0-1"},
            {"process": 11, "rank": 1, "kind": RANK, "cores": "1-2,7"},
            {"process": 12, "rank": 1, "kind": LOADER, "cores": "0-7"},
            *(sample(at, cpu(at + 1, 1)) for at in range(-1, 6)),
        ]
        write(tmp_path, header(), *lines)
        found = analyzed(tmp_path, {0: run(0), 1: run(1)})
        assert found is not None
        assert found.hosts[0].cores_usable == 4
        write(tmp_path, header(cores_quota=2.5), *lines)
        found = analyzed(tmp_path, {0: run(0), 1: run(1)})
        assert found is not None
        assert found.hosts[0].cores_usable == 2.5

    @pytest.mark.parametrize(("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("x-3", set())])
    def test_lists_of_cores(self, text: str, cores: set[int]) -> None:
        assert listed_cores(text) == cores


class TestDevices:
    def two(self, tmp_path: Path, first: dict[str, Any] | None = None, **run_of: Any) -> System:
        """GPU 0 with the samples of ``first``, GPU 1 idle; 500 J in each second on GPU 0."""

        def devices(at: float) -> list[Any]:
            known = {
                "utilisation": 80, "sm_mhz": 1700, "temperature_c": 60 + at, "throttle": 4, "energy_mj": (at + 1) * 5e5,
                "power_mw": 1, "nvlink_sent_kib": at * 1000, "memory_used_bytes": 30 << 30,
            }  # fmt: skip
            return [row(DEVICE_COLUMNS, **{**known, **(first or {})}), row(DEVICE_COLUMNS, utilisation=0, throttle=1)]

        lines = [sample(at, cpu(at + 1, 1), devices(at)) for at in range(-1, 6)]
        write(tmp_path, header(devices=(DEVICE, {"index": 1, "uuid": "GPU-bb", "name": "H100"})), *lines)
        device = DeviceMetadata(type="cuda", index=0, **run_of.pop("device", {}))
        found = analyzed(tmp_path, {0: run(0, device=device, **run_of)})
        assert found is not None
        return found

    def test_means_over_the_used_steps(self, tmp_path: Path) -> None:
        device = self.two(tmp_path).devices[0]
        assert (device.host, device.index, device.name, device.ranks) == ("node7", 0, DEVICE["name"], (0,))
        assert device.utilisation == pytest.approx(0.8)
        assert (device.sm_mhz, device.sm_mhz_max) == (1700, 1980)
        assert device.power_w == pytest.approx(500)  # of the energy counter, not of single readings
        assert device.power_limit_w == 700
        assert device.temperature_c == 64
        assert device.nvlink_sent_bytes_per_s == pytest.approx(1000 * 1024)
        assert device.memory_used_bytes == 30 << 30
        assert device.throttled == {"power cap": 1.0}

    def test_an_idle_device_is_not_called_slowed(self, tmp_path: Path) -> None:
        idle = self.two(tmp_path).devices[1]
        assert (idle.ranks, idle.throttled, idle.power_w, idle.pcie_sent_bytes_per_s) == ((), {}, None, None)

    def test_bus_rates_where_there_are_no_counters(self, tmp_path: Path) -> None:
        device = self.two(tmp_path, {"pcie_sent_kbps": 2000}).devices[0]
        assert device.pcie_sent_bytes_per_s == pytest.approx(2e6)

    @pytest.mark.parametrize(
        ("device", "environment", "ours"),
        [
            ({"index": 1}, {}, False),
            ({"index": 0}, {}, True),
            ({"index": 1, "uuid": "1234"}, {}, True),
            ({"index": 0, "uuid": "9999"}, {}, False),
            ({"index": 1}, {"CUDA_VISIBLE_DEVICES": "3,0"}, True),
            ({"index": 0}, {"CUDA_VISIBLE_DEVICES": "3,0"}, False),
            ({"index": 0}, {"CUDA_VISIBLE_DEVICES": "GPU-ab"}, True),
            ({"index": 5}, {"CUDA_VISIBLE_DEVICES": "0"}, False),
            ({"index": None}, {}, False),
        ],
    )
    def test_which_device_a_rank_trains_on(self, device: Any, environment: dict[str, str], ours: bool) -> None:
        record = run(0, device=DeviceMetadata(type="cuda", **device), environment=environment)
        assert trains_on(record, SampledDevice(index=0, uuid="GPU-ab-1234")) is ours


class TestProcesses:
    def test_ranks_and_their_workers(self, tmp_path: Path) -> None:
        def tasks(at: float) -> list[Any]:
            used = {10: 0.5, 11: 0.9, 12: 0.7, 20: 1.0}
            return [
                [pid, *row(PROCESS_COLUMNS, cpu_ms=(at + 1) * 1000 * cores, threads=6, waited_ms=(at + 1) * 200)]
                for pid, cores in used.items()
            ]

        kinds = {10: (0, RANK), 11: (0, LOADER), 12: (0, LOADER), 20: (1, RANK)}
        lines = [{"process": pid, "rank": rank, "kind": kind, "cores": ""} for pid, (rank, kind) in kinds.items()]
        write(tmp_path, header(), *lines, *(sample(at, cpu(at + 1, 4), [], tasks(at)) for at in range(-1, 6)))
        found = analyzed(tmp_path, {0: run(0), 1: run(1)})
        assert found is not None
        first, second = found.processes
        assert (first.rank, first.workers, second.rank, second.workers) == (0, 2, 1, 0)
        assert first.cores == pytest.approx(0.5)
        assert first.threads == pytest.approx(6)
        assert first.waited_share == pytest.approx(0.2)
        assert (first.worker_cores, first.worker_cores_max) == (pytest.approx(0.8), pytest.approx(0.9))
        assert second.worker_cores is None
        assert found.hosts[0].job_cores == pytest.approx(0.5 + 0.9 + 0.7 + 1.0)


class TestFiles:
    def test_a_restarted_jobs_last_sampler_is_the_one_that_saw_the_steps(self, tmp_path: Path) -> None:
        before = [sample(at, cpu(at + 100, 8)) for at in (-9, -8, -7)]
        write(tmp_path, header(), *before, header(cores=16), *(sample(at, cpu(at + 1, 1)) for at in range(-1, 6)))
        found = analyzed(tmp_path, {0: run(0)})
        assert found is not None
        assert found.hosts[0].cores == 16
        assert found.hosts[0].cpu_share == pytest.approx(1 / 8)

    def test_of_two_samplers_on_one_host_the_one_around_the_steps_is_taken(self, tmp_path: Path) -> None:
        """Two nodes on one machine: one's sampler began after the few steps, the other's looked around them."""
        after = [sample(at, cpu(at, 1)) for at in (5, 6, 7)]
        around = [sample(at, cpu(at + 1, 2)) for at in (-0.1, 4.1)]
        for order in ((after, around), (around, after)):
            write(tmp_path, *(line for samples in order for line in (header(), *samples)))
            found = analyzed(tmp_path, {0: run(0)})
            assert found is not None
            assert found.hosts[0].cpu_share == pytest.approx(2 / 8)

    def test_a_file_cut_by_a_kill_is_read_up_to_there(self, tmp_path: Path) -> None:
        path = write(tmp_path, header(), *(sample(at, cpu(at + 1, 1)) for at in range(-1, 6)))
        path.write_bytes(b"\n" + path.read_bytes() + b"[17000000000000, [1, 2")
        assert len(read_samples(path, 0, 2 * T0)[0].table.time_ns) == 7

    def test_samples_far_from_the_steps_are_not_read(self, tmp_path: Path) -> None:
        path = write(tmp_path, header(), *(sample(at, cpu(at + 1000, 1)) for at in range(-1000, 1000)))
        assert len(read_samples(path, T0, T0 + 9 * SECOND)[0].table.time_ns) == 10

    def test_hosts_on_clocks_of_their_own(self, tmp_path: Path) -> None:
        """node8's clock is 100 s behind: its samples are found by its own ranks' steps, and drawn where they belong."""
        behind = 100 * SECOND
        write(tmp_path, header(), *(sample(at, cpu(at + 1, 2)) for at in range(-1, 6)))
        lines = [[line[0] - behind, *line[1:]] for line in (sample(at, cpu(at + 1, 6)) for at in range(-1, 6))]
        write(tmp_path, header("node8"), *lines, host="node8")
        found = analyzed(tmp_path, {0: run(0), 1: run(1, "node8")}, {1: behind})
        assert found is not None
        assert [(host.host, host.cpu_share) for host in found.hosts] == [
            ("node7", pytest.approx(2 / 8)), ("node8", pytest.approx(6 / 8)),
        ]  # fmt: skip
        assert found.window_us == (0.0, 4e6)
        courses = {series.host: series for series in found.series if series.what == "cpu"}
        assert courses["node7"].time_us == courses["node8"].time_us == tuple((at + 0.5) * 1e6 for at in range(-1, 5))

    def test_nothing_sampled(self, tmp_path: Path) -> None:
        assert analyzed(tmp_path, {0: run(0)}) is None
        write(tmp_path, header("elsewhere"), *(sample(at, cpu(at + 1, 1)) for at in range(-1, 6)))
        assert analyzed(tmp_path, {0: run(0)}) is None


class TestSeries:
    def test_a_long_course_is_thinned_to_means(self, tmp_path: Path) -> None:
        write(tmp_path, header(), *(sample(at / 20, cpu(at / 20 + 20, 2)) for at in range(-300, 400)))
        found = analyzed(tmp_path, {0: run(0)})
        assert found is not None
        course = next(series for series in found.series if series.what == "cpu")
        assert 100 <= len(course.values) <= 240
        assert course.values == pytest.approx([2 / 8] * len(course.values), abs=1e-6)
        assert course.time_us == tuple(sorted(course.time_us))

    def test_few_of_many_devices_are_drawn(self, tmp_path: Path) -> None:
        known = tuple({**DEVICE, "index": index} for index in range(40))
        rows = [row(DEVICE_COLUMNS, utilisation=100 - index) for index in range(40)]
        write(tmp_path, header(devices=known), *(sample(at, cpu(at + 1, 2), rows) for at in range(-1, 6)))
        found = analyzed(tmp_path, {0: run(0)})
        assert found is not None
        drawn = {series.device for series in found.series if series.what == "utilisation"}
        assert drawn == set(range(8, 40))  # the least used


class TestNotes:
    def notes(self, tmp_path: Path, devices: Sequence[Any] = (), known: tuple[Any, ...] = (), **host: Any) -> str:
        def values(at: float) -> list[Any]:
            grown = {name: value * (at + 1) if HOST_COLUMNS[name] else value for name, value in host.items()}
            return cpu(at + 1, 1, **grown)

        write(tmp_path, header(devices=known), *(sample(at, values(at), devices) for at in range(-1, 6)))
        found = analyzed(tmp_path, {0: run(0, device=DeviceMetadata(type="cuda", index=0))})
        return " ".join(note.text for note in system_notes(Job(tmp_path, ()), found))

    def test_a_healthy_machine_needs_no_note(self, tmp_path: Path) -> None:
        device = row(DEVICE_COLUMNS, utilisation=99, throttle=0, sm_mhz=1980)
        assert self.notes(tmp_path, [device], (DEVICE,), throttled_us=1000, swapped_bytes=0) == ""

    @pytest.mark.parametrize(
        ("mask", "expected"),
        [
            (0x40, "hardware thermal slowdown (100% of the samples)"),
            (0x20, "software thermal slowdown"),
            (0x8, "hardware slowdown"),
            (0x80, "external power brake"),
            (0x4, "power limit of 700 W in 100% of the samples, at 1200 of 1980 MHz"),
            (0x2, "set by a user"),
        ],
    )
    def test_slowed_clocks(self, tmp_path: Path, mask: int, expected: str) -> None:
        text = self.notes(tmp_path, [row(DEVICE_COLUMNS, throttle=mask, sm_mhz=1200, temperature_c=91)], (DEVICE,))
        assert expected in text
        assert "GPU 0 of node7" in text

    @pytest.mark.parametrize(
        ("counters", "expected"),
        [
            ({"throttled_us": 6e4}, "kept it from running for 6% of the time"),
            ({"swapped_bytes": 5e6}, "swapped 5 MB/s"),
            ({"io_pressure_us": 2e5, "disk_read_bytes": 7e6}, "waited for disks for 20% of the time (7 MB/s read"),
            ({"memory_pressure_us": 2e5}, "waited for memory for 20%"),
            ({"memory_used_bytes": 63 << 30}, "98% of the memory of node7"),
        ],
    )
    def test_a_host_in_trouble(self, tmp_path: Path, counters: dict[str, float], expected: str) -> None:
        assert expected in self.notes(tmp_path, **counters)

    def test_a_link_with_few_lanes(self, tmp_path: Path) -> None:
        text = self.notes(tmp_path, [row(DEVICE_COLUMNS, throttle=0)], ({**DEVICE, "pcie_width": 8},))
        assert "8 of 16 PCIe lanes" in text

    def test_other_processes_and_busy_workers(self, tmp_path: Path) -> None:
        lines = [{"process": pid, "rank": 0, "kind": kind, "cores": ""} for pid, kind in ((10, RANK), (11, LOADER))]

        def tasks(at: float) -> list[Any]:
            return [[pid, *row(PROCESS_COLUMNS, cpu_ms=(at + 1) * 1000 * used)] for pid, used in ((10, 2), (11, 0.95))]

        write(tmp_path, header(), *lines, *(sample(at, cpu(at + 1, 8), [], tasks(at)) for at in range(-1, 6)))
        text = " ".join(note.text for note in system_notes(Job(tmp_path, ()), analyzed(tmp_path, {0: run(0)})))
        assert "Other processes used 5.0 of the 8 cores of node7, the job 3.0" in text
        assert "are always computing (95% of a core each)" in text

    def test_few_samples_are_moments(self, tmp_path: Path) -> None:
        found = seen(tmp_path, *(sample(at, cpu(at + 2, 1)) for at in (-1, 2, 5)))
        assert "node7 has only 1 sample" in next(system_notes(Job(tmp_path, ()), found)).text

    def test_samples_beside_the_steps_are_missed(self, tmp_path: Path) -> None:
        path = write(tmp_path, header(), sample(-50, cpu(1, 1)), sample(-49, cpu(2, 1)))
        texts = [
            note.text for note in system_notes(Job(tmp_path, (), samples=(path,)), analyzed(tmp_path, {0: run(0)}))
        ]
        assert len(texts) == 1
        assert "took no sample during the recorded steps" in texts[0]
