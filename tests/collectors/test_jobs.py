"""Which recording a process belongs to, where one command runs several trainings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perfscope.collectors.jobs import MOST_JOBS
from perfscope.recording.metadata import CaptureMetadata, RunMetadata, save
from perfscope.recording.paths import BOOTSTRAP_FOLDER, further_jobs, run_file

_JOIN = """
import os, sys
from pathlib import Path
from perfscope.collectors.identity import Identity
from perfscope.collectors.jobs import join_job
place = join_job(Path(sys.argv[1]), Identity(int(sys.argv[2]), int(sys.argv[3])))
print(place if isinstance(place, Path) else "", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    return tmp_path


@contextmanager
def process(folder: Path, rank: int, size: int, *, port: str = "", attempt: int = 0) -> Iterator[str]:
    """A process that trains as this rank until the block ends; the name of the folder that it records in."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port} if port else {}
    started = subprocess.Popen(
        [sys.executable, "-c", _JOIN, str(folder), str(rank), str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"PYTHONPATH": ":".join(sys.path), "TORCHELASTIC_RESTART_COUNT": str(attempt), **place},
    )  # fmt: skip
    assert started.stdout is not None
    line = started.stdout.readline().strip()
    try:
        yield "" if not line else "." if Path(line) == folder else Path(line).name
    finally:
        started.communicate("")


def recorded(folder: Path, rank: int, size: int) -> None:
    capture = CaptureMetadata(file=f"rank-{rank:05d}.capture-0.trace.json.gz", first_step=8, last_step=15)
    save(RunMetadata(rank=rank, world_size=size, captures=(capture,)), run_file(folder, rank))


def test_ranks_of_one_job_share_a_folder(folder: Path) -> None:
    with process(folder, 1, 2, port="1") as one, process(folder, 0, 2, port="1") as other:
        assert (one, other) == (".", ".")
    assert further_jobs(folder) == []


def test_a_notebooks_ranks_are_a_job_beside_its_own_training(folder: Path) -> None:
    with (
        process(folder, 0, 1) as trial,
        process(folder, 1, 2, port="1") as one,
        process(folder, 0, 2, port="1") as other,
    ):
        assert (trial, one, other) == (".", "job-1", "job-1")


def test_two_launchers_side_by_side_do_not_mix(folder: Path) -> None:
    with (
        process(folder, 0, 2, port="1") as a,
        process(folder, 1, 2, port="2") as b,
        process(folder, 1, 2, port="1") as c,
        process(folder, 0, 2, port="2") as d,
    ):
        assert (a, c) == (".", ".")
        assert (b, d) == ("job-1", "job-1")


def test_what_follows_a_training_that_recorded_nothing_takes_its_place(folder: Path) -> None:
    with process(folder, 0, 2, port="1"):
        pass
    with process(folder, 0, 4, port="2") as later, process(folder, 3, 4, port="2") as beside:
        assert (later, beside) == (".", ".")


def test_what_follows_a_recorded_training_stands_beside_it(folder: Path) -> None:
    with process(folder, 0, 1):
        recorded(folder, 0, 1)
    with process(folder, 0, 1) as later:
        assert later == "job-1"


def test_an_elastic_restart_goes_on_in_its_folder_with_another_size_and_port(folder: Path) -> None:
    with process(folder, 0, 4, port="1"):
        recorded(folder, 0, 4)
    with process(folder, 0, 3, port="2", attempt=1) as first, process(folder, 2, 3, port="2", attempt=1) as last:
        assert (first, last) == (".", ".")
        with process(folder, 0, 4, port="1") as stale:
            assert stale == ""


def test_a_search_makes_no_more_than_so_many_recordings(folder: Path) -> None:
    for number in range(MOST_JOBS):
        with process(folder, 0, 1) as place:
            assert place == (f"job-{number}" if number else ".")
            recorded(folder / place, 0, 1)
    with process(folder, 0, 1) as one_more:
        assert one_more == ""


def test_a_broken_description_of_a_job_is_replaced(folder: Path) -> None:
    (folder / BOOTSTRAP_FOLDER / "claim-job.json").write_text("{")
    with process(folder, 0, 1) as place:
        assert place == "."
