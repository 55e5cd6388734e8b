"""Which files belong together, by name: the layouts that tools and frameworks write."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.errors import UnusableInput
from perfscope.recording.captures import Capture, captures_of_files, captures_of_folders, last_full, rank_in_name
from perfscope.recording.job import open_job


def names(captures: list[Capture] | None) -> dict[str, list[str]] | None:
    if captures is None:
        return None
    return {capture.label: [str(source.path) for source in capture.sources] for capture in captures}


def files(*paths: str) -> list[Path]:
    return [Path(path) for path in paths]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3),
        ("rank0_trace.json", 0),  # torchtitan
        ("trace_rank-12.json.gz", 12),
        ("rank_7_trace.json", 7),
        ("global_rank3.json", 3),
        ("trace_GlobalRank3.json", 3),
        ("rank=4.json", 4),
        ("rank3of8.json", 3),
        ("rank-00003.capture-1.trace.json.gz", 3),
        ("worker5.1717000000123.pt.trace.json", 5),  # tensorboard_trace_handler(worker_name=…)
        ("r6.json", 6),
        ("run-r12.json.gz", 12),
        ("frank3.json", None),
        ("local_rank3.json", None),  # the same on every node
        ("r2d2.json", None),
        ("dev1.json", None),
        ("node1_4242.1717000000123.pt.trace.json.gz", None),
        ("trace_10.json", None),  # could as well be a step
        ("trace.json", None),
    ],
)
def test_ranks_in_names(name, rank):
    assert rank_in_name(Path(name)) == rank


class TestFilesOfOneFolder:
    def test_a_file_a_rank_is_one_capture(self):
        assert names(captures_of_files(files("rank0.json", "rank1.json", "other.json"))) == {
            "": ["rank0.json", "rank1.json", "other.json"]
        }

    def test_another_number_distinguishes_captures(self):
        found = captures_of_files(
            files("rank0_step9.json", "rank1_step9.json", "rank0_step10.json", "rank1_step10.json")
        )
        assert names(found) == {
            "rankN_step9.json": ["rank0_step9.json", "rank1_step9.json"],
            "rankN_step10.json": ["rank0_step10.json", "rank1_step10.json"],
        }
        assert last_full(found) is found[1]

    @pytest.mark.parametrize(
        "form",
        ["host{}.gpu{}.json", "node-{}-local-{}.json", "machine{}_local_rank{}.pt.trace.json.gz", "node{}_rank{}.json"],
    )
    def test_a_host_and_its_ranks_in_a_name_are_counted_through(self, form):
        every = [(host, local) for host in (3, 11) for local in (0, 1)]
        (capture,) = captures_of_files(files(*(form.format(*place) for place in sorted(every, key=str))))
        assert {str(source.path): source.named_rank for source in capture.sources} == {
            form.format(*place): rank for rank, place in enumerate(every)
        }

    def test_ranks_that_differ_from_host_to_host_are_the_jobs(self):
        (capture,) = captures_of_files(files(*(f"node{rank // 2}_rank{rank}.json" for rank in range(4))))
        assert [source.named_rank for source in capture.sources] == [0, 1, 2, 3]

    def test_a_set_that_a_rank_is_missing_from_is_not_the_last_full_one(self):
        found = captures_of_files(files("rank0_step9.json", "rank1_step9.json", "rank0_step10.json"))
        assert last_full(found).label == "rankN_step9.json"

    def test_a_stray_second_file_of_a_rank_is_left_out(self):
        found = captures_of_files(files("rank0.json", "rank1.json", "rank1_old.json"))
        assert names([last_full(found)]) == {"rankN.json": ["rank0.json", "rank1.json"]}

    @pytest.mark.parametrize("workers", [("node1_42", "node2_43"), ("rank0", "rank1")])
    def test_times_of_the_tensorboard_handler_are_counted_off(self, workers):
        """They differ from rank to rank by some ms, so only their order shows what belongs together."""
        one, two = workers
        first, second = (f"{one}.1717000000123.pt.trace.json", f"{two}.1717000000125.pt.trace.json")
        third, fourth = (f"{one}.1717000099123.pt.trace.json", f"{two}.1717000099120.pt.trace.json")
        found = captures_of_files(files(fourth, first, third, second))
        assert [set(each) for each in names(found).values()] == [{first, second}, {third, fourth}]

    def test_lone_numbers_are_ranks_if_they_count_from_0(self):
        """accelerate writes profile_0.json …"""
        (capture,) = captures_of_files(files("profile_0.json", "profile_1.json", "profile_2.json"))
        assert [source.named_rank for source in capture.sources] == [0, 1, 2]
        (capture,) = captures_of_files(files("profile_10.json", "profile_20.json"))
        assert [source.named_rank for source in capture.sources] == [None, None]
        (capture,) = captures_of_files(files("h100_gpu1_trace.json", "h100_gpu0_trace.json"))
        assert [source.named_rank for source in capture.sources] == [1, 0]

    def test_lone_numbers_of_steps_are_captures_of_one_rank(self):
        found = captures_of_files(files("trace_step10.json", "trace_step9.json"))
        assert list(names(found).values()) == [["trace_step9.json"], ["trace_step10.json"]]
        assert [source.named_rank for capture in found for source in capture.sources] == [None, None]


class TestFolders:
    def test_a_folder_an_iteration(self):
        """torchtitan: profile_traces/iteration_10/rank0_trace.json."""
        ranks = ("rank0_trace.json", "rank1_trace.json")
        found = captures_of_folders({"iteration_10": files(*ranks), "iteration_9": files(*ranks)})
        assert list(names(found)) == ["iteration_9", "iteration_10"]

    def test_a_folder_a_rank_or_node_is_one_capture(self):
        (capture,) = captures_of_folders({"rank0": files("trace.json"), "rank1": files("trace.json")})
        assert [source.named_rank for source in capture.sources] == [0, 1]
        (capture,) = captures_of_folders({"node-a": files("rank0.json", "rank1.json"), "node-b": files("rank2.json")})
        assert [source.named_rank for source in capture.sources] == [0, 1, 2]

    @pytest.mark.parametrize("hosts", [("node0", "node1"), ("host-a", "host-b"), ("10.0.0.7", "10.0.0.12")])
    def test_folders_of_hosts_that_number_their_own_ranks_are_one_job(self, hosts):
        (capture,) = captures_of_folders({host: files(f"{host}/rank0.json", f"{host}/rank1.json") for host in hosts})
        assert [(str(source.path), source.named_rank) for source in capture.sources] == [
            (f"{hosts[0]}/rank0.json", 0), (f"{hosts[0]}/rank1.json", 1),
            (f"{hosts[1]}/rank0.json", 2), (f"{hosts[1]}/rank1.json", 3),
        ]  # fmt: skip

    def test_a_trace_in_a_folder_of_each_host_is_one_job(self):
        (capture,) = captures_of_folders({"node3": files("node3/trace.json"), "node7": files("node7/trace.json")})
        assert [source.named_rank for source in capture.sources] == [0, 1]

    def test_captures_of_hosts_with_ranks_of_their_own(self):
        found = captures_of_folders(
            {host: files(*(f"{host}/rank{n}_step{at}.json" for at in (1, 2) for n in (0, 1))) for host in ("n1", "n2")}
        )
        assert [len(capture.sources) for capture in found] == [2, 2]  # n1 is no host's name
        found = captures_of_folders(
            {
                host: files(*(f"{host}/rank{n}_step{at}.json" for at in (1, 2) for n in (0, 1)))
                for host in ("node1", "node2")
            }
        )
        assert [[source.named_rank for source in capture.sources] for capture in found] == [[0, 1, 2, 3]] * 2

    def test_folders_of_unlike_names_with_the_same_ranks_are_not_guessed(self):
        assert captures_of_folders({"before": files("rank0.json"), "after": files("rank0.json")}) is None


class TestJobsFromThem:
    @staticmethod
    def touch(folder: Path, *paths: str) -> Path:
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text("{}")
        return folder

    def test_the_last_full_iteration_and_the_choice_is_reported(self, tmp_path):
        whole = [f"iteration_{step}/rank{rank}_trace.json" for step in (10, 20) for rank in (0, 1)]
        job = open_job(self.touch(tmp_path, *whole, "iteration_30/rank0_trace.json"))
        assert [source.path.parent.name for source in job.sources] == ["iteration_20", "iteration_20"]
        assert "3 captures; number 1, iteration_20 (2 traces), is analyzed" in job.choice
        assert open_job(tmp_path, capture=2).sources[0].path.parent.name == "iteration_30"
        with pytest.raises(UnusableInput, match=r"no capture 3; choose from 0 \(iteration_10\), 1 \(iteration_20\)"):
            open_job(tmp_path, capture=3)

    def test_one_level_deeper(self, tmp_path):
        self.touch(
            tmp_path, "outputs/traces/iteration_10/rank0_trace.json", "outputs/traces/iteration_20/rank0_trace.json"
        )
        assert open_job(tmp_path / "outputs").sources[0].path.parent.name == "iteration_20"

    def test_captures_of_one_folder(self, tmp_path):
        job = open_job(self.touch(tmp_path, "rank0_step1.json", "rank0_step2.json"))
        assert [source.path.name for source in job.sources] == ["rank0_step2.json"]
        assert job.captures == (0, 1)
        assert job.capture == 1
