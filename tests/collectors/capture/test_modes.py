"""The modes of recording with real trainings: what is recorded, what is found in it, that nothing is left patched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.history.rank_history import read
from perfscope.cli.main import main
from perfscope.collectors.agreement import PLANS_FILE
from perfscope.collectors.launch.nsys import SESSION_VARIABLE, find_nsys
from perfscope.collectors.phases.compiled import IS_BUILT
from perfscope.recording.history import unpack
from perfscope.recording.metadata import CaptureMetadata
from perfscope.recording.paths import BOOTSTRAP_FOLDER, steps_file
from perfscope.results.history import OTHER
from tests.collectors.harness import SCRIPTS, Recording, Running, needs_torch, of_ranks, record, without_compiled
from tests.waiting import free_port

pytestmark = [pytest.mark.training, needs_torch]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PACED = str(SCRIPTS / "paced.py")
STAGES = {"dataloader", "forward", "backward", "optimizer", OTHER}


def paced(folder: Path, *arguments: str, options: tuple[str, ...], ranks: int = 2) -> Recording:
    """``scripts/paced.py`` under ``perfscope run``."""
    command, port = started(ranks)
    return record(folder, *command, *arguments, options=("--no-sampler", *options), environment=port)


def started(ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """(the command, its environment)."""
    if ranks == 1:
        return (sys.executable, PACED), {}
    return of_ranks(ranks, PACED), {"MASTER_PORT": str(free_port())}


class Paced(Running):
    """``scripts/paced.py`` until it is asked to stop."""

    def __init__(self, folder: Path, *options: str, arguments: tuple[str, ...] = (), ranks: int = 1) -> None:
        command, port = started(ranks)
        until = ("--ms", "20", "--until", str(self.stop_file(folder)))
        options = ("--no-sampler", *options)
        super().__init__(folder, *command, *until, *arguments, options=options, environment=port)
        assert self.process.stdout is not None
        self.pids = {}
        for _ in range(ranks):
            announced = re.fullmatch(r"rank (\d) pid (\d+)\n", self.process.stdout.readline())
            assert announced is not None
            self.pids[int(announced[1])] = int(announced[2])


@pytest.fixture(scope="module")
def steps_only(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Two ranks, of which rank 1 loads 40 ms longer, and takes 50 times as long in its step 60."""
    folder = tmp_path_factory.mktemp("steps") / "recording"
    arguments = ("--steps", "150", "--ms", "6", "--load-ms", "40", "--slow-at", "60", "--slow-factor", "50")
    arguments += ("--slow-rank", "1")
    return paced(folder, *arguments, options=("--steps-only",))


