"""Real trainings, each in processes of its own: what is recorded, and that the training does not notice."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope import analyze
from perfscope.analyzers.history.rank_history import read
from perfscope.collectors import cpu
from perfscope.recording.metadata import CaptureMetadata, load_launch, load_run
from perfscope.recording.paths import LAUNCH_FILE, run_file, samples_file, steps_file
from perfscope.recording.vocabulary import (
    BACKWARD,
    COLLECTIVE_PREFIX,
    COMMUNICATION,
    DATALOADER,
    DATALOADER_SAMPLER,
    DATALOADER_START,
    DATALOADER_STOP,
    FORWARD,
    OPTIMIZER,
)
from tests.collectors.harness import SCRIPTS, SHORT, Recording, needs_torch, record, train

pytestmark = [pytest.mark.training, needs_torch]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Two DDP ranks under torchrun, a data loader worker each, a ``sitecustomize`` of the user's own, all defaults."""
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "assert not any('.bootstrap' in entry for entry in sys.path), sys.path\n"
        "os.environ['FROM_USERS_SITECUSTOMIZE'] = 'theirs ran'\n"
    )
    return record(
        folder / "recording",
        *TORCHRUN,
        str(SCRIPTS / "ddp.py"),
        "--workers",
        "1",
        environment={"PYTHONPATH": str(folder / "theirs"), "NCCL_DEBUG": "WARN", "NCCL_SOME_TOKEN": "hunter2"},
    )


