"""``perfscope export`` as a user runs it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from perfscope.cli.main import main
from tests.analyzers.export.chakra_file import read_job
from tests.generator import JobSpec, simulate


def test_it_says_what_it_wrote_and_what_simulators_are_to_be_given(tmp_path: Path) -> None:
    simulate(JobSpec(ranks=2, steps=3)).write(tmp_path / "traces")
    result = CliRunner().invoke(main, ["export", str(tmp_path / "traces"), "--chakra", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    files, _ = read_job(tmp_path / "out")
    nodes = sum(len(file.nodes) for file in files.values())
    assert f"ranks 0, 1, 3 steps (10-12): {nodes:,} nodes" in result.stdout
    assert f"workload: {tmp_path / 'out' / 'perfscope'}\n" in result.stdout
    assert f"groups: {tmp_path / 'out' / 'comm_group.json'}\n" in result.stdout


def test_what_cannot_be_read_ends_with_2(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "nowhere"), "--chakra", "x"], [str(tmp_path)]):
        result = CliRunner().invoke(main, ["export", *arguments])
        assert result.exit_code == 2
        assert "Traceback" not in result.output
