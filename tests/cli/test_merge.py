"""``perfscope merge`` and ``perfscope tensorboard`` as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import perfscope
from perfscope.cli.main import main
from tests.analyzers.merge.perfetto_file import read
from tests.generator import JobSpec, simulate


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    simulate(JobSpec(ranks=2, steps=4)).write(folder)
    return folder


def test_the_file_lies_among_the_traces_and_what_it_leaves_out_is_printed(traces: Path) -> None:
    result = run("merge", traces)
    assert result.exit_code == 0, result.output
    assert f"merged: {traces / 'merged.pftrace'}" in result.stdout
    assert "ui.perfetto.dev" in result.stdout
    assert "steps are left out" in result.stdout
    assert read(traces / "merged.pftrace").top("rank 1")
    assert not list(traces.glob("*.partial"))


def test_a_merged_file_is_not_taken_for_a_trace(traces: Path) -> None:
    run("merge", traces)
    assert perfscope.analyze(traces).job.failures == ()
    assert run("merge", traces).exit_code == 0


def test_analyzing_the_merged_file_says_what_it_is_and_what_to_do(traces: Path, tmp_path: Path) -> None:
    merged = perfscope.merge(traces, tmp_path / "other-name.bin").path
    result = run("analyze", merged)
    assert result.exit_code == 2
    assert "was written by perfscope merge" in result.stderr
    assert "analyze the folder of the traces" in result.stderr


def test_bad_choices_end_with_2(traces: Path) -> None:
    for options in (["--ranks", "7"], ["--lanes", "gpu"], ["--lanes", ","], ["--steps", "x"], ["--window", "1"]):
        result = run("merge", traces, *options)
        assert result.exit_code == 2, options
        assert options[0].strip("-")[:4] in result.stderr
        assert "Traceback" not in result.output


def test_no_such_folder(tmp_path: Path) -> None:
    for verb in (["merge"], ["tensorboard", "--logdir", tmp_path / "logs"]):
        result = run(*verb, tmp_path / "nowhere")
        assert result.exit_code == 2
        assert "no such file or folder" in result.stderr


def test_a_place_that_cannot_be_written_to(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    merged = run("merge", traces, "-o", tmp_path / "file" / "out.pftrace")
    assert merged.exit_code == 1
    assert "--output" in merged.stderr
    logs = run("tensorboard", traces, "--logdir", tmp_path / "file" / "logs")
    assert logs.exit_code in (1, 2)
    assert "logdir" in logs.stderr


def test_tensorboard(traces: Path, tmp_path: Path) -> None:
    result = run("tensorboard", traces, "--logdir", tmp_path / "runs", "--ranks", "1")
    assert result.exit_code == 0, result.output
    assert f"tensorboard --logdir {tmp_path / 'runs'}" in result.stdout
    assert {path.name for path in (tmp_path / "runs" / "perfscope").iterdir()} == {"job", "rank-1"}
