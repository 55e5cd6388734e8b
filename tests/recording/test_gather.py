"""Folders of one run become one recording; folders that are not of one run do not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from perfscope.errors import PerfscopeError, UnusableInput
from perfscope.recording.gather import gather
from perfscope.recording.job import open_job
from perfscope.recording.metadata import LaunchMetadata, RunMetadata, load_launch, save
from perfscope.recording.paths import LAUNCH_FILE, run_file, samples_file, trace_file


def node(folder: Path, *ranks: int, world_size: int = 4, launch: dict[str, Any] | None = None, **run: Any) -> Path:
    """A node's folder: of each rank the metadata and a capture, of the host its samples."""
    folder.mkdir(parents=True)
    host = f"host-of-{folder.name}"
    for rank in ranks:
        known = {"started_at": "2025-03-04T09:15:00+00:00", "rendezvous": "node0:29500", "host": host}
        save(RunMetadata(rank=rank, world_size=world_size, **{**known, **run}), run_file(folder, rank))
        trace_file(folder, rank, 0).write_bytes(f"trace of {rank}".encode())
    samples_file(folder, host).write_text(f"samples of {folder.name}\n")
    record = {"host": host, "command": ("torchrun", folder.name), "started_at": "2025-03-04T09:14:00+00:00"}
    save(LaunchMetadata(**{**record, "exit_code": 0, **(launch or {})}), folder / LAUNCH_FILE)
    (folder / ".bootstrap").mkdir()
    (folder / "report.html").write_text("an early look at half of it")
    (folder / "rank-00009.capture-0.trace.json.gz.partial").write_text("cut")
    return folder


def pair(tmp_path: Path, **second: Any) -> list[str]:
    return [str(node(tmp_path / "a", 0, 1)), str(node(tmp_path / "b", 2, 3, **second))]


def test_every_nodes_files_in_one_folder(tmp_path: Path) -> None:
    result = gather(pair(tmp_path), tmp_path / "all")
    assert (result.ranks, result.missing, result.world_size, result.files) == ((0, 1, 2, 3), (), 4, 10)
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        "perfscope.json", "host-host-of-a.samples.jsonl", "host-host-of-b.samples.jsonl",
        *(f"rank-0000{rank}.{what}" for rank in range(4) for what in ("run.json", "capture-0.trace.json.gz")),
    }  # fmt: skip
    assert result.bytes == sum(path.stat().st_size for path in (tmp_path / "all").iterdir() if path.name != LAUNCH_FILE)
    job = open_job(tmp_path / "all")
    assert [source.path.read_bytes() for source in job.sources] == [f"trace of {rank}".encode() for rank in range(4)]
    assert len(job.samples) == 2


def test_the_launches_are_put_side_by_side(tmp_path: Path) -> None:
    second, first = pair(tmp_path, launch={"exit_code": 1, "started_at": "2025-03-04T09:13:00+00:00"})[::-1]
    gather([second, first], tmp_path / "all")
    launch = load_launch(tmp_path / "all" / LAUNCH_FILE)
    # The folders' order does not matter: the lowest rank's comes first.
    assert (launch.command, launch.host) == (("torchrun", "a"), "host-of-a")
    assert (launch.exit_code, launch.started_at) == (1, "2025-03-04T09:13:00+00:00")
    assert [(each.host, each.ranks, each.exit_code) for each in launch.nodes] == [
        ("host-of-a", (0, 1), 0), ("host-of-b", (2, 3), 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("codes", "merged"), [((0, 0), 0), ((0, None), None), ((None, -9), -9)])
def test_the_exit_code_of_all(tmp_path: Path, codes: tuple[int | None, int | None], merged: int | None) -> None:
    folders = [
        str(node(tmp_path / name, rank, launch={"exit_code": code}))
        for name, rank, code in zip("ab", (0, 1), codes, strict=True)
    ]
    gather(folders, tmp_path / "all")
    assert load_launch(tmp_path / "all" / LAUNCH_FILE).exit_code == merged


def test_missing_nodes_are_counted(tmp_path: Path) -> None:
    result = gather([str(node(tmp_path / "b", 2, 3))], tmp_path / "all")
    assert result.missing == (0, 1)


def test_a_rank_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folders = [str(node(tmp_path / "a", 0, 1)), str(node(tmp_path / "b", 1, 2))]
    with pytest.raises(UnusableInput, match=r"b: holds rank 1, and so does .*a\. .*--node-rank"):
        gather(folders, tmp_path / "all", force=True)
    assert not (tmp_path / "all").exists()


def test_a_rank_that_moved_in_a_restart_is_taken_from_its_last_attempt(tmp_path: Path) -> None:
    folders = [str(node(tmp_path / "a", 0, 1)), str(node(tmp_path / "b", 1, 2, 3, attempt=1, rendezvous="node1:1"))]
    trace_file(tmp_path / "b", 1, 0).write_bytes(b"second attempt")
    assert gather(folders, tmp_path / "all").ranks == (0, 1, 2, 3)
    assert trace_file(tmp_path / "all", 1, 0).read_bytes() == b"second attempt"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"world_size": 8}, "the number of ranks is 8, that of .*a 4"),
        ({"rendezvous": "node9:29500"}, "rendezvous is node9:29500, that of .*a node0:29500"),
        ({"started_at": "2025-03-04T10:15:00+00:00"}, "time of the first step is 2025-03-04T10:15:00"),
    ],
)
def test_folders_of_two_runs_are_refused_unless_forced(tmp_path: Path, other: dict[str, Any], why: str) -> None:
    folders = pair(tmp_path, **other)
    with pytest.raises(UnusableInput, match=rf"b: .*{why}.*--force"):
        gather(folders, tmp_path / "all")
    assert gather(folders, tmp_path / "all", force=True).ranks == (0, 1, 2, 3)


