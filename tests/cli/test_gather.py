"""``perfscope gather`` on the command line."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from perfscope.cli.main import main
from perfscope.recording.metadata import RunMetadata, save
from perfscope.recording.paths import run_file


def node(folder: Path, rank: int, world_size: int) -> str:
    folder.mkdir()
    save(RunMetadata(rank=rank, world_size=world_size), run_file(folder, rank))
    return str(folder)


def test_it_prints_what_it_gathered_and_what_comes_next(tmp_path: Path) -> None:
    folders = [node(tmp_path / "a", 0, 2), node(tmp_path / "b", 1, 2)]
    done = CliRunner().invoke(main, ["gather", *folders, "--output", str(tmp_path / "all")])
    assert done.exit_code == 0, done.output
    assert "perfscope: gathered all 2 ranks, 2 files" in done.stderr
    assert f"next: perfscope analyze {tmp_path / 'all'}" in done.stderr


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["gather", node(tmp_path / "a", 1, 4), "-o", str(tmp_path / "all")])
    assert done.exit_code == 0
    assert "gathered 1 of 4 ranks" in done.stderr
    assert "ranks 0, 2, 3 wrote no files" in done.stderr


def test_what_cannot_be_gathered_ends_with_2(tmp_path: Path) -> None:
    folders = [node(tmp_path / "a", 0, 2), node(tmp_path / "b", 0, 2)]
    done = CliRunner().invoke(main, ["gather", *folders, "--output", str(tmp_path / "all")])
    assert done.exit_code == 2
    assert "holds rank 0" in done.stderr
