"""``perfscope trigger`` asks every training that records into the folder, each at its own pace."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from perfscope.cli.main import main
from perfscope.collectors.agreement import Board, Request, open_board
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch.folder import package_root
from perfscope.collectors.launch.run import Launch
from perfscope.recording.paths import BOOTSTRAP_FOLDER, job_folder


@pytest.fixture
def jobs(tmp_path: Path) -> list[Path]:
    """The folders of a command under way, of two roles."""
    folder = tmp_path / "r"
    Launch(CollectorConfig(output=str(folder), package_root=package_root()), ["python"]).prepare()
    (job_folder(folder, 1) / BOOTSTRAP_FOLDER).mkdir(parents=True)
    open_board(job_folder(folder, 1))
    return [folder, job_folder(folder, 1)]


def requests(jobs: list[Path]) -> list[Request | None]:
    boards = [Board(folder, 0) for folder in jobs]
    for board in boards:
        board.look()
    return [board.open_request() for board in boards]


@pytest.mark.parametrize(
    ("options", "request_of_each", "said"),
    [
        ((), Request(0, None), "a capture of 8 steps"),
        (("--steps", "3"), Request(0, 3), "a capture of 3 steps"),
        (("--seconds", "2.5"), Request(0, None, 2.5), "a capture of 2.5 s"),
    ],
)
def test_every_job_of_the_folder_is_asked(
    jobs: list[Path], options: tuple[str, ...], request_of_each: Request, said: str
) -> None:
    asked = CliRunner().invoke(main, ["trigger", str(jobs[0]), *options])
    assert asked.exit_code == 0, asked.output
    assert said in asked.output
    assert requests(jobs) == [request_of_each, request_of_each]


@pytest.mark.parametrize("options", [("--steps", "3", "--seconds", "2"), ("--seconds", "0"), ("--seconds", "nan")])
def test_what_cannot_be_meant_is_refused(jobs: list[Path], options: tuple[str, ...]) -> None:
    assert CliRunner().invoke(main, ["trigger", str(jobs[0]), *options]).exit_code == 2
    assert requests(jobs) == [None, None]