class TestStepsOnly:
    def test_nothing_is_traced_and_nothing_is_left_behind(self, steps_only: Recording) -> None:
        assert steps_only.exit_code == 0, steps_only.err
        assert steps_only.traces() == []
        assert {line for line in steps_only.out.splitlines() if "left behind" in line} == {
            "rank 0 left behind: [] []",
            "rank 1 left behind: [] []",
        }
        assert "recorded the step times of all 2 ranks: 150 steps" in steps_only.messages

    @pytest.mark.parametrize("rank", [0, 1])
    def test_every_step_is_there_with_its_stages(self, steps_only: Recording, rank: int) -> None:
        steps = read(steps_file(steps_only.folder, rank))
        assert steps.number.tolist() == list(range(1, 150))  # the beginning of the first is not seen
        assert steps.stages == ("dataloader", "forward", "backward", "optimizer")
        forward = steps.stages_us[:, steps.stages.index("forward")]
        undisturbed = ~steps.disturbed
        assert undisturbed.sum() >= 145
        assert (forward[undisturbed] >= 6000).all()
        assert (steps.stages_us >= 0).all()

    def test_a_step_takes_a_few_bytes(self, steps_only: Recording) -> None:
        """Where other processes want the cores, each wait for one is as good as random: up to 16 s in 3 bytes. A block
        is written every few seconds, however few steps those were: its header and its empty columns take 96 bytes.
        """
        path = steps_file(steps_only.folder, 0)
        blocks = list(unpack(path.read_bytes()))
        assert path.stat().st_size < 16 * 149 + 96 * len(blocks) + 3 * np.count_nonzero(read(path).core_us)

    def test_the_run_is_described_without_a_capture(self, steps_only: Recording) -> None:
        run = steps_only.run(1)
        assert (run.mode, run.captures, run.outcome, run.problems) == ("steps", (), "finished", ())
        assert (run.strategies, run.batch_shape) == (("ddp",), (1, 8))
        assert run.dataloaders[0].dataset == "Samples"

    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_recording_takes_is_counted(self, steps_only: Recording, rank: int) -> None:
        """The first step comes before all; the loader is asked once more when the last one has ended."""
        found = steps_only.run(rank).recording
        assert found is not None
        assert (found.steps, found.phases, found.waits, found.thread_steps) == (149, 4 * 149 + 1, 149, 150)
        assert found.phase_ns > 0
        assert 0 < found.between_ns < 6_000_000
        assert found.thread_ns > 0

    def test_what_was_planted_is_found(self, steps_only: Recording) -> None:
        summary = analyze(steps_only.folder)
        assert summary.history is not None
        assert (summary.time_breakdown, summary.stragglers, summary.findings) == ((), (), ())
        assert [(row.rank, row.steps + row.disturbed_steps) for row in summary.history.ranks] == [(0, 149), (1, 149)]
        assert all(set(row.stages_us) == STAGES for row in summary.history.ranks)
        slow = summary.history.stragglers[0]
        assert (slow.ranks, slow.stage, slow.pattern) == ((1,), "dataloader", "steady")
        # 40 ms of sleep; its peer loads too, and on a busy machine both take longer.
        peer, own = (row.stages_us for row in summary.history.ranks)
        assert 36_000 <= slow.stages_us["dataloader"] <= 1.01 * own["dataloader"]
        # Its forward takes longer too, in step 60 most of all: 2 ms in the mean.
        longer = own["dataloader"] + max(own["forward"] - peer["forward"], 0)
        assert slow.stages_us["dataloader"] <= slow.excess_us <= 1.01 * longer
        planted = next(row for row in summary.history.outliers if row.step == 60)
        assert (planted.rank, planted.stage) == (1, "forward")
        assert planted.us >= 300_000
        assert "rank 1 is a straggler loading data" in summary.verdict.headline

    def test_the_command_line_shows_it(self, steps_only: Recording, tmp_path: Path) -> None:
        target = ["--output", str(tmp_path / "page.html"), "--json", str(tmp_path / "result.json")]
        result = CliRunner().invoke(main, ["analyze", str(steps_only.folder), *target])
        assert result.exit_code == 0, result.output
        assert "Steps take" in result.output
        history = json.loads((tmp_path / "result.json").read_text())["history"]
        assert [row["rank"] for row in history["ranks"]] == [0, 1]
        assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11),
    reason="counted in the bytecode of CPython 3.11",
)
@pytest.mark.parametrize(
    ("compiled", "most"),
    [pytest.param(True, 150, marks=pytest.mark.skipif(not IS_BUILT, reason="the clock is not built")), (False, 1010)],
)
def test_a_step_that_passes_runs_little_of_ours(tmp_path: Path, compiled: bool, most: int) -> None:
    """What a step costs, by a measure that no other work on the machine changes: bytecodes of the collector in one."""
    environment = {} if compiled else without_compiled(tmp_path)
    command = (sys.executable, str(SCRIPTS / "passing.py"))
    recording = record(tmp_path / "r", *command, options=("--steps-only",), environment=environment)
    assert recording.exit_code == 0, recording.err
    assert 0 < int(recording.out) <= most
    steps = read(steps_file(recording.folder, 0))
    assert steps.number.tolist() == list(range(1, 640))
    assert set(steps.stages) == STAGES - {OTHER}
    assert (steps.stages_us[5:] > 0).all()