def test_clocks_may_differ_by_minutes_and_knowledge_may_be_missing(tmp_path: Path) -> None:
    folders = pair(tmp_path, started_at="2025-03-04T09:20:00+00:00", rendezvous="")
    assert gather(folders, tmp_path / "all").missing == ()


def test_two_samplers_of_one_host_are_put_one_after_the_other(tmp_path: Path) -> None:
    folders = pair(tmp_path)
    samples_file(tmp_path / "b", "host-of-a").write_text("more of a\n")
    gather(folders, tmp_path / "all")
    assert samples_file(tmp_path / "all", "host-of-a").read_text() == "samples of a\nmore of a\n"


def test_another_file_of_one_name_is_refused(tmp_path: Path) -> None:
    folders = pair(tmp_path)
    for name in "ab":
        (tmp_path / name / "notes.txt").write_text(name)
    with pytest.raises(UnusableInput, match=r"b: holds notes\.txt, and so does"):
        gather(folders, tmp_path / "all")


def test_a_folder_without_ranks_a_place_that_is_taken_and_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnusableInput, match="no rank recorded anything here"):
        gather([str(tmp_path / "empty")], tmp_path / "all")
    (first, _) = pair(tmp_path)
    with pytest.raises(UnusableInput, match="a: not an empty folder; choose another with --output"):
        gather([first], tmp_path / "a")
    with pytest.raises(UnusableInput, match="nowhere: no such folder"):
        gather([str(tmp_path / "nowhere")], tmp_path / "all")


def test_a_folder_on_another_host_is_to_be_copied_first(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"rsync -a me@node1:/local/rec/ node-node1/, then perfscope gather"):
        gather(["me@node1:/local/rec"], tmp_path / "all")


def test_a_url_is_a_folder_too(tmp_path: Path) -> None:
    pytest.importorskip("upath", reason="universal-pathlib is not installed (the remote extra)")
    fsspec = pytest.importorskip("fsspec")
    first, second = pair(tmp_path)
    fsspec.filesystem("memory").put(f"{second}/", "/run/b/", recursive=True)
    try:
        assert gather([first, "memory:///run/b"], tmp_path / "all").missing == ()
    finally:
        fsspec.filesystem("memory").rm("/run", recursive=True)
    assert trace_file(tmp_path / "all", 3, 0).read_bytes() == b"trace of 3"


def test_a_damaged_record_is_copied_for_the_analysis_to_name(tmp_path: Path) -> None:
    folders = pair(tmp_path)
    run_file(tmp_path / "b", 3).write_text("{")
    (tmp_path / "b" / LAUNCH_FILE).write_text("{")
    assert gather(folders, tmp_path / "all").missing == ()
    assert [problem.rank for problem in open_job(tmp_path / "all").problems] == [3]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perfscope.recording.gather.shutil.copyfileobj", full)
    with pytest.raises(PerfscopeError, match="No space left on device"):
        gather(pair(tmp_path), tmp_path / "all")
    assert list((tmp_path / "all").iterdir()) == []


def test_a_gathered_launch_reads_back(tmp_path: Path) -> None:
    gather(pair(tmp_path), tmp_path / "all")
    path = tmp_path / "all" / LAUNCH_FILE
    launch = load_launch(path)
    assert json.loads(path.read_text())["nodes"] == [
        {**dataclasses.asdict(each), "command": list(each.command), "ranks": list(each.ranks)} for each in launch.nodes
    ]
