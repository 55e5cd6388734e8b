"""Which ranks share a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.job.hosts import Hosts, find_hosts, host_in_file_name, hosts_by_device
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.recording.metadata import RunMetadata
from perfscope.trace.trace import Device
from tests.traces import TraceBuilder


def partial(
    rank: int, host: str = "", source: str = "rank.json", device: int | None = None, process: int = 1
) -> RankPartial:
    built = analyze_rank(TraceBuilder(rank=rank, host=host).step(0, 0, 100).op("aten::mm", 10, 50).build())
    devices = () if device is None else (Device(device, "H100", None),)
    return replace(built, source=source, devices=devices, processes=frozenset({process}))


def test_the_run_s_own_word_goes_first() -> None:
    found = find_hosts({0: partial(0, "trace"), 1: partial(1, "trace")}, {0: RunMetadata(host="run")}, 2)
    assert found == Hosts({0: "run", 1: "trace"}, "recorded")


@pytest.mark.parametrize("name", ["", "localhost", "localhost.localdomain", "127.0.0.1", "(none)"])
def test_what_every_machine_calls_itself_is_no_name(name: str) -> None:
    assert find_hosts({0: partial(0, name), 1: partial(1, name)}, {}, 2) == Hosts()


def test_torch_s_handler_names_the_host() -> None:
    sources = {
        rank: f"/traces/gpu-{rank // 2}.cluster_{4000 + rank}.1717000000123.pt.trace.json.gz" for rank in range(4)
    }
    ranks = {rank: partial(rank, source=source, process=4000 + rank) for rank, source in sources.items()}
    found = find_hosts(ranks, {}, 4)
    assert found == Hosts(
        {0: "gpu-0.cluster", 1: "gpu-0.cluster", 2: "gpu-1.cluster", 3: "gpu-1.cluster"}, "file names"
    )


@pytest.mark.parametrize(
    "name",
    ["rank3_17.1717000000123.pt.trace.json", "worker_0.1717000000123.pt.trace.json", "gpu_0.json", "gpu-0_12.json",
     "localhost_12.1717000000123.pt.trace.json", "gpu-0.1717000000123.pt.trace.json"],
)  # fmt: skip
def test_other_names_of_files_name_no_host(name: str) -> None:
    assert host_in_file_name(name, {0, 12, 17}) == ""


def test_a_pod_may_be_called_a_worker() -> None:
    assert host_in_file_name("job-worker-0_71.1717000000123.pt.trace.json", {71}) == "job-worker-0"


@pytest.mark.parametrize("devices", [None, 0, 1])
def test_a_name_that_the_user_gave_the_worker_is_no_host(devices: int | None) -> None:
    """Its number is a step, not the process whose events the trace holds."""
    ranks = {
        rank: partial(rank, source=f"worker{rank}_step_12.1717000000123.pt.trace.json", device=devices, process=900)
        for rank in range(4)
    }
    assert find_hosts(ranks, {}, 4) == Hosts()


@pytest.mark.parametrize("name", ["worker{rank}", "trainer-{rank}", "gpu{rank}"])
def test_devices_that_count_up_contradict_a_host_for_each_rank(name: str) -> None:
    """A worker's name with its process id; rank 3 alone on its host would not run on device 3."""
    ranks = {
        rank: partial(
            rank, source=f"{name.format(rank=rank)}_{71 + rank}.1717000000123.pt.trace.json", device=rank,
            process=71 + rank,
        )
        for rank in range(4)
    }  # fmt: skip
    assert find_hosts(ranks, {}, 4) == Hosts(dict.fromkeys(range(4), "host of ranks 0-3"), "device numbers")


def test_names_that_agree_with_the_devices_are_better_than_numbers() -> None:
    ranks = {
        rank: partial(
            rank, source=f"node{rank // 2}_{71 + rank}.1717000000123.pt.trace.json", device=rank % 2, process=71 + rank
        )
        for rank in range(4)
    }
    assert find_hosts(ranks, {}, 4) == Hosts({0: "node0", 1: "node0", 2: "node1", 3: "node1"}, "file names")


class TestDevices:
    def test_they_count_up_on_each_host(self) -> None:
        found = find_hosts({rank: partial(rank, device=rank % 4) for rank in range(8)}, {}, 8)
        assert found.source == "device numbers"
        assert found.names[3] == "host of ranks 0-3"
        assert set(found.names.values()) == {"host of ranks 0-3", "host of ranks 4-7"}

    def test_each_process_may_see_its_own_device_only(self) -> None:
        assert hosts_by_device(dict.fromkeys(range(8), 0), 8) == {}

    def test_numbers_need_not_begin_at_0(self) -> None:
        """ROCm counts the processors first."""
        assert set(hosts_by_device({rank: 2 + rank % 2 for rank in range(4)}, 4).values()) == {
            "host of ranks 0-1", "host of ranks 2-3",
        }  # fmt: skip

    def test_one_host_is_one(self) -> None:
        assert hosts_by_device({0: 0, 1: 1, 2: 2}, 3) == dict.fromkeys((0, 1, 2), "host of ranks 0-2")

    def test_ranks_dealt_out_in_turn_do_not_count_up(self) -> None:
        assert hosts_by_device({0: 0, 1: 0, 2: 1, 3: 1}, 4) == {}

    @pytest.mark.parametrize("devices", [{0: 0, 5: 1}, {0: 0, 1: 1, 5: 1}, {5: 1}])
    def test_where_they_begin_again_must_be_seen(self, devices: dict[int, int]) -> None:
        assert hosts_by_device(devices, 16) == {}

    def test_missing_ranks_do_not_matter_once_it_is_seen(self) -> None:
        devices = {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 11: 3}
        assert hosts_by_device(devices, 16)[11] == "host of ranks 8-11"

    def test_a_recorded_name_forbids_guessing_the_others(self) -> None:
        ranks = {rank: partial(rank, "node" if rank == 0 else "", device=rank % 2) for rank in range(4)}
        assert find_hosts(ranks, {}, 4) == Hosts({0: "node"}, "recorded")