@pytest.mark.parametrize(("arguments", "hooked"), [((), 1), (("parts",), 7)])
def test_parts_of_a_model_that_is_called_as_a_whole_are_not_timed(
    tmp_path: Path, arguments: tuple[str, ...], hooked: int
) -> None:
    command = (sys.executable, str(SCRIPTS / "parts.py"), *arguments)
    recording = record(tmp_path / "r", *command, options=("--steps-only",))
    assert recording.exit_code == 0, recording.err
    assert int(recording.out) == hooked
    steps = read(steps_file(recording.folder, 0))
    assert (steps.stages_us[2:, steps.stages.index("forward")] > 0).all()


def test_planned_captures_come_with_the_history_of_all_steps(tmp_path: Path) -> None:
    with Paced(tmp_path / "r", "--wait", "4", "--warmup", "1", "--active", "3") as training:
        history = steps_file(training.folder, 0)
        training.until_written(history.name)
        training.until(
            lambda: not (steps := read(history)).disturbed[steps.number > 8].all(),
            "a step is taken after the trace is compressed",
        )
        recording = training.stop()
    assert [(each.first_step, each.last_step) for each in recording.run().captures] == [(5, 7)]
    steps = read(steps_file(recording.folder, 0))
    last = int(steps.number[-1])
    assert steps.number.tolist() == list(range(1, last + 1))
    assert steps.stages == ("optimizer",)  # more would need names replaced for the whole run
    disturbed = steps.number[steps.disturbed].tolist()
    # The first steps are kept until the capture has some, and after it the trace is compressed.
    assert set(range(4, 9)) <= set(disturbed)
    assert set(range(4, disturbed[-1] + 1)) <= set(disturbed)
    assert disturbed[-1] < last
    summary = analyze(recording.folder)
    assert summary.history is not None
    assert summary.job.steps == (5, 6, 7)
    assert summary.history.ranks[0].steps == last - len(disturbed)


def test_a_slow_step_has_every_rank_record_the_same_steps(tmp_path: Path) -> None:
    """Step 40 takes 20 s, beside which what the machine does to other steps of 20 ms is short."""
    options = ("--trigger", "100", "--warmup", "1", "--active", "3")
    arguments = ("--slow-at", "40", "--slow-factor", "1000", "--slow-rank", "1")
    with Paced(tmp_path / "r", *options, arguments=arguments, ranks=2) as training:
        training.until_written(*(f"rank-0000{rank}.capture-0.trace.json.gz" for rank in (0, 1)))
        recording = training.stop()
    assert recording.exit_code == 0, recording.err
    captures = [recording.run(rank).captures for rank in (0, 1)]
    assert [len(each) for each in captures] == [1, 1]
    assert captures[0][0].first_step == captures[1][0].first_step
    assert captures[0][0].first_step > 40
    assert re.match(r"step 40 took \d+\.\dx the median on rank [01]$", captures[0][0].reason)
    assert recording.trace(0).recorded_steps() == recording.trace(1).recorded_steps() == list(_steps_of(captures[0][0]))
    assert recording.out.count("left behind: [] []") == 2
    summary = analyze(recording.folder)
    assert any("not planned: step 40 took" in note.text for note in summary.notes)
    assert len(summary.time_breakdown) == 2


def test_without_a_slow_step_there_is_no_capture(tmp_path: Path) -> None:
    """None takes a minute: a busy machine may well keep one for a second."""
    recording = paced(tmp_path / "r", "--steps", "60", "--ms", "20", options=("--trigger", "3000"), ranks=1)
    assert recording.traces() == []
    assert "no step took 3000x the median" in recording.messages


