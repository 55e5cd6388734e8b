"""``perfscope watch`` from the command line, where no terminal is."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perfscope.analyzers.live import job
from perfscope.cli.main import main
from tests.analyzers.live.live_jobs import Recorded
from tests.schemas import follows
from tests.waiting import free_port


@pytest.fixture
def ended(tmp_path: Path) -> Recorded:
    """A job that has ended."""
    job = Recorded(tmp_path / "recording")
    job.launch(exit_code=0)
    job.ranks(outcome="finished")
    job.all_step(0, 100, slow={1: {"dataloader": 12.0, "backward": 10.0}})
    return job


def watch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["watch", *map(str, arguments)])


def test_a_pipe_gets_a_line_until_the_job_has_ended(ended: Recorded) -> None:
    result = watch(ended.folder)
    assert result.exit_code == 0
    (line,) = result.output.splitlines()
    assert "the job has ended: exit code 0 | step 99 | 40.0 ms" in line
    assert "rank 1 10.0 ms later in loading" in line


def test_once_looks_once_at_what_is_not_there_yet(tmp_path: Path) -> None:
    result = watch(tmp_path / "later", "--once", "--json")
    assert result.exit_code == 0
    assert json.loads(result.output)["state"] == "waiting"


def test_json_has_every_rank(ended: Recorded) -> None:
    values = json.loads(watch(ended.folder, "--json").output)
    follows("live", values)
    assert [row["state"] for row in values["ranks"]] == ["finished"] * 2
    assert values["stragglers"][0]["ranks"] == [1]


@pytest.mark.parametrize("option", ["--once", "--plain"])
def test_the_only_look_and_the_last_one_read_all_ranks(
    ended: Recorded, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a look has no time for the metadata of any."""
    monkeypatch.setattr(job, "BUDGET_S", -1.0)
    values = json.loads(watch(ended.folder, "--json", option).output)
    assert [row["state"] for row in values["ranks"]] == ["finished"] * 2


def test_a_port_that_is_taken_and_an_option_that_does_nothing_are_refused(ended: Recorded) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (the prometheus extra)")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = watch(ended.folder, "--prometheus", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "choose another port" in result.output
    result = watch(ended.folder, "--quiet")
    assert result.exit_code == 2
    assert "--quiet needs" in result.output


def test_quiet_prints_nothing_and_serves(ended: Recorded) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (the prometheus extra)")
    port = free_port()
    result = watch(ended.folder, "--quiet", "--prometheus", str(port))
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"http://127.0.0.1:{port}/metrics" in result.stderr
