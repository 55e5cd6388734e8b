"""What a folder holds: a recording, traces of other tools, Nsight Systems reports, or nothing that can be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perfscope.errors import UnusableInput
from perfscope.recording import metadata, paths
from perfscope.recording.job import open_job, rank_in_name
from perfscope.recording.metadata import CaptureMetadata, LaunchMetadata, RunMetadata, StepsMetadata


def record(folder: Path, rank: int, capture: int = 0, *, compressed: bool = True) -> None:
    paths.trace_file(folder, rank, capture, compressed=compressed).write_bytes(b"")
    metadata.save(RunMetadata(rank=rank, world_size=2), paths.run_file(folder, rank))


def test_a_recording_s_traces_and_metadata(tmp_path):
    for rank in (0, 1):
        record(tmp_path, rank)
    metadata.save(LaunchMetadata(command=("torchrun", "train.py"), exit_code=0), tmp_path / paths.LAUNCH_FILE)
    (tmp_path / "rank-00001.capture-0.trace.json.gz.partial").write_bytes(b"half")
    job = open_job(tmp_path)
    assert [(source.path.name, source.named_rank) for source in job.sources] == [
        ("rank-00000.capture-0.trace.json.gz", 0),
        ("rank-00001.capture-0.trace.json.gz", 1),
    ]
    assert sorted(job.runs) == [0, 1]
    assert job.launch is not None
    assert job.launch.command == ("torchrun", "train.py")


def test_the_capture_that_most_ranks_have_is_chosen(tmp_path):
    for rank, capture in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2)):
        record(tmp_path, rank, capture)
    assert open_job(tmp_path).capture == 1
    assert open_job(tmp_path, capture=0).capture == 0
    with pytest.raises(UnusableInput, match="no capture 7; choose from 0, 1, 2"):
        open_job(tmp_path, capture=7)


def test_a_capture_not_yet_compressed_counts_once(tmp_path):
    record(tmp_path, 0, compressed=False)
    record(tmp_path, 0, compressed=True)
    assert len(open_job(tmp_path).sources) == 1


def test_traces_of_other_tools(tmp_path):
    for name in ("rank0.json", "rank1.json.gz", "notes.txt", "review.json"):
        (tmp_path / name).write_text('{"schema": "perfscope.summary/1"}' if name == "review.json" else "{}")
    job = open_job(tmp_path)
    assert [source.path.name for source in job.sources] == ["rank0.json", "rank1.json.gz"]
    assert job.problems == ()


class TestNsightSystems:
    def names(self, folder):
        return [(source.path.name, source.named_rank) for source in open_job(folder).sources]

    def export(self, folder, age_s=0):
        folder.mkdir()
        (folder / "StringIds.parquet").write_bytes(b"PAR1")
        os.utime(folder, (1e9 - age_s, 1e9 - age_s))

    def file(self, path, age_s=0):
        path.write_bytes(b"x")
        os.utime(path, (1e9 - age_s, 1e9 - age_s))

    def test_reports_and_exports_are_traces(self, tmp_path):
        for name in ("rank0.nsys-rep", "rank1.sqlite", "rank2.qdrep", "notes.db"):
            self.file(tmp_path / name)
        self.export(tmp_path / "rank3_pqtdir")
        assert self.names(tmp_path) == [
            ("rank0.nsys-rep", 0), ("rank1.sqlite", 1), ("rank2.qdrep", 2), ("rank3_pqtdir", 3),
        ]  # fmt: skip
        assert self.names(tmp_path / "rank3_pqtdir") == [("rank3_pqtdir", 3)]
        assert self.names(tmp_path / "rank0.nsys-rep") == [("rank0.nsys-rep", 0)]

    def test_a_report_counts_once_by_its_export(self, tmp_path):
        self.file(tmp_path / "rank0.nsys-rep", age_s=9)
        self.file(tmp_path / "rank0.sqlite")
        self.export(tmp_path / "rank0_pqtdir")
        assert self.names(tmp_path) == [("rank0.sqlite", 0)]

    def test_an_export_of_an_earlier_report_of_that_name_does_not_count(self, tmp_path):
        self.file(tmp_path / "rank0.nsys-rep")
        self.file(tmp_path / "rank0.sqlite", age_s=9)
        assert self.names(tmp_path) == [("rank0.nsys-rep", 0)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3),
        ("trace_rank-12.json.gz", 12),
        ("rank_7_trace.json", 7),
        ("frank3.json", None),
        ("trace.json", None),
    ],
)
def test_ranks_in_names(name, rank):
    assert rank_in_name(Path(name)) == rank


class TestNothingToRead:
    def test_no_such_folder(self, tmp_path):
        with pytest.raises(UnusableInput, match="no such file or folder"):
            open_job(tmp_path / "nowhere")

    def test_an_empty_folder_says_how_to_record(self, tmp_path):
        with pytest.raises(UnusableInput, match=r"no trace in this folder .*perfscope run"):
            open_job(tmp_path)

    def test_traces_one_level_down_are_pointed_at(self, tmp_path):
        for name in ("before", "after"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "rank0.json").write_text("{}")
        with pytest.raises(UnusableInput, match=r"there are traces in .*after, .*before: name one of these"):
            open_job(tmp_path)

    def test_a_recording_in_which_no_process_stepped(self, tmp_path):
        metadata.save(LaunchMetadata(command=("python", "x.py"), exit_code=3), tmp_path / paths.LAUNCH_FILE)
        with pytest.raises(UnusableInput, match=r"ended with 3.*perfscope\.step\(\)"):
            open_job(tmp_path)

    def test_a_recording_under_way_is_not_called_empty(self, tmp_path):
        metadata.save(LaunchMetadata(command=("python", "x.py")), tmp_path / paths.LAUNCH_FILE)
        metadata.save(RunMetadata(rank=0, outcome="running"), paths.run_file(tmp_path, 0))
        with pytest.raises(UnusableInput, match=r"nothing is recorded yet.*analyze again later"):
            open_job(tmp_path)

    @pytest.mark.parametrize(
        ("outcome", "said"), [("finished", "ended after 3 steps,"), ("running", "was killed after 3 steps or more,")]
    )
    def test_a_recording_that_ended_before_the_first_capture(self, tmp_path, outcome, said):
        run = RunMetadata(
            rank=0, steps=StepsMetadata(seen=3, detected_by="optimizer"), problems=("The script crashed.",),
            outcome=outcome,
        )  # fmt: skip
        metadata.save(run, paths.run_file(tmp_path, 0))
        metadata.save(LaunchMetadata(command=("python", "x.py"), exit_code=3), tmp_path / paths.LAUNCH_FILE)
        with pytest.raises(UnusableInput, match=rf"{said}.*--wait 1 --warmup 0 --active 2.*The script crashed\."):
            open_job(tmp_path)


class TestMetadata:
    def test_round_trip(self, tmp_path):
        run = RunMetadata(
            rank=3, world_size=8, strategies=("ddp",), settings={"ddp": {"bucket_cap_mb": 25.0}},
            captures=(CaptureMetadata(file="x", first_step=8, last_step=15),),
            steps=StepsMetadata(seen=20, unprofiled_ns=(5, 6)),
        )  # fmt: skip
        metadata.save(run, tmp_path / "run.json")
        assert metadata.load_run(tmp_path / "run.json") == run

    def test_keys_of_a_newer_version_are_ignored(self, tmp_path):
        path = tmp_path / "run.json"
        path.write_text('{"schema": "perfscope.run/1", "rank": 2, "invented_later": {"a": 1}}')
        assert metadata.load_run(path).rank == 2

    @pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/1"}', ""])
    def test_a_broken_file_is_named(self, tmp_path, text):
        path = tmp_path / "rank-00000.run.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"rank-00000\.run\.json"):
            metadata.load_run(path)