def test_a_running_job_records_on_demand(tmp_path: Path) -> None:
    with Paced(tmp_path / "r", "--steps-only", "--warmup", "1", ranks=2) as training:
        training.until_written("rank-00000.steps.bin", "rank-00001.steps.bin")
        asked = CliRunner().invoke(main, ["trigger", str(training.folder), "--steps", "2"])
        assert asked.exit_code == 0, asked.output
        training.until_written(*(f"rank-0000{rank}.capture-0.trace.json.gz" for rank in (0, 1)))
        recording = training.stop()
    captures = [recording.run(rank).captures for rank in (0, 1)]
    assert captures[0][0].reason == "requested with perfscope trigger (request 0)"
    assert [list(_steps_of(each[0])) for each in captures] == [
        recording.trace(rank).recorded_steps() for rank in (0, 1)
    ]
    assert captures[0][0].first_step == captures[1][0].first_step
    assert captures[0][0].last_step == captures[0][0].first_step + 1
    ended = CliRunner().invoke(main, ["trigger", str(training.folder)])
    assert (ended.exit_code, "the job has ended" in ended.output) == (2, True)


def test_planned_captures_and_one_on_demand_have_numbers_of_their_own(tmp_path: Path) -> None:
    with Paced(tmp_path / "r", "--wait", "2", "--warmup", "1", "--active", "2") as training:
        training.until_written("rank-00000.capture-0.trace.json.gz", "rank-00000.steps.bin")
        assert CliRunner().invoke(main, ["trigger", str(training.folder)]).exit_code == 0
        training.until_written("rank-00000.capture-1.trace.json.gz")
        captures = training.stop().run().captures
    assert captures[0].first_step == 3
    assert [bool(each.reason) for each in captures] == [False, True]


@pytest.mark.parametrize("receiver", ["perfscope run", "a rank"])
def test_a_signal_asks_for_a_capture(tmp_path: Path, receiver: str) -> None:
    with Paced(tmp_path / "r", "--steps-only", "--warmup", "0", "--active", "2") as training:
        training.until_written("rank-00000.steps.bin")
        os.kill(training.process.pid if receiver == "perfscope run" else training.pids[0], signal.SIGUSR2)
        training.until_written("rank-00000.capture-0.trace.json.gz")
        recording = training.stop()
    assert recording.exit_code == 0
    assert ("by a signal to rank 0" in recording.run().captures[0].reason) == (receiver == "a rank")


def test_the_scripts_own_handler_of_the_signal_stays(tmp_path: Path) -> None:
    with Paced(tmp_path / "r", "--steps-only", arguments=("--own-signal",)) as training:
        history = steps_file(training.folder, 0)
        training.until_written(history.name)
        os.kill(training.pids[0], signal.SIGUSR2)
        size = history.stat().st_size
        # The thread that would plan a capture writes the history too, every two seconds.
        training.until(lambda: history.stat().st_size > size, "the background thread has looked again")
        recording = training.stop()
    assert "the script's own handler ran" in recording.out
    assert (recording.folder / BOOTSTRAP_FOLDER / PLANS_FILE).read_bytes() == b""
    assert recording.traces() == []


