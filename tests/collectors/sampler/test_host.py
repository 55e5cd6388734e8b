"""What the sampler reads of a host: files as kernels write them, and the machine that the test runs on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfscope.collectors.sampler.host import ProcHost
from perfscope.collectors.sampler.tasks import ProcTasks, Task
from perfscope.recording.samples import HOST_COLUMNS, LOADER, PROCESS_COLUMNS, RANK
from tests.collectors.harness import write_files

needs_proc = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system has no /proc")
TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")


def host(root: Path) -> dict[str, int | None]:
    return dict(zip(HOST_COLUMNS, ProcHost(root).sample(), strict=True))


def process(values: list[int | None] | None) -> dict[str, int | None]:
    assert values is not None
    return dict(zip(PROCESS_COLUMNS, values, strict=True))


class TestHost:
    def test_cpu_time_and_the_queue(self, tmp_path: Path) -> None:
        # user nice system idle iowait irq softirq steal guest guest_nice, in ticks; the sampler itself runs too
        text = "cpu  100 20 30 400 50 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\nprocs_running 5\nprocs_blocked 2\n"
        values = host(write_files(tmp_path, {"proc/stat": text}))
        cpu_ms = {name: values[name] for name in ("user_ms", "system_ms", "idle_ms", "iowait_ms", "steal_ms")}
        assert cpu_ms == {
            "user_ms": 120 * TICK_MS, "system_ms": 43 * TICK_MS, "idle_ms": 400 * TICK_MS, "iowait_ms": 50 * TICK_MS,
            "steal_ms": 8 * TICK_MS,
        }  # fmt: skip
        assert (values["runnable"], values["blocked"]) == (4, 2)

    def test_pressure(self, tmp_path: Path) -> None:
        line = "some avg10=1.00 avg60=2.00 avg300=3.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"
        files = {f"proc/pressure/{name}": line.format(us) for name, us in (("cpu", 11), ("io", 22), ("memory", 33))}
        values = host(write_files(tmp_path, files))
        assert [values[f"{name}_pressure_us"] for name in ("cpu", "io", "memory")] == [11, 22, 33]

    @pytest.mark.parametrize(
        ("groups", "folder", "files", "cores"),
        [
            ("0::/job\n", "sys/fs/cgroup/job", {"cpu.stat": "throttled_usec 5000", "cpu.max": "150000 100000"}, 1.5),
            (
                "0::/x\n",
                "sys/fs/cgroup",
                {"cpu.stat": "usage_usec 1\nthrottled_usec 5000", "cpu.max": "max 100000"},
                None,
            ),
            (
                "4:memory:/m\n1:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job",
                {"cpu.stat": "throttled_time 5000000", "cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"},
                4.0,
            ),
        ],
    )
    def test_cpu_quota(
        self, tmp_path: Path, groups: str, folder: str, files: dict[str, str], cores: float | None
    ) -> None:
        meminfo = {"proc/meminfo": "MemTotal: 8 kB\nSwapTotal: 0 kB\n"}
        write_files(
            tmp_path, {"proc/self/cgroup": groups, **{f"{folder}/{name}": text for name, text in files.items()}}
        )
        assert host(tmp_path)["throttled_us"] == 5000
        assert ProcHost(write_files(tmp_path, meminfo)).describe()["cores_quota"] == cores

    def test_memory_and_swap(self, tmp_path: Path) -> None:
        meminfo = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n"
        values = host(
            write_files(tmp_path, {"proc/meminfo": meminfo, "proc/vmstat": "pswpin 3\npswpout 4\npgfault 9\n"})
        )
        assert (values["memory_used_bytes"], values["swap_used_bytes"]) == (600 * 1024, 30 * 1024)
        assert values["swapped_bytes"] == 7 * os.sysconf("SC_PAGE_SIZE")

    def test_disks_are_counted_once(self, tmp_path: Path) -> None:
        row = "   8 0 {} 1 0 {} 0 1 0 {} 0 0 0 0 0 0 0\n"
        rows = [row.format(*each) for each in (("sda", 10, 20), ("sda1", 10, 20), ("dm-0", 10, 20), ("nvme0n1", 1, 2))]
        for name in ("sda", "dm-0", "nvme0n1", "loop0"):
            (tmp_path / "sys/block" / name).mkdir(parents=True)
        values = host(write_files(tmp_path, {"proc/diskstats": "".join(rows)}))
        assert (values["disk_read_bytes"], values["disk_written_bytes"]) == (11 * 512, 22 * 512)

    @pytest.mark.parametrize(("with_hardware", "received"), [(("eth0",), 5), ((), 5 + 70)])
    def test_interfaces_are_counted_once(self, tmp_path: Path, with_hardware: tuple[str, ...], received: int) -> None:
        """Bridges carry what their interfaces do; in a container, none has hardware below it."""
        header = "Inter-|   Receive  |  Transmit\n face |bytes ...|bytes ...\n"
        rows = "    lo: 1000 1 0 0 0 0 0 0 1000 1 0 0 0 0 0 0\n  eth0: 5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0\n"
        rows += "   br0: 70 1 0 0 0 0 0 0 80 1 0 0 0 0 0 0\n"
        for name in ("lo", "eth0", "br0"):
            (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        for name in with_hardware:
            (tmp_path / "sys/class/net" / name / "device").mkdir()
        values = host(write_files(tmp_path, {"proc/net/dev": header + rows}))
        assert (values["network_received_bytes"], values["loopback_bytes"]) == (received, 1000)

    def test_infiniband_counts_words(self, tmp_path: Path) -> None:
        port = "sys/class/infiniband/mlx5_{}/ports/1/counters/"
        files = {port.format(n) + name: "25\n" for n in (0, 1) for name in ("port_rcv_data", "port_xmit_data")}
        values = host(write_files(tmp_path, files))
        assert (values["rdma_received_bytes"], values["rdma_sent_bytes"]) == (200, 200)

    def test_hyper_threads_are_one_core(self, tmp_path: Path) -> None:
        place = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        files = {place.format(n): f"{n % 2},{n % 2 + 2}\n" for n in range(4)}
        files["proc/meminfo"] = "MemTotal: 8 kB\n"
        assert ProcHost(write_files(tmp_path, files)).describe()["cores_physical"] == 2

    def test_what_a_system_does_not_report_is_unknown_and_not_asked_again(self, tmp_path: Path) -> None:
        sampler = ProcHost(tmp_path)
        first = dict(zip(HOST_COLUMNS, sampler.sample(), strict=True))
        write_files(tmp_path, {"proc/stat": "cpu  1 1 1 1 1 1 1 1 0 0\nprocs_running 2\n"})
        assert first["user_ms"] is None
        assert sampler.sample()[list(HOST_COLUMNS).index("user_ms")] is None

    @needs_proc
    def test_this_machine_counts_the_work_that_is_done(self) -> None:
        sampler = ProcHost()
        before = dict(zip(HOST_COLUMNS, sampler.sample(), strict=True))
        burn(0.3)
        after = dict(zip(HOST_COLUMNS, sampler.sample(), strict=True))
        spent = sum((after[name] or 0) - (before[name] or 0) for name in ("user_ms", "system_ms"))
        assert spent >= 200
        # Linux does not promise it of iowait: what it has counted for a core it may count as idle afterwards.
        counters = [name for name, grows in HOST_COLUMNS.items() if grows and name != "iowait_ms"]
        assert all(after[name] is None or after[name] >= (before[name] or 0) for name in counters)
        described = sampler.describe()
        assert described["cores"] == os.cpu_count()
        assert 0 < (after["memory_used_bytes"] or 0) < described["memory_bytes"]


class TestPsutil:
    """The same machine by way of psutil: the two must agree."""

    def test_host(self) -> None:
        pytest.importorskip("psutil", reason="psutil is not installed (the sampler extra)")
        from perfscope.collectors.sampler.psutil import PsutilHost

        def sample() -> dict[str, int | None]:
            return dict(zip(HOST_COLUMNS, PsutilHost().sample(), strict=True))

        assert sample()["idle_ms"]
        if Path("/proc/stat").exists():
            used = []
            for _ in range(20):  # others' memory comes and goes meanwhile; what is counted grows
                before, mine, after = host(Path("/")), sample(), host(Path("/"))
                for name in ("user_ms", "idle_ms", "loopback_bytes"):
                    assert (before[name] or 0) - 1000 <= (mine[name] or 0) <= (after[name] or 0) + 1000, name
                used.append(mine["memory_used_bytes"] == pytest.approx(after["memory_used_bytes"], rel=0.02))
            assert any(used)
            assert PsutilHost().describe()["memory_bytes"] == ProcHost().describe()["memory_bytes"]

    def test_processes(self) -> None:
        pytest.importorskip("psutil", reason="psutil is not installed (the sampler extra)")
        from perfscope.collectors.sampler.psutil import PsutilTasks

        tasks = PsutilTasks()
        before = process(tasks.sample(os.getpid()))
        burn(0.2)
        after = process(tasks.sample(os.getpid()))
        assert 100 <= (after["cpu_ms"] or 0) - (before["cpu_ms"] or 0) <= 400
        with forked() as child:
            assert child in [worker.pid for worker in tasks.workers(tasks.rank(os.getpid(), 3))]
        assert tasks.sample(child) is None


@needs_proc
class TestTasks:
    def test_cpu_time_of_a_process(self) -> None:
        tasks = ProcTasks()
        before = process(tasks.sample(os.getpid()))
        burn(0.2)
        after = process(tasks.sample(os.getpid()))
        assert 100 <= (after["cpu_ms"] or 0) - (before["cpu_ms"] or 0) <= 400
        assert (after["threads"] or 0) >= 1
        assert (after["resident_bytes"] or 0) > 1 << 20
        assert tasks.rank(os.getpid(), 3) == Task(os.getpid(), 3, RANK, tasks.rank(os.getpid(), 3).cores)
        assert tasks.rank(os.getpid(), 3).cores

    def test_a_process_that_has_gone(self) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            pass
        assert ProcTasks().sample(gone.pid) is None

    def test_forked_workers_are_found_and_other_children_are_not(self) -> None:
        tasks = ProcTasks()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other, forked() as child:
            found = tasks.workers(tasks.rank(os.getpid(), 3))
            assert other.stdin is not None
            other.stdin.close()
        assert [(worker.pid, worker.rank, worker.kind) for worker in found] == [(child, 3, LOADER)]

    def test_workers_that_name_themselves_are_believed(self, tmp_path: Path) -> None:
        def process(pid: int, name: str, line: str, children: str = "") -> dict[str, str]:
            place = f"proc/{pid}"
            return {
                f"{place}/comm": name + "\n", f"{place}/cmdline": line, f"{place}/task/{pid}/children": children,
                f"{place}/status": "Name: x\nCpus_allowed_list:\t0-3,8\n",
            }  # fmt: skip

        files = {
            **process(10, "python", "python\0train.py", "11 12 13"),
            **process(11, "pt_data_worker", "python\0train.py"),
            **process(12, "python", "python\0train.py", "14"),  # forked, but for something else
            **process(13, "python", "python\0-c\0from multiprocessing.resource_tracker"),
            **process(14, "pt_data_worker", "python\0train.py"),  # behind a fork server
        }
        workers = ProcTasks(write_files(tmp_path, files)).workers(Task(10, 0, RANK, ""))
        assert workers == [Task(11, 0, LOADER, "0-3,8"), Task(14, 0, LOADER, "0-3,8")]

    def test_spawned_workers_of_older_versions(self, tmp_path: Path) -> None:
        files = {
            "proc/10/cmdline": "python\0train.py",
            "proc/10/task/10/children": "11 12",
            "proc/11/cmdline": "python\0-c\0from multiprocessing.spawn import spawn_main; spawn_main(5)",
            "proc/12/cmdline": "gcc\0-c\0kernel.c",
        }
        workers = ProcTasks(write_files(tmp_path, files)).workers(Task(10, 0, RANK, ""))
        assert [worker.pid for worker in workers] == [11]

    def test_a_main_thread_that_waits_for_a_core(self, tmp_path: Path) -> None:
        stat = "10 (a (strange) name) R " + " ".join(["0"] * 10 + ["7", "5"] + ["0"] * 4 + ["3"] + ["0"] * 3 + ["2"])
        files = {"proc/10/stat": stat, "proc/10/schedstat": "123 45000000 6\n"}
        assert process(ProcTasks(write_files(tmp_path, files)).sample(10)) == {
            "cpu_ms": 12 * TICK_MS, "threads": 3, "resident_bytes": 2 * os.sysconf("SC_PAGE_SIZE"), "waited_ms": 45,
        }  # fmt: skip


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class forked:  # noqa: N801 - used like a function
    """A child that was forked, as loader workers are, and waits."""

    def __enter__(self) -> int:
        self._theirs, self._ours = os.pipe()
        # A fork of a threaded process is a risk that a child which only reads can take.
        self._pid = os.fork()
        if not self._pid:
            os.close(self._ours)
            os.read(self._theirs, 1)
            os._exit(0)
        os.close(self._theirs)
        return self._pid

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        os.waitpid(self._pid, 0)
