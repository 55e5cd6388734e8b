"""``perfscope analyze`` as a user meets it.

Bad input gets a clear message and the right exit code, and what can be saved is saved.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perfscope.cli.main import main
from tests.generator import JobSpec, simulate


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["analyze", *map(str, arguments)])


def summary(folder: Path) -> dict:
    result = run(folder, "--json", folder / "out.json", "--output", folder / "out.html")
    assert result.exit_code == 0, result.output
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    simulate(JobSpec(ranks=4, steps=6)).write(folder)
    return folder


@pytest.fixture
def traces(job: Path, tmp_path: Path) -> Path:
    """A copy to break: four ranks' traces."""
    for path in job.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_writes_the_page_and_names_it(traces):
    result = run(traces)
    assert result.exit_code == 0
    assert (traces / "report.html").stat().st_size > 100_000
    assert result.stdout.rstrip().endswith(f"report: {traces / 'report.html'}")


def test_json_follows_the_contract(traces):
    found = summary(traces)
    assert found["schema"] == "perfscope.summary/1"
    assert set(found) >= {
        "job", "accounting", "clock", "collectives", "cost_model", "stragglers", "critical_path",
        "dataloader", "utilisation", "memory", "replay", "findings",
    }  # fmt: skip
    assert set(found["job"]) >= {
        "world_size", "ranks", "missing_ranks", "failures", "steps", "step_time_us", "step_time_us_per_step",
        "strategy", "backend", "devices", "perturbation",
    }  # fmt: skip
    rows = ["compute", "exposed_comm_wait", "exposed_comm_transfer", "exposed_copy"]
    rows += [f"idle_{cause}" for cause in ("dataloader", "sync", "launch", "host", "dependency", "unknown")]
    for rank in found["accounting"]:
        assert sum(rank[f"{row}_us"] for row in rows) == pytest.approx(rank["step_time_us"], rel=1e-12)
    assert sum(row["us"] for row in found["critical_path"]) == pytest.approx(found["job"]["step_time_us"])


def test_its_own_json_among_the_traces_is_not_a_trace(traces):
    summary(traces)
    assert summary(traces)["job"]["failures"] == []


def test_no_such_folder(tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere: no such file or folder" in result.stderr


def test_a_folder_without_a_trace(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "no trace in this folder" in result.stderr
    assert "perfscope run" in result.stderr
    assert not (tmp_path / "report.html").exists()


def test_one_corrupt_rank_of_four_costs_only_itself(traces):
    broken = traces / "rank2.json.gz"
    broken.write_bytes(b"\x1f\x8b\x08\x00 this is no gzip stream")
    found = summary(traces)
    assert found["job"]["ranks"] == [0, 1, 3]
    assert found["job"]["missing_ranks"] == [2]
    (failure,) = found["job"]["failures"]
    assert failure["rank"] == 2
    assert failure["path"] == str(broken)
    assert "rank2.json.gz" in run(traces).stdout


def test_a_truncated_rank_keeps_its_whole_steps(traces):
    whole = (traces / "rank1.json.gz").read_bytes()
    (traces / "rank1.json.gz").write_bytes(gzip.compress(gzip.decompress(whole)[: len(gzip.decompress(whole)) // 2]))
    found = summary(traces)
    assert found["job"]["ranks"] == [0, 1, 2, 3]
    assert any(note["about"] == "reading" and note["ranks"] == [1] for note in found["notes"])


def test_all_ranks_corrupt(traces):
    for path in traces.glob("rank*.json.gz"):
        path.write_bytes(b"not a trace")
    result = run(traces)
    assert result.exit_code == 2
    assert "no trace can be analyzed" in result.stderr
    assert "rank0.json.gz" in result.stderr


def test_missing_ranks_are_named_and_bound_the_waits(traces):
    (traces / "rank3.json.gz").unlink()
    found = summary(traces)
    assert found["job"]["missing_ranks"] == [3]
    assert all(row["wait_is_bound"] for row in found["accounting"])
    assert any("not in the recording (3)" in note["text"] for note in found["notes"])


def test_a_trace_without_steps_is_one_window_and_says_so(job, tmp_path):
    trace = json.loads(gzip.decompress((job / "rank0.json.gz").read_bytes()))
    marks = ("ProfilerStep#", "Optimizer.step#")
    trace["traceEvents"] = [event for event in trace["traceEvents"] if not str(event.get("name", "")).startswith(marks)]
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    found = summary(tmp_path)
    assert found["job"]["steps"] == []
    assert found["stragglers"] == []
    assert any(note["about"] == "steps" and "Nothing marks steps" in note["text"] for note in found["notes"])


def test_two_files_of_one_rank_are_explained(traces):
    (traces / "again.json.gz").write_bytes((traces / "rank1.json.gz").read_bytes())
    (failure,) = summary(traces)["job"]["failures"]
    assert failure["rank"] == 1
    assert "a second trace of rank 1" in failure["error"]


def test_content_goes_before_the_name(traces):
    (traces / "rank1.json.gz").rename(traces / "rank7.json.gz")
    found = summary(traces)
    assert found["job"]["ranks"] == [0, 1, 2, 3]
    assert any("rank7.json.gz holds rank 1" in note["text"] for note in found["notes"])


def test_ranks_recorded_at_other_steps_are_left_out_and_named(traces, tmp_path):
    late = simulate(JobSpec(ranks=4, steps=6, first_step=500))
    late.write(tmp_path / "late")
    (traces / "rank3.json.gz").write_bytes((tmp_path / "late" / "rank3.json.gz").read_bytes())
    found = summary(traces)
    assert found["job"]["ranks"] == [0, 1, 2]
    (failure,) = found["job"]["failures"]
    assert "none of steps" in failure["error"]


def test_an_unwritable_place_for_the_page(traces):
    result = run(traces, "--output", traces / "no" / "such" / "page.html")
    assert result.exit_code == 1
    assert "--output" in result.stderr


def test_a_single_file(traces):
    result = run(traces / "rank0.json.gz", "--output", traces / "one.html")
    assert result.exit_code == 0
    assert "1 of 4 ranks" in result.stdout
