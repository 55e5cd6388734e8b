from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfscope.collectors.claims import Claim, claim_rank
from perfscope.collectors.identity import Identity, attempt, from_environment
from perfscope.paths import BOOTSTRAP_FOLDER


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, Identity()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Identity(5, 8, 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, Identity(2, 4, 0, 1)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}, Identity(1, 2, 1, 1)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, Identity(3, 4, 0, 1)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}, Identity(3, 4, 1, 1)),
        # a batch script outside srun: the allocation is larger, this process is alone
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Identity()),
        # torchrun inside srun: torchrun's word counts
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "9", "WORLD_SIZE": "16"}, Identity(9, 16, 0, 1)),
        ({"RANK": "not a number", "WORLD_SIZE": "8"}, Identity()),
    ],
)
def test_launchers_variables(environment: dict[str, str], identity: Identity) -> None:
    assert from_environment(environment) == identity


def test_elastic_restarts_are_counted() -> None:
    assert attempt({}) == 0
    assert attempt({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    return tmp_path


def claim_elsewhere(folder: Path, attempt: int = 0, *, then: str = "") -> subprocess.Popen[str]:
    """Another process claims rank 0 and has done so when this returns."""
    code = (
        "import sys; from pathlib import Path; from perfscope.collectors.claims import claim_rank;"
        f"print(claim_rank(Path({str(folder)!r}), 0, {attempt}, recorded=False), flush=True); {then}"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    return process


def test_a_rank_is_claimed_once_and_by_its_holder_again(folder: Path) -> None:
    assert claim_rank(folder, 0, 0, recorded=False) is None
    assert claim_rank(folder, 0, 0, recorded=False) is None
    assert claim_rank(folder, 1, 0, recorded=False) is None


def test_a_living_holder_keeps_the_claim_and_a_later_attempt_takes_it(folder: Path) -> None:
    process = claim_elsewhere(folder, then="sys.stdin.read()")
    try:
        holder = claim_rank(folder, 0, 0, recorded=False)
        assert holder is not None
        assert holder.pid == process.pid
        assert claim_rank(folder, 0, 1, recorded=False) is None
    finally:
        process.communicate("")


def test_a_dead_holder_is_replaced_unless_it_left_a_recording(folder: Path) -> None:
    process = claim_elsewhere(folder)
    process.communicate("")
    assert claim_rank(folder, 0, 0, recorded=True) is not None
    assert claim_rank(folder, 0, 0, recorded=False) is None


def test_an_earlier_attempt_does_not_take_a_claim_back(folder: Path) -> None:
    claim_elsewhere(folder, attempt=3).communicate("")
    assert claim_rank(folder, 0, 2, recorded=False) is not None


def test_another_process_with_the_same_pid_is_not_the_holder() -> None:
    mine = Claim.mine(0)
    assert mine.alive()
    assert not Claim(mine.host, os.getpid(), "another time", 0).alive()


def test_a_broken_claim_is_replaced(folder: Path) -> None:
    (folder / BOOTSTRAP_FOLDER / "claim-00000.json").write_text("{")
    assert claim_rank(folder, 0, 0, recorded=False) is None