class TestDdp:
    def test_the_command_runs_as_without_us(self, ddp: Recording) -> None:
        assert ddp.exit_code == 0, ddp.err
        assert sorted(ddp.out.splitlines()) == ["rank 0 done, theirs ran", "rank 1 done, theirs ran"]

    def test_each_rank_leaves_one_whole_trace(self, ddp: Recording) -> None:
        assert {path.name for path in ddp.folder.iterdir()} == {
            ".bootstrap", "perfscope.json",
            "rank-00000.run.json", "rank-00000.capture-0.trace.json.gz",
            "rank-00001.run.json", "rank-00001.capture-0.trace.json.gz",
            "rank-00000.steps.bin", "rank-00001.steps.bin", samples_file(ddp.folder, socket.gethostname()).name,
        }  # fmt: skip
        assert "recorded all 2 ranks, steps 8-15" in ddp.messages
        assert "next: perfscope analyze" in ddp.messages

    @pytest.mark.parametrize("rank", [0, 1])
    def test_steps_carry_the_jobs_own_numbers(self, ddp: Recording, rank: int) -> None:
        assert ddp.trace(rank).steps() == list(range(7, 16))
        assert ddp.trace(rank).recorded_steps() == list(range(8, 16))
        (capture,) = ddp.run(rank).captures
        file = f"rank-0000{rank}.capture-0.trace.json.gz"
        assert replace(capture, waited_ns=()) == CaptureMetadata(file=file, first_step=8, last_step=15)

    @pytest.mark.skipif(cpu.waited_for_core() is None, reason="the kernel does not count how long threads wait")
    @pytest.mark.parametrize("rank", [0, 1])
    def test_each_recorded_step_has_its_wait_for_a_core(self, ddp: Recording, rank: int) -> None:
        run = ddp.run(rank)
        assert len(run.captures[0].waited_ns) == 8
        assert run.cpu is not None
        assert sum(run.captures[0].waited_ns) == run.cpu.waited_ns

    def test_ranges_are_there_once_a_step_and_around_the_right_things(self, ddp: Recording) -> None:
        trace = ddp.trace()
        ranges = trace.ranges()
        collectives = {name for name in ranges if name.startswith(COLLECTIVE_PREFIX)}
        assert len(collectives) == 2 * 8  # DDP's and the script's own
        parts = (DATALOADER, DATALOADER_SAMPLER, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
        assert {name: ranges[name] for name in ranges.keys() - collectives} == dict.fromkeys(parts, 8)
        assert trace.within("DistributedDataParallel.forward", FORWARD)
        assert trace.within("Optimizer.step#AdamW.step", OPTIMIZER)
        assert trace.within("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", DATALOADER)

    def test_a_trace_records_its_rank(self, ddp: Recording) -> None:
        content = ddp.trace(1).content
        assert content["perfscope"] == {"rank": 1, "first_step": 8}
        assert content["distributedInfo"]["rank"] == 1
        assert content["record_shapes"] == 1

    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_process_is_described(self, ddp: Recording, rank: int) -> None:
        run = ddp.run(rank)
        assert (run.rank, run.world_size, run.local_rank, run.local_world_size) == (rank, 2, rank, 2)
        assert (run.backend, run.device.type, run.outcome, run.problems) == ("gloo", "cpu", "finished", ())
        assert run.versions["torch"]
        assert any(word.endswith("ddp.py") for word in run.command)

    def test_model_and_strategy_are_described(self, ddp: Recording) -> None:
        run = ddp.run()
        parameters = 24 * 16 + 16 + 16 * 4 + 4
        assert run.strategies == ("ddp",)
        assert run.settings["ddp"]["bucket_cap_mb"] == 3
        assert run.settings["ddp"]["bucket_bytes"] == [4 * parameters]
        assert run.settings["ddp"]["gradient_as_bucket_view"] is False
        assert run.settings["amp"] == {"dtype": "bfloat16"}
        assert run.model is not None
        assert (run.model.name, run.model.parameters) == ("Sequential", parameters)
        assert run.model.parameter_bytes == run.model.trainable_bytes == 4 * parameters
        assert run.model.dtypes == ("float32",)

    def test_the_data_loader_is_described(self, ddp: Recording) -> None:
        run = ddp.run()
        (loader,) = run.dataloaders
        assert (loader.num_workers, loader.batch_size, loader.drop_last) == (1, 12, True)
        assert (loader.dataset, loader.dataset_length, loader.sampler) == ("TensorDataset", 768, "DistributedSampler")
        assert run.batch_shape == (12, 24)

    def test_cpu_time_is_counted(self, ddp: Recording) -> None:
        run = ddp.run()
        assert run.cpu is not None
        assert run.cpu.steps == 8
        assert 0 < run.cpu.thread_ns <= run.cpu.process_ns
        assert run.cpu.thread_ns <= run.cpu.wall_ns
        (loader,) = run.dataloaders
        if sys.platform == "linux":
            assert run.cpu.waited_ns is not None
            assert run.cpu.cores
            # All but the first batch that its worker delivered.
            assert loader.timed_batches >= 8
            assert loader.load_cpu_ns > 0

    def test_steps_are_described(self, ddp: Recording) -> None:
        steps = ddp.run().steps
        assert (steps.seen, steps.detected_by, steps.backwards_per_step) == (18, "optimizer", 1.0)
        # Step 17, unless its trace is still being compressed: the first ones were kept for a job that ends early, and
        # 5 to 16 are the capture's and one after it.
        assert len(steps.unprofiled_ns) <= 1
        assert all(duration > 0 for duration in steps.unprofiled_ns)

    def test_the_environment_is_recorded_without_secrets(self, ddp: Recording) -> None:
        environment = ddp.run().environment
        assert environment["NCCL_DEBUG"] == "WARN"
        assert environment["OMP_NUM_THREADS"] == "1"
        everything = "".join(path.read_text() for path in ddp.folder.glob("*.json"))
        assert "hunter2" not in everything

    def test_the_launch_is_recorded(self, ddp: Recording) -> None:
        launch = ddp.launch
        assert launch.exit_code == 0
        assert launch.command[-2:] == ("--workers", "1")
        assert (launch.options["wait"], launch.options["active"]) == (5, 8)


def test_chosen_ranks_repeated_captures_and_counted_operations(tmp_path: Path) -> None:
    options = (*SHORT, "--ranks", "1", "--repeat", "2", "--count-flops", "--no-shapes")
    recording = record(tmp_path / "r", *TORCHRUN, str(SCRIPTS / "ddp.py"), "--steps", "9", options=options)
    assert recording.exit_code == 0
    assert recording.traces() == [f"rank-00001.capture-{capture}.trace.json.gz" for capture in (0, 1)]
    assert [recording.trace(1, capture).steps() for capture in (0, 1)] == [[1, 2, 3], [5, 6, 7]]
    assert "record_shapes" not in recording.trace(1).content
    run = recording.run(1)
    # Two layers, forward and weights' gradient, and the second one's input gradient; 2 operations a multiply-add.
    assert run.model_flops_per_step == 2 * 12 * (24 * 16 * 2 + 16 * 4 * 3)
    assert "recorded 1 rank (1 of 2 chosen)" in recording.messages


def test_a_plain_loop_is_recorded_and_everything_patched_is_put_back(tmp_path: Path) -> None:
    arguments = ("--steps", "8", "--accumulate", "2", "--workers", "1")
    recording = train(tmp_path / "r", *arguments, options=SHORT, stdin="some words")
    assert recording.exit_code == 0
    alone = subprocess.run(
        [sys.executable, str(SCRIPTS / "train.py"), *arguments],
        input="some words", capture_output=True, text=True, check=True,
    )  # fmt: skip
    patched, outcome = recording.out.splitlines()
    assert outcome == alone.stdout.splitlines()[1]  # the loss to six digits, arguments and input
    assert patched.endswith("after: [] hooks: 0")
    assert not patched.startswith("patched during: 0")
    run = recording.run()
    assert recording.traces() == ["rank-00000.capture-0.trace.json.gz"]
    assert recording.trace().ranges() == {
        DATALOADER: 4, DATALOADER_SAMPLER: 4, FORWARD: 4, BACKWARD: 4, OPTIMIZER: 2,
    }  # fmt: skip
    assert (run.strategies, run.world_size) == (("single",), 1)
    assert run.steps.backwards_per_step == 2
    assert run.settings["gradient_accumulation"] == {"backwards_per_step": 2}
    assert run.model is not None
    assert run.model.name == "Tiny"


EPOCHS = ("--wait", "3", "--warmup", "2", "--active", "8")
"""Options that record two epochs of four steps."""


def test_loaders_that_start_for_each_epoch_are_told_and_what_ends_one_is_no_batch(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", sys.executable, str(SCRIPTS / "short_epochs.py"), options=EPOCHS)
    assert recording.exit_code == 0, recording.err
    assert recording.trace(0).ranges()[DATALOADER_START] == 2
    summary = analyze(recording.folder)
    assert [row.batches_per_step for row in summary.dataloader] == [1.0]
    settings = {each.rule: each.action.setting for each in summary.findings}
    assert settings["loader-stalls"] == "DataLoader(persistent_workers=…)"


def test_an_iterator_for_each_batch_is_told_with_what_ending_it_takes(tmp_path: Path) -> None:
    command = (sys.executable, str(SCRIPTS / "short_epochs.py"), "anew")
    recording = record(tmp_path / "r", *command, options=EPOCHS)
    assert recording.exit_code == 0, recording.err
    ranges = recording.trace(0).ranges()
    assert (ranges[DATALOADER_START], ranges[DATALOADER_STOP]) == (8, 8)
    summary = analyze(recording.folder)
    assert [row.batches_per_step for row in summary.dataloader] == [1.0]
    titles = {each.rule: each.title for each in summary.findings}
    assert "started anew in each step" in titles["loader-stalls"]


def test_a_model_that_is_compiled_in_each_step_is_told(tmp_path: Path) -> None:
    options = ("--wait", "3", "--warmup", "1", "--active", "6")
    recording = record(tmp_path / "r", sys.executable, str(SCRIPTS / "recompiles.py"), options=options)
    assert recording.exit_code == 0, recording.err
    summary = analyze(recording.folder)
    (row,) = summary.time_breakdown
    assert row.named_host_us["torch.compile"] > row.compute_us
    titles = {each.rule: each.title for each in summary.findings}
    assert "in 6 of 6 steps" in titles["recompilation"]


def test_a_critics_steps_are_part_of_the_generators(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--critic", "3", "--steps", "32", options=SHORT)
    run = recording.run()
    assert run.steps.seen == 8
    assert recording.trace().ranges()[OPTIMIZER] == 4 * len(recording.trace().recorded_steps())
    assert run.captures[0].complete


def test_a_step_that_the_scaler_skips_is_a_step_and_so_is_a_compiled_one(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--overflow-at", "3", "--compiled-step", "--steps", "6", options=SHORT)
    assert recording.exit_code == 0, recording.err
    assert recording.trace().recorded_steps() == [2, 3]
    assert (recording.run().steps.seen, recording.run().steps.skipped) == (6, 1)
    assert recording.trace().ranges()[OPTIMIZER] == 2


def test_explicit_steps_take_over(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--explicit", "2", "--steps", "12", options=SHORT)
    run = recording.run()
    assert (run.steps.detected_by, run.steps.seen, run.steps.backwards_per_step) == ("explicit", 6, 2)
    assert recording.trace().ranges()[OPTIMIZER] == 4


@pytest.mark.parametrize(
    ("iterations", "products", "recorded", "problem"),
    [
        pytest.param((0, 3), 8, [6, 7], "ran at step 1", id="running when ours would start"),
        pytest.param((1, 4), 8, [7, 8], "the capture waits until that has finished", id="starting in our warm-up"),
        pytest.param((3, 4), 4, [2], "the capture ends after 1 of 2", id="starting while ours records"),
    ],
)
def test_the_scripts_own_profiler_comes_first(
    tmp_path: Path, iterations: tuple[int, int], products: int, recorded: list[int], problem: str
) -> None:
    profile = ("--profile", *map(str, iterations))
    recording = train(tmp_path / "r", *profile, "--steps", "12", options=SHORT)
    assert f"own profiler: {products} addmm" in recording.out
    run = recording.run()
    assert list(range(run.captures[0].first_step, run.captures[0].last_step + 1)) == recorded
    assert any(problem in each for each in run.problems)


def test_steps_of_the_scripts_own_profiler_are_compared_with_no_others(tmp_path: Path) -> None:
    """It runs in the first 6 iterations, and a capture is due after the second."""
    recording = train(tmp_path / "r", "--profile", "0", "6", "--steps", "40", options=("--wait", "2", "--active", "2"))
    steps = read(steps_file(recording.folder, 0))
    assert {3, 4, 5} <= set(steps.number[steps.disturbed].tolist())


def test_a_crash_keeps_the_completed_steps_and_the_exit_code(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--crash-at", "4", options=("--wait", "1", "--warmup", "1", "--active", "8"))
    assert recording.exit_code == 1
    assert "RuntimeError: the training crashed" in recording.err
    run = recording.run()
    assert (run.outcome, run.steps.seen) == ("exception", 4)
    (capture,) = run.captures
    file = "rank-00000.capture-0.trace.json.gz"
    assert replace(capture, waited_ns=()) == CaptureMetadata(file=file, first_step=2, last_step=3, complete=False)
    assert set(recording.trace().steps()) >= {2, 3}
    assert "cut short" in recording.messages


def test_fewer_steps_than_planned_say_which_options_would_record_them(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--steps", "3", options=("--wait", "1", "--warmup", "3"))
    assert recording.exit_code == 0
    assert recording.out.splitlines()[0].endswith("hooks: 2")  # of the layer; the warm-up was still under way
    assert "the job took 3 steps, and a capture begins after 4" in recording.messages
    assert "use --wait 1 --warmup 0 --active 2" in recording.messages
    assert recording.traces() == []


def test_a_killed_job_leaves_no_half_file(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--kill-at", "6", options=("--wait", "1", "--warmup", "1", "--active", "8"))
    assert recording.exit_code == -9
    assert recording.traces() == []
    assert recording.run().outcome == "running"
    assert "the job ended (signal 9) before a capture was written" in recording.messages


@pytest.mark.parametrize(
    ("steps", "recorded", "planned"),
    [
        pytest.param(2, [1], False, id="two steps"),
        pytest.param(4, [2, 3], False, id="before the wait is over; the first one leads in"),
        pytest.param(9, [2, 3, 4], False, id="one planned step is worth less than four early ones"),
        pytest.param(10, [8, 9], True, id="two are worth as much"),
    ],
)
def test_a_short_job_leaves_its_first_steps(tmp_path: Path, steps: int, recorded: list[int], planned: bool) -> None:
    recording = train(tmp_path / "r", "--steps", str(steps))
    assert recording.exit_code == 0, recording.err
    run = recording.run()
    (capture,) = run.captures
    assert list(range(capture.first_step, capture.last_step + 1)) == recorded
    assert bool(capture.reason) is not planned
    assert ("the job ended before the steps that were to be recorded" in recording.messages) is not planned
    assert (run.steps.seen, run.problems) == (steps, ())
    summary = analyze(recording.folder)
    assert list(summary.job.steps) == recorded
    assert {note.kind for note in summary.notes} >= ({"few_steps"} if planned else {"few_steps", "unplanned_capture"})


def test_early_steps_leave_no_trace_of_a_longer_job(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--steps", "18")
    assert [(each.first_step, each.last_step, each.reason) for each in recording.run().captures] == [(8, 15, "")]
    assert recording.traces() == ["rank-00000.capture-0.trace.json.gz"]
    assert recording.trace().recorded_steps() == list(range(8, 16))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_that_the_script_starts_itself(tmp_path: Path, method: str) -> None:
    options = ("--wait", "1", "--warmup", "0", "--active", "9")
    command = (sys.executable, str(SCRIPTS / "spawn.py"), str(tmp_path / "store"), method)
    recording = record(tmp_path / "r", *command, options=options)
    assert recording.exit_code == 0, recording.err
    for rank in (0, 1):
        run = recording.run(rank)
        assert (run.rank, run.world_size, run.outcome) == (rank, 2, "finished")
        # The end of a forked process does not run atexit handlers; the capture under way is written all the same.
        assert (run.captures[0].first_step, run.captures[0].last_step) == (1, 3)
        assert recording.trace(rank).steps()[:3] == [1, 2, 3]


def test_a_second_process_of_the_same_rank_has_a_recording_of_its_own(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", sys.executable, str(SCRIPTS / "nested.py"), options=SHORT)
    assert recording.exit_code == 0
    for folder in (recording.folder, recording.folder / "job-1"):
        run = load_run(run_file(folder, 0))
        assert (run.steps.seen, len(run.captures), run.problems) == (6, 1, ())
        assert load_launch(folder / LAUNCH_FILE).exit_code == 0
        assert analyze(folder).job.steps == (2, 3)
    assert f"perfscope analyze {recording.folder / 'job-1'}" in recording.messages
    both = analyze(recording.folder)
    assert both.roles is not None
    assert [row.job for row in both.roles.jobs] == ["job-0", "job-1"]


@pytest.mark.parametrize(
    ("active", "trial"),
    [("2", ["trial"]), ("9", ["trial"]), ("9", ["trial", "in-range"])],
    ids=["after its capture", "in the middle of it", "in a range of it"],
)
def test_ranks_that_a_notebook_launches_after_a_trial_run_are_a_job(
    tmp_path: Path, active: str, trial: list[str]
) -> None:
    command = (sys.executable, str(SCRIPTS / "spawn.py"), str(tmp_path / "store"), "fork", *trial)
    recording = record(tmp_path / "r", *command, options=("--wait", "1", "--warmup", "0", "--active", active))
    assert recording.exit_code == 0, recording.err
    assert (recording.run().world_size, recording.run().steps.seen) == (1, 6)
    for rank in (0, 1):
        run = load_run(run_file(recording.folder / "job-1", rank))
        assert (run.rank, run.world_size, run.steps.seen, run.problems) == (rank, 2, 4, ())
        assert [capture.first_step for capture in run.captures] == [1]
    summary = analyze(recording.folder / "job-1")
    assert (summary.job.ranks, summary.job.strategies) == ((0, 1), ("ddp",))


@pytest.mark.parametrize(
    ("fault", "recorded"),
    [
        ("perfscope.collectors.capture.steps:StepDetector.optimizer_step", False),
        ("perfscope.collectors.ranges.ranges:Ranges._begin", True),
    ],
)
def test_a_fault_of_ours_does_not_reach_the_training(tmp_path: Path, fault: str, recorded: bool) -> None:
    recording = train(tmp_path / "r", "--steps", "6", "--fault", fault, options=SHORT)
    assert recording.exit_code == 0, recording.err
    assert recording.out.splitlines()[0].endswith("after: [] hooks: 0")
    assert bool(recording.traces()) == recorded
    assert "(RuntimeError: injected)" in recording.messages


def test_an_unwritable_folder_does_not_stop_the_training(tmp_path: Path) -> None:
    code = "import shutil, sys, runpy; shutil.rmtree(sys.argv.pop(1)); runpy.run_path(sys.argv[1], run_name='__main__')"
    script = str(SCRIPTS / "nested.py")
    recording = record(tmp_path / "r", sys.executable, "-c", code, str(tmp_path / "r"), script, "inner", options=SHORT)
    assert recording.exit_code == 0, recording.err
    assert not (tmp_path / "r").exists()
    assert "nothing was recorded" in recording.messages


def test_it_says_when_and_kineto_says_nothing(tmp_path: Path) -> None:
    recording = train(tmp_path / "r", "--steps", "7", options=("--wait", "1", "--warmup", "1", "--active", "2"))
    said = [line for line in recording.err.splitlines() if "perfscope: profiler" in line]
    assert said == [
        "perfscope: profiler on: 1 warm-up step, then steps 2-3 are recorded",
        "perfscope: profiler off: steps 2-3 are recorded",
    ]
    assert "USDT:" not in recording.err


def test_ranges_of_the_script_that_outlast_a_capture_end_with_it(tmp_path: Path) -> None:
    # The first steps, kept in case that the job is short, are recorded until the planned capture begins.
    options = ("--wait", "3", "--warmup", "1", "--active", "6")
    recording = record(tmp_path / "r", sys.executable, str(SCRIPTS / "ranged.py"), options=options)
    assert recording.exit_code == 0, recording.err
    run = load_run(run_file(recording.folder, 0))
    assert (len(run.captures), run.problems) == (1, ())


def test_the_last_step_ends_before_the_profiler_stops(tmp_path: Path) -> None:
    # Stopping looks through all objects, which takes long where there are many.
    code = (
        "import gc, runpy, sys, time\n"
        "look = gc.get_objects\n"
        "gc.get_objects = lambda *generation: (time.sleep(4), look(*generation))[1]\n"
        "runpy.run_path(sys.argv[1])\n"
    )
    options = ("--wait", "3", "--warmup", "1", "--active", "6")
    recording = record(tmp_path / "r", sys.executable, "-c", code, str(SCRIPTS / "ranged.py"), options=options)
    assert recording.exit_code == 0, recording.err
    (last,) = (event for event in recording.trace().events if event["name"] == "ProfilerStep#9")
    assert last["dur"] < 4e6