@pytest.mark.parametrize("options", [("--with", "nvtx"), ()])
def test_ranges_alone_are_for_a_profiler_of_the_users_own(tmp_path: Path, options: tuple[str, ...]) -> None:
    """As asked for, and because the process finds itself below ``nsys``."""
    code = (
        "import gc, runpy, sys, torch.profiler as p\n"
        "gc.disable()\n"  # a collection has a range, and comes when it likes
        "sys.argv[1:] = ['--steps', '8', '--ms', '1']\n"
        "with p.profile(activities=[p.ProfilerActivity.CPU]) as mine:\n"
        f"    runpy.run_path({PACED!r}, run_name='__main__')\n"
        "names = [event.name for event in mine.events() if event.name.startswith('perfscope::')]\n"
        "print({name: names.count(name) for name in sorted(set(names))})\n"
    )
    environment = {} if options else {SESSION_VARIABLE: "1"}
    recording = record(tmp_path / "r", sys.executable, "-c", code, options=options, environment=environment)
    assert recording.exit_code == 0, recording.err
    seen = json.loads(recording.out.splitlines()[-2].replace("'", '"'))
    assert {name: count for name, count in seen.items() if name.count("::") == 1 and "#" not in name} == {
        # From the end of the first step; the loop draws a batch more before it breaks.
        "perfscope::dataloader": 8, "perfscope::dataloader_sampler": 8,
        "perfscope::forward": 7, "perfscope::backward": 7, "perfscope::optimizer": 7,
    }  # fmt: skip
    assert recording.out.splitlines()[-1] == "rank 0 left behind: [] []"
    assert recording.traces() == []
    assert recording.run().mode == "nvtx"
    if options:
        assert "ranges were written in 1 rank, 8 steps, for your own profiler" in recording.messages
    else:
        assert "runs under Nsight Systems" in recording.run().problems[0]


def test_nsys_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    recording = record(
        tmp_path / "r", "true", options=("--with", "nsys"), environment={"PERFSCOPE_NSYS": "", "PATH": "/bin"}
    )
    assert recording.exit_code == 2
    assert "install Nsight Systems, or set PERFSCOPE_NSYS to the path of nsys" in recording.err
    assert not recording.folder.exists()


def under_nsys(folder: Path, environment: dict[str, str]) -> Recording:
    """A training recorded by a real ``nsys``, which now and then waits for its own agent for ever."""
    for attempt in ("1", "2", "3"):
        with suppress(subprocess.TimeoutExpired):
            return record(
                folder / attempt, *TORCHRUN, PACED, "--steps", "12", "--ms", "10",
                options=("--with", "nsys"), environment=environment, timeout=150,
            )  # fmt: skip
    pytest.fail("perfscope run --with nsys did not end")


def test_nsys_wraps_the_command_and_its_report_is_analyzed(tmp_path: Path) -> None:
    if find_nsys(os.environ) is None:
        pytest.skip("no nsys: neither PERFSCOPE_NSYS nor the path names one")
    environment = {"PYTHONPATH": os.environ.get("PERFSCOPE_TEST_NVTX", "")}
    recording = under_nsys(tmp_path, environment)
    assert recording.exit_code == 0, recording.err
    assert "PerfScope's own profiler stays off" in recording.messages
    assert "Nsight Systems recorded 1 report" in recording.messages
    assert recording.traces() == []
    assert [recording.run(rank).mode for rank in (0, 1)] == ["nsys", "nsys"]
    if not environment["PYTHONPATH"]:
        pytest.skip("releases of nvtx above 0.2.10 leave no range: put 0.2.10 into a folder for PERFSCOPE_TEST_NVTX")
    summary = analyze(recording.folder)
    assert (summary.job.ranks, summary.job.strategy) == ((0, 1), "ddp")
    assert summary.job.steps == tuple(range(1, 12))
    assert summary.history is not None


@pytest.mark.parametrize("options", [("--steps-only", "--trigger", "2"), ("--with", "nvtx", "--steps-only")])
def test_one_mode_at_a_time(tmp_path: Path, options: tuple[str, ...]) -> None:
    recording = record(tmp_path / "r", "true", options=options)
    assert recording.exit_code == 2
    assert "give only one of --steps-only, --trigger and --with" in recording.err


def test_a_folder_without_a_job_under_way_is_named(tmp_path: Path) -> None:
    asked = CliRunner().invoke(main, ["trigger", str(tmp_path)])
    assert asked.exit_code == 2
    assert f"{tmp_path}: no recording under way" in asked.output


def _steps_of(capture: CaptureMetadata) -> range:
    return range(capture.first_step, capture.last_step + 1)
