"""Ranks choose the same folder, and never one of another recording."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from perfscope.collectors.claims import Claim
from perfscope.collectors.identity import Identity
from perfscope.collectors.inprocess import place
from perfscope.collectors.inprocess.place import Opened, _open, agree
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE, run_file


def opened(identity: str, attempt: int = 0, job: str = "job") -> Opened:
    return Opened(identity, job, attempt)


def test_the_first_rank_opens_and_the_others_find_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rank: _open(tmp_path / "r", opened("a"), rank, overwrite=False), range(8)))
    assert {folder for folder, _ in found} == {tmp_path / "r"}
    assert sum(first for _, first in found) == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_another_rank_opens_while_this_one_looks_is_its_own(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has written its first file between the two looks."""
    read, looked = place._read, []

    def read_and_lose(folder: Path) -> Opened | None:
        there = read(folder)
        if not looked:
            looked.append(folder)
            assert _open(folder, opened("a"), 0, overwrite=overwrite) == (folder, True)
            (folder / LAUNCH_FILE).write_text("{}")
        return there

    monkeypatch.setattr(place, "_read", read_and_lose)
    assert _open(tmp_path / "r", opened("a"), 1, overwrite=overwrite) == (tmp_path / "r", False)
    assert (tmp_path / "r" / LAUNCH_FILE).exists()


def test_another_recording_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / LAUNCH_FILE).write_text("{}")  # perfscope run's
    for rank in range(2):
        assert _open(tmp_path / "r", opened("a"), rank, overwrite=False)[0] == tmp_path / "r-2"
    assert _open(tmp_path / "r", opened("b"), 0, overwrite=False) == (tmp_path / "r-3", True)
    assert _open(tmp_path / "r", opened("a"), 2, overwrite=False) == (tmp_path / "r-2", False)


def test_a_folder_with_files_of_the_users_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert _open(tmp_path, opened("a"), 0, overwrite=True) == (tmp_path, True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwriting_removes_the_old_recording_once(tmp_path: Path) -> None:
    _open(tmp_path / "r", opened("old"), 0, overwrite=False)
    run_file(tmp_path / "r", 0).write_text("{}")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rank: _open(tmp_path / "r", opened("new"), rank, overwrite=True), range(8)))
    assert {folder for folder, _ in found} == {tmp_path / "r"}
    assert sum(first for _, first in found) == 1
    assert not run_file(tmp_path / "r", 0).exists()


def test_a_restarted_job_goes_on_in_its_last_folder(tmp_path: Path) -> None:
    _open(tmp_path / "r", opened("a", job="earlier"), 0, overwrite=False)
    _open(tmp_path / "r", opened("b"), 0, overwrite=False)
    assert _open(tmp_path / "r", opened("c", attempt=1), 0, overwrite=False) == (tmp_path / "r-2", False)
    assert _open(tmp_path / "r", opened("c", 1, job="none"), 0, overwrite=False) == (tmp_path / "r-3", True)


def test_ranks_that_ended_leave_their_folder_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group, two jobs of one launcher may name themselves alike."""
    folder = tmp_path / "r"
    _open(folder, opened("a"), 0, overwrite=False)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    claim = Claim(Claim.mine(0).host, ended.pid, "1", 0)
    (folder / BOOTSTRAP_FOLDER / "claim-00000.json").write_text(json.dumps(asdict(claim)))
    assert _open(folder, opened("a"), 0, overwrite=False) == (folder, False)  # it recorded nothing
    monkeypatch.setattr(place, "earlier_run", lambda *_: "what it recorded")
    assert _open(folder, opened("a"), 0, overwrite=False) == (tmp_path / "r-2", True)


class Store:
    """The store of a process group."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.held.get(key, "") == expected:
            self.held[key] = desired
        return self.held[key].encode()


def test_ranks_agree_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    module: Any = type(sys)("torch.distributed.distributed_c10d")
    module._get_default_store = lambda: store
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)
    ranks = [Identity(rank, 4, rank, 4, "gloo") for rank in range(4)]
    assert len({agree("r/1", rank) for rank in ranks}) == 1
    assert agree("r/2", ranks[0]) != agree("r/1", ranks[0])


def test_without_a_process_group_the_launcher_names_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = agree("r/1", Identity(0, 2, 0, 2, ""))
    assert agree("r/1", Identity(1, 2, 1, 2, "")) == first
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert agree("r/1", Identity(0, 2, 0, 2, "")) != first
    assert agree("r/1", Identity()) != agree("r/1", Identity())
