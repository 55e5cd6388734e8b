"""``perfscope analyze`` as a user runs it.

Bad input gets a clear message and the right exit code, and what can be saved is saved.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perfscope.cli.main import main
from tests.analyzers.readers.nsys_jobs import write_report
from tests.clusters import dask_cluster
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
        "job", "time_breakdown", "clock", "collectives", "cost_model", "stragglers", "critical_path",
        "dataloader", "utilisation", "memory", "replay", "findings",
    }  # fmt: skip
    assert set(found["job"]) >= {
        "world_size", "ranks", "missing_ranks", "failures", "steps", "step_time_us", "step_time_us_per_step",
        "strategy", "backend", "devices", "perturbation",
    }  # fmt: skip
    rows = ["compute", "exposed_comm_wait", "exposed_comm_transfer", "exposed_copy"]
    rows += [f"idle_{cause}" for cause in ("dataloader", "sync", "launch", "host", "dependency", "unknown")]
    for rank in found["time_breakdown"]:
        assert sum(rank[f"{row}_us"] for row in rows) == pytest.approx(rank["step_time_us"], rel=1e-12)
    assert sum(row["us"] for row in found["critical_path"]) == pytest.approx(found["job"]["step_time_us"])


def test_what_is_to_be_shown_outside_names_no_host_and_no_folder(traces):
    written = [traces.parent / f"{traces.name}-shown.{ending}" for ending in ("html", "json", "md")]
    options = [each for pair in zip(("--output", "--json", "--markdown"), written, strict=True) for each in pair]
    result = run(traces, "--anonymize", *options)
    assert result.exit_code == 0
    hosts = summary(traces)["job"]["hosts"]
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert [name for name in (*hosts, str(traces)) if name in text] == []
        assert path.suffix != ".json" or json.loads(text)["source"] == "recording"


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


def test_a_pattern_of_files_is_refused_with_their_folder(traces):
    result = run(*sorted(traces.glob("rank*.json.gz")))
    assert result.exit_code == 2
    assert f"4 files given; give the folder of the job's traces: {traces}" in result.stderr


def test_two_recordings_are_sent_to_compare(traces, tmp_path):
    result = run(traces, tmp_path)
    assert result.exit_code == 2
    assert "perfscope compare BASELINE CANDIDATE" in result.stderr


def test_an_archive_is_to_be_unpacked(tmp_path):
    (tmp_path / "run.tar.gz").write_bytes(b"")
    result = run(tmp_path / "run.tar.gz")
    assert result.exit_code == 2
    assert "tar xf run.tar.gz" in result.stderr


def test_json_and_markdown_can_be_printed_alone(traces, tmp_path):
    printed = run(traces, "--json", "-", "--output", tmp_path / "page.html")
    assert json.loads(printed.stdout)["schema"] == "perfscope.summary/1"
    assert "report: " in printed.stderr
    assert run(traces, "--markdown", "-", "--output", tmp_path / "page.html").stdout.startswith("#")
    assert not list(Path().glob("-"))


def test_a_misspelt_verb_is_refused_with_the_one_that_was_meant():
    result = CliRunner().invoke(main, ["analyse", "recording"])
    assert result.exit_code == 2
    assert "No such command 'analyse' (did you mean analyze?)." in result.stderr


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
    """Events in the order of time, as tools write them that sort: the last steps are cut off."""
    path = traces / "rank1.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    text = json.dumps({**trace, "traceEvents": sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0))})
    path.write_bytes(gzip.compress(text[: len(text) * 9 // 10].encode()))
    found = summary(traces)
    assert found["job"]["ranks"] == [0, 1, 2, 3]
    assert 2 <= len(found["job"]["steps"]) < 6
    assert any(note["about"] == "reading" and note["ranks"] == [1] for note in found["notes"])


def test_a_rank_that_is_truncated_before_its_device_events_is_left_out(traces):
    """Operators first, as Kineto writes them: the first half has them all, and no kernel."""
    path = traces / "rank1.json.gz"
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text[: len(text) // 2]))
    found = summary(traces)
    assert found["job"]["ranks"] == [0, 2, 3]
    (failure,) = found["job"]["failures"]
    assert failure["rank"] == 1
    assert "ends early, before its device events" in failure["error"]


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
    assert all(row["wait_is_bound"] for row in found["time_breakdown"])
    assert any("not in the recording (3)" in note["text"] for note in found["notes"])


def test_a_trace_without_steps_is_one_window_and_says_so(job, tmp_path):
    """Nothing marks them, and no two kernels are the same."""
    trace = json.loads(gzip.decompress((job / "rank0.json.gz").read_bytes()))
    marks = ("ProfilerStep#", "Optimizer.step#")
    trace["traceEvents"] = [event for event in trace["traceEvents"] if not str(event.get("name", "")).startswith(marks)]
    for number, event in enumerate(trace["traceEvents"]):
        if event.get("cat") == "kernel":
            event["name"] += f"_{number}"
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    found = summary(tmp_path)
    assert found["job"]["steps"] == []
    assert found["stragglers"] == []
    assert any(note["kind"] == "no_steps" for note in found["notes"])


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


def test_figures_need_kaleido_and_that_is_said_before_the_analysis(traces, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "kaleido" else found(name, *more)
    )
    result = run(traces, "--figures", traces / "figures")
    assert result.exit_code == 1
    assert "pip install 'kaleido>=1'" in result.output
    assert not (traces / "report.html").exists()


def test_a_single_file(traces):
    result = run(traces / "rank0.json.gz", "--output", traces / "one.html")
    assert result.exit_code == 0
    assert "1 of 4 ranks" in result.stdout


class TestNsightSystems:
    """A report of several processes, each of them a rank."""

    @pytest.fixture
    def report(self, tmp_path: Path) -> Path:
        return write_report(simulate(JobSpec(ranks=2, steps=6)), tmp_path / "report.sqlite")

    def test_every_process_is_a_rank(self, report):
        found = summary(report.parent)
        assert found["job"]["ranks"] == [0, 1]
        assert found["job"]["failures"] == []
        assert len(found["job"]["steps"]) == 6

    def test_processes_without_a_known_rank_get_numbers_and_that_is_reported(self, report):
        forget_ranks(report)
        found = summary(report.parent)
        assert found["job"]["ranks"] == [0, 1]
        note, assumed = [note for note in found["notes"] if note["about"] == "ranks"]
        assert note["kind"] == "ranks_by_process_id"
        assert assumed["kind"] == "world_assumed"
        assert f"0 is {report} (process 20000)" in note["text"]

    def test_beside_other_ranks_no_number_is_given(self, report):
        forget_ranks(report)
        write_report(simulate(JobSpec(ranks=2, steps=6)), report.with_name("other.sqlite"))
        found = summary(report.parent)
        assert found["job"]["ranks"] == [0, 1]
        assert [failure["rank"] for failure in found["job"]["failures"]] == [None, None]
        assert "nor its name says which rank" in found["job"]["failures"][0]["error"]

    def test_a_damaged_export_costs_only_itself(self, report):
        report.with_name("broken.sqlite").write_bytes(report.read_bytes()[:5000])
        found = summary(report.parent)
        assert found["job"]["ranks"] == [0, 1]
        (failure,) = found["job"]["failures"]
        assert failure["path"].endswith("broken.sqlite")
        assert "nsys export" in failure["error"]

    def test_a_report_without_nsys_says_what_to_do(self, tmp_path, monkeypatch):
        (tmp_path / "report.nsys-rep").write_bytes(b"only nsys knows")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("PERFSCOPE_NSYS", raising=False)
        result = run(tmp_path)
        assert result.exit_code == 2
        assert "nsys export --type sqlite report.nsys-rep" in result.stderr


def forget_ranks(report: Path) -> None:
    database = sqlite3.connect(report)
    database.execute("DELETE FROM NVTX_EVENTS WHERE eventType = 34")
    database.commit()
    database.close()


class TestSeveralCaptures:
    @pytest.fixture
    def early_and_late(self, tmp_path):
        """Two captures of one job, an hour apart, under names that do not show it."""
        for name, spec in (("a", JobSpec(ranks=2, steps=4)), ("b", JobSpec(ranks=2, steps=4, first_step=500))):
            simulate(spec).write(tmp_path / name, file_template="x{rank}" + name + ".json")
        shift = 3600 * 10**6  # in the traces' own us
        folder = tmp_path / "together"
        folder.mkdir()
        for path in [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]:
            trace = json.loads(gzip.decompress(path.read_bytes()))
            for event in trace["traceEvents"]:
                if path.name.startswith(("x0b", "x1b")) and "ts" in event:
                    event["ts"] += shift
            (folder / path.name).write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
        return folder

    def test_by_content_the_last_full_one_is_taken(self, early_and_late):
        found = summary(early_and_late)
        assert found["job"]["ranks"] == [0, 1]
        assert min(found["job"]["steps"]) >= 500
        failures = found["job"]["failures"]
        assert {Path(failure["path"]).name for failure in failures} == {"x0a.json.gz", "x1a.json.gz"}
        assert all("another capture of rank" in failure["error"] for failure in failures)

    def test_by_content_one_that_a_rank_is_missing_from_is_not(self, early_and_late):
        (early_and_late / "x1b.json.gz").unlink()
        found = summary(early_and_late)
        assert max(found["job"]["steps"]) < 500

    def test_by_name_the_choice_is_reported(self, job, tmp_path):
        for step in (10, 20):
            (tmp_path / f"iteration_{step}").mkdir()
            for rank in range(2):
                copy = tmp_path / f"iteration_{step}" / f"rank{rank}_trace.json.gz"
                copy.write_bytes((job / f"rank{rank}.json.gz").read_bytes())
        assert any(
            "number 1, iteration_20 (2 traces), is analyzed" in note["text"] for note in summary(tmp_path)["notes"]
        )


class TestWhereItRuns:
    def test_workers_change_nothing(self, traces, tmp_path):
        for workers in (1, 3):
            result = run(traces, "--workers", workers, "-o", tmp_path / "p.html", "--json", tmp_path / f"{workers}.txt")
            assert result.exit_code == 0, result.output
        assert (tmp_path / "1.txt").read_text() == (tmp_path / "3.txt").read_text()

    @pytest.mark.scale
    def test_a_cluster_changes_nothing(self, traces, tmp_path_factory, monkeypatch):
        """Given a relative path too, which means something else in the workers."""
        (traces / "rank3.json.gz").write_bytes(b"no trace")
        monkeypatch.chdir(traces.parent)
        elsewhere = tmp_path_factory.mktemp("elsewhere")
        with dask_cluster(elsewhere, workers=2) as address:
            for name, options in (("cluster", ["--scheduler", address]), ("here", ["--workers", 1])):
                result = run(traces.name, *options, "-o", elsewhere / "p.html", "--json", elsewhere / f"{name}.txt")
                assert result.exit_code == 0, result.output
        assert (elsewhere / "cluster.txt").read_text() == (elsewhere / "here.txt").read_text()
        assert len(json.loads((elsewhere / "here.txt").read_text())["job"]["failures"]) == 1

    def test_one_or_the_other(self, traces):
        result = run(traces, "--workers", 2, "--scheduler", "tcp://127.0.0.1:9")
        assert result.exit_code == 2
        assert "give only one" in result.stderr


def test_open_shows_the_page_in_the_browser(traces, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) == 1)
    assert "no browser" not in run(traces, "--open").output
    assert opened == [(traces / "report.html").resolve().as_uri()]
    result = run(traces, "--open", "--quiet")
    assert result.exit_code == 0
    assert "perfscope: no browser to open the page in" in result.stderr
