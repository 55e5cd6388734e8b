"""Runs of a command: ended when they should be, and of no use when they fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.history.rank_history import RankStepTimes
from perfscope.collectors.overrides.overrides import Overrides
from perfscope.errors import UnusableInput
from perfscope.recording.metadata import RunMetadata
from perfscope.tune import trials
from perfscope.tune.search import TrialFailed
from perfscope.tune.trials import Command, Trials, overrides_of, record
from tests.waiting import until


def python(folder: Path, code: str, **known: Any) -> Command:
    return Command(words=(sys.executable, "-c", code), folder=folder, **known)


def applied(**entries: dict[str, Any]) -> RunMetadata:
    return RunMetadata(rank=1, applied={name.replace("__", "."): entry for name, entry in entries.items()})


def test_a_command_that_fails_is_reported_with_its_last_output(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"exit code 1.*ValueError: no data"):
        record(python(tmp_path, "raise ValueError('no data')"))


def test_the_ranks_own_error_is_reported_and_not_the_launchers(tmp_path: Path) -> None:
    (tmp_path / trials.OUTPUT_FILE).write_text(
        "[rank1]:   File x\n[rank1]: AssertionError: no optimizer\nTraceback:\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED\n",
        encoding="utf-8",
    )
    assert "AssertionError: no optimizer (" in trials._tail(tmp_path)


def test_a_missing_command_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match="no-such-command cannot be run"):
        record(Command(words=("no-such-command",), folder=tmp_path))


def test_a_trial_without_steps_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match=r"no step was measured.*never trained"):
        Trials(python(tmp_path, "print('never trained')"), 10).measure({})


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="no step was measured"):
        Trials(python(tmp_path, "import time; time.sleep(6000)", limit_s=0.5), 10).measure({})


def test_what_a_dead_launcher_leaves_is_ended_too(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(6000)']); "
        "print(child.pid)"
    )
    with pytest.raises(TrialFailed):
        Trials(python(tmp_path, code), 10).measure({})
    child = int((tmp_path / "trial-00" / "output.log").read_text())
    until(lambda: not _runs(child), "the rank has ended with its trial")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_that_left_are_given_time_and_then_the_command_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "GRACE_S", 0.3)
    code = (
        "import os, pathlib, time; folder = pathlib.Path(os.environ['PYTHONPATH'].split(os.pathsep)[0]); "
        "(folder / 'stopped-0').touch(); time.sleep(6000)"
    )
    with pytest.raises(TrialFailed):
        Trials(python(tmp_path, code), 10).measure({})


def test_the_commands_environment_is_not_ours(tmp_path: Path) -> None:
    """Nothing of a trial stays in this process, and the unchanged job gets no overrides at all."""
    before = dict(os.environ)
    code = "import os; print(os.environ.get('TRIED'), sorted(os.listdir(os.environ['PYTHONPATH'].split(':')[0])))"
    run = Trials(python(tmp_path, code), 10)
    for settings in ({}, {"env.TRIED": 3}):
        with pytest.raises(TrialFailed):
            run.measure(settings)
    plain, tried = ((tmp_path / f"trial-0{number}" / "output.log").read_text() for number in range(2))
    assert plain.startswith("None")
    assert "overrides.json" not in plain
    assert tried.startswith("3")
    assert "overrides.json" in tried
    assert dict(os.environ) == before


def test_settings_as_the_ranks_read_them(tmp_path: Path) -> None:
    command = Command(words=("x",), folder=tmp_path, datasets=("D",), microbatches=2)
    found = overrides_of(command, {"env.A": 3, "env.B": None, "ddp.bucket_cap_mb": 4.0})
    assert found == Overrides(
        settings={"ddp.bucket_cap_mb": 4.0}, environment={"A": "3", "B": None}, datasets=("D",), microbatches=2
    )


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (applied(), "never reached the code where"),
        (applied(ddp__static_graph={"times": 0, "refused": "not so"}), "rank 1: not so"),
        (applied(ddp__static_graph={"times": 1, "refused": "script holds back"}), "rank 1: script holds back"),
    ],
)
def test_a_setting_that_was_not_in_force_proves_nothing(run: RunMetadata, why: str) -> None:
    with pytest.raises(TrialFailed, match=why):
        trials._check_applied([run], {"ddp.static_graph": True})
    trials._check_applied([applied(ddp__static_graph={"times": 1, "refused": ""})], {"ddp.static_graph": True})


def test_variables_that_the_script_sets_itself_prove_nothing() -> None:
    def run(threads: int, **environment: str) -> RunMetadata:
        entry = {"times": 1, "refused": ""}
        log = {"env.OMP_NUM_THREADS": entry, "env.NCCL_ALGO": entry}
        return RunMetadata(cpu_threads=threads, environment=environment, applied=log)

    trials._check_applied([run(4, OMP_NUM_THREADS="4")], {"env.OMP_NUM_THREADS": 4})
    trials._check_applied([run(4)], {"env.NCCL_ALGO": None})
    with pytest.raises(TrialFailed, match="set_num_threads"):
        trials._check_applied([run(1, OMP_NUM_THREADS="4")], {"env.OMP_NUM_THREADS": 4})
    with pytest.raises(TrialFailed, match="sets NCCL_ALGO itself, to Tree"):
        trials._check_applied([run(1, NCCL_ALGO="Tree")], {"env.NCCL_ALGO": "Ring"})
    with pytest.raises(TrialFailed, match="sets NCCL_ALGO itself"):
        trials._check_applied([run(1, NCCL_ALGO="Tree")], {"env.NCCL_ALGO": None})


def test_workers_are_given_time_to_use_up_what_they_hold(tmp_path: Path) -> None:
    command = Command(words=("x",), folder=tmp_path)
    assert trials._queued(command, {}) == (0, 0)
    assert trials._queued(command, {"dataloader.num_workers": 4}) == (4, 8)
    accumulating = Command(words=("x",), folder=tmp_path, workers=3, prefetch=2, microbatches=4)
    assert trials._queued(accumulating, {}) == (3, 2)


def test_steps_that_all_ranks_took_are_compared() -> None:
    def steps(first: int, last: int) -> RankStepTimes:
        number = np.arange(first, last + 1)
        us = number * 10.0
        undisturbed, began_ns = np.zeros(len(number), dtype=bool), number * 10_000
        return RankStepTimes(0, 0, (), number, us, us[:, None], undisturbed, None, np.zeros(len(number)), began_ns)

    assert trials._common([steps(0, 9), steps(0, 7)], 5).tolist() == [[50, 60, 70], [50, 60, 70]]
