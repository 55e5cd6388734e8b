"""However a job ends, its recording can be read; whatever fails of ours, the training does not notice."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.history.rank_history import read
from perfscope.collectors.capture.history import BLOCK_S
from perfscope.recording.paths import partial, run_file, steps_file, trace_file
from tests.collectors.harness import PERFSCOPE, SCRIPTS, Recording, Running, needs_torch, record

pytestmark = [pytest.mark.training, needs_torch]

PACED = str(SCRIPTS / "paced.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CAPTURED = ("--no-sampler", "--wait", "1", "--warmup", "1", "--active", "2")
"""Records steps 2 and 3, long before anything ends."""
END_AT = 330
"""Step in which rank 1 ends: at 20 ms each, after two blocks of its history."""


def ending(folder: Path, how: str, *arguments: str, launcher: tuple[str, ...] = TORCHRUN) -> Recording:
    """Two ranks, captured, of which rank 1 ends in the middle of a step, with both traces compressed."""
    options = ("--ms", "20", "--end", how, "--end-at", str(END_AT), "--slow-rank", "1", "--steps", str(END_AT + 60))
    options += ("--end-after", *(str(trace_file(folder, rank, 0)) for rank in (0, 1)))
    return record(folder, *launcher, PACED, *options, *arguments, options=CAPTURED)


def holds(recording: Recording, rank: int, *, to_the_last: bool) -> None:
    """The rank's capture is whole, and so is its history up to its end, or up to its last block."""
    assert recording.trace(rank).recorded_steps() == [2, 3]
    steps = read(steps_file(recording.folder, rank))
    number = steps.number[steps.number < END_AT]
    assert number.tolist() == list(range(1, len(number) + 1))
    lost_ms = 0 if to_the_last else 1000 * (BLOCK_S + 2)
    assert END_AT - len(number) <= 1 + lost_ms / 20


@pytest.mark.parametrize(
    ("how", "message", "outcome", "cause", "code"),
    [
        # `os._exit` and a kill run nothing of ours; the peers fail in their next collective or are terminated.
        ("exit", "exitcode  : 3", "running", "exit", 3),
        ("kill", "Signal 9", "running", "signal", -9),
        ("raise", "RuntimeError: the training crashed", "exception", "exception", 1),
    ],
)
def test_a_rank_that_ends_leaves_what_was_complete(
    tmp_path: Path, how: str, message: str, outcome: str, cause: str, code: int
) -> None:
    recording = ending(tmp_path / "r", how)
    assert recording.exit_code == 1
    assert message in recording.err
    for rank in (0, 1):
        holds(recording, rank, to_the_last=rank == 1 and how == "raise")
    assert recording.run(1).outcome == outcome
    # torchrun may terminate rank 0 while it writes that it failed: the file that it wrote before stays as it was.
    left = {path.name for path in recording.folder.iterdir() if path.name.endswith(".partial")}
    assert left <= {partial(run_file(recording.folder, 0)).name}
    summary = analyze(recording.folder)
    assert summary.job.steps == (2, 3)
    assert summary.job.exit_code == 1
    assert summary.crash is not None
    first = summary.crash.ends[0]
    assert (summary.crash.cause_ranks, first.how, first.exit_code) == ((1,), cause, code)
    assert first.message == ("the training crashed" if how == "raise" else None)
    assert f"rank 1 {first.in_words().partition(' (')[0]}" in recording.messages


def test_a_collective_that_times_out_leaves_the_history_to_the_last_step(tmp_path: Path) -> None:
    """Rank 1 hangs; rank 0 waits for it in the backward until gloo gives up, and torchrun then ends both."""
    # Also of the ranks' first meeting, for which they may not be ready at the same time.
    recording = ending(tmp_path / "r", "hang", "--timeout", "30")
    assert recording.exit_code == 1
    assert re.search(r"[Tt]imed? ?out", recording.err)
    holds(recording, 0, to_the_last=True)
    holds(recording, 1, to_the_last=False)
    assert recording.run(0).outcome == "exception"
    assert analyze(recording.folder).crash is None, "rank 0 waited for rank 1, of which nothing is known"


def test_an_elastic_restart_keeps_both_attempts(tmp_path: Path) -> None:
    launcher = (*TORCHRUN[:-2], "--max-restarts", "1", *TORCHRUN[-2:])
    more = ("--first-attempt-only", "--store", str(tmp_path / "store"))
    recording = ending(tmp_path / "r", "kill", *more, launcher=launcher)
    assert recording.exit_code == 0, recording.err
    for rank in (0, 1):
        assert recording.run(rank).attempt == 1
        assert recording.trace(rank).recorded_steps() == [2, 3]
        steps = read(steps_file(recording.folder, rank))
        assert (steps.attempt, steps.number.tolist()) == (1, list(range(1, END_AT + 60)))
        assert steps.earlier_steps > END_AT / 4
    history = analyze(recording.folder).history
    assert history is not None
    assert [row.attempt for row in history.ranks] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_as_without_us(tmp_path: Path, number: signal.Signals) -> None:
    files = [steps_file(tmp_path / "r", rank) for rank in (0, 1)]

    def written() -> list[int]:
        return [len(read(file).number) if file.exists() and file.stat().st_size else 0 for file in files]

    with Running(tmp_path / "r", *TORCHRUN, PACED, "--ms", "20", "--steps", "100000", options=CAPTURED) as training:
        # SIGTERM ends a rank at once: what a rank has not written by then is not there.
        training.until_written(*(trace_file(tmp_path / "r", rank, 0).name for rank in (0, 1)))
        training.until(lambda: min(written()) > 3, "steps after the captured ones are in the histories")
        before = written()
        training.process.send_signal(number)
        recording = training.ended()
    assert recording.exit_code == 1
    assert "SignalException" in recording.err  # torchrun's own words
    for rank in (0, 1):
        assert recording.trace(rank).recorded_steps() == [2, 3]
        steps = read(files[rank]).number
        assert len(steps) >= before[rank]
        assert steps.tolist() == list(range(1, len(steps) + 1))
    # A rank that SIGTERM kills runs nothing more; SIGINT raises KeyboardInterrupt in it, where torchrun passes it on.
    assert recording.run(0).outcome in {signal.SIGTERM: ("running",), signal.SIGINT: ("running", "exception")}[number]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KB, less than a trace; only root may make one."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "perfscope-test", str(place)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("no right to mount a file system; another test limits the size of files instead")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_the_trace_and_not_the_training(small_disk: Path) -> None:
    options = ("--no-sampler", "--wait", "2", "--warmup", "1", "--active", "40")
    recording = record(small_disk / "r", sys.executable, PACED, "--ms", "1", "--steps", "80", options=options)
    assert recording.exit_code == 0, recording.err
    assert "rank 0 done after 80 steps" in recording.out
    assert "rank 0 left behind: [] []" in recording.out
    assert recording.traces() == []
    assert "is the disk full?" in recording.messages


def test_a_disk_that_fills_up_later_costs_only_what_comes_later(small_disk: Path) -> None:
    recording = record(
        small_disk / "r", sys.executable, PACED, "--ms", "20", "--steps", "700", "--end", "full", "--end-at", "350",
        options=("--no-sampler", "--steps-only"), environment={"FILL": str(small_disk / "filling")},
    )  # fmt: skip
    assert recording.exit_code == 0, recording.err
    assert "the disk is full" in recording.out
    assert "rank 0 done after 700 steps" in recording.out
    assert recording.messages.count("part of the step history could not be written") == 1  # printed once, tried again
    assert len(read(steps_file(recording.folder, 0)).number) > 50


def test_files_that_may_not_grow_cost_the_trace_and_not_the_training(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, which needs no rights: what a quota does."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    command = [sys.executable, PACED, "--ms", "1", "--steps", "40"]
    done = subprocess.run(
        [*PERFSCOPE, "run", "--output", str(tmp_path / "r"), *CAPTURED, "--", *command],
        capture_output=True, text=True, check=False, preexec_fn=limit, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 done after 40 steps" in done.stdout
    recording = Recording(tmp_path / "r", done.returncode, done.stdout, done.stderr)
    assert recording.traces() == []
    assert "this process records nothing more" in recording.run().problems[0]
    assert len(read(steps_file(recording.folder, 0)).number) == 39


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("perfscope.collectors.phases.phases:StepPhases._patch_loader", "patching data loading failed"),
        ("perfscope.collectors.phases.phases:StepPhases._patch_forwards", "patching the forward failed"),
        ("perfscope.collectors.capture.trigger:Trigger.look", "agreeing on captures failed"),
        ("perfscope.collectors.capture.watch:Background.start", "the background thread failed"),
        ("perfscope.collectors.capture.history:pack", "writing the step history failed"),
        ("perfscope.collectors.phases.clock:PhaseClock.begin", "timing the phases failed"),
    ],
)
def test_a_fault_of_ours_is_reported_once_and_disables_itself_alone(tmp_path: Path, fault: str, message: str) -> None:
    """In always-on mode, where most of ours is at work."""
    code = (
        "import importlib, runpy, sys\n"
        "import torch\n"
        "torch.optim.SGD([torch.zeros(1)])\n"  # the collector is imported now
        f"module, _, path = {fault!r}.partition(':')\n"
        "owner = importlib.import_module(module)\n"
        "*classes, name = path.split('.')\n"
        "for each in classes:\n"
        "    owner = getattr(owner, each)\n"
        "def broken(*args, **kwargs):\n"
        "    raise RuntimeError('injected')\n"
        "setattr(owner, name, broken)\n"
        "sys.argv[1:] = ['--ms', '45', '--steps', '30']\n"
        f"runpy.run_path({PACED!r}, run_name='__main__')\n"
    )
    recording = record(
        tmp_path / "r", sys.executable, "-c", code, options=("--no-sampler", "--trigger", "50")
    )  # fmt: skip
    assert recording.exit_code == 0, recording.err
    assert "rank 0 done after 30 steps" in recording.out
    assert "rank 0 left behind: [] []" in recording.out
    lines = [line for line in recording.err.splitlines() if line.startswith(f"perfscope: {message}")]
    assert len(lines) == len(set(lines)) == 1
    (problem,) = (problem for problem in recording.run().problems if message in problem)
    assert problem.endswith("(RuntimeError: injected)")
    if "history" not in fault:
        assert len(read(steps_file(recording.folder, 0)).number) == 29


def test_what_the_profiler_takes_to_start_and_to_write_is_in_no_step(tmp_path: Path) -> None:
    """Both are made to take most of a second; no measured step may hold that, captured or not.

    On a busy machine a step may be as long all the same: by what the process's threads waited for a core.
    """
    code = (
        "import glob, runpy, sys, time\n"
        "from pathlib import Path\n"
        "import torch\n"
        "torch.optim.SGD([torch.zeros(1)])\n"
        "def slowly(name):\n"
        "    original = getattr(torch.autograd.profiler, name)\n"
        "    def slow(*args, **kwargs):\n"
        "        time.sleep(0.4)\n"
        "        result = original(*args, **kwargs)\n"
        "        time.sleep(0.4)\n"
        "        return result\n"
        "    setattr(torch.autograd.profiler, name, slow)\n"
        "slowly('_prepare_profiler')\n"
        "slowly('_enable_profiler')\n"
        "slowly('_disable_profiler')\n"
        "sys.argv[1:] = ['--ms', '1', '--steps', '40']\n"
        f"runpy.run_path({PACED!r}, run_name='__main__')\n"
        "print(sum(int(Path(each).read_text().split()[1]) for each in glob.glob('/proc/self/task/*/schedstat')))\n"
    )
    recording = record(
        tmp_path / "r", sys.executable, "-c", code, options=("--no-sampler", "--repeat", "2", *CAPTURED[1:])
    )
    assert recording.exit_code == 0, recording.err
    waited_ns = int(recording.out.splitlines()[-2])  # the last line is printed at exit
    longest_ns = 400_000_000 + waited_ns
    assert len(recording.run().captures) == 2
    steps = read(steps_file(recording.folder, 0))
    assert len(steps.number) == 39
    assert steps.step_us.max() < longest_ns / 1e3
    for capture in range(2):
        windows = [event for event in recording.trace(0, capture).events if event["name"].startswith("ProfilerStep#")]
        assert max(event["dur"] for event in windows) < longest_ns / 1e3
    assert max(recording.run().steps.unprofiled_ns) < longest_ns


def test_processes_that_do_not_train_are_left_alone(tmp_path: Path) -> None:
    """A launcher that imports torch imports nothing of ours, a data loader's worker only what counts its batches."""
    (tmp_path / "tool.py").write_text(
        "import sys\n"
        "import torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "def first(batch):\n"
        "    return batch[0]\n"
        "def ours():\n"
        "    return sorted(name for name in sys.modules if name.startswith('perfscope'))\n"
        "class Names(Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): return ' '.join(ours()) or 'nothing'\n"
        "if __name__ == '__main__':\n"
        "    loader = DataLoader(Names(), num_workers=1, multiprocessing_context='spawn', collate_fn=first)\n"
        "    print('worker:', *loader)\n"
        "    print('tool:', ours())\n"
    )
    recording = record(tmp_path / "r", sys.executable, str(tmp_path / "tool.py"))
    assert recording.exit_code == 0, recording.err
    ours = "perfscope perfscope._version perfscope.collectors perfscope.collectors.phases"
    assert recording.out.splitlines() == [f"worker: {ours} perfscope.collectors.phases.fetching", "tool: []"]


def test_a_forked_worker_of_an_always_on_rank_is_left_alone(tmp_path: Path) -> None:
    """Forked in the middle of the run, when names are replaced: in the worker they are the originals again."""
    code = (
        "import signal, torch\n"
        "from torch.utils.data import DataLoader, Dataset, dataloader\n"
        "from torch import nn\n"
        "class Replaced(Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index):\n"
        "        names = [torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__]\n"
        "        hooks = len(model._forward_hooks) + len(model._forward_pre_hooks)\n"
        "        own = signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL\n"
        "        return sum(hasattr(name, '__wrapped__') for name in names) + hooks + own\n"
        "model = nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(6):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('rank', Replaced()[0], 'worker', [int(each) for each in DataLoader(Replaced(), num_workers=1)])\n"
    )
    recording = record(tmp_path / "r", sys.executable, "-c", code, options=("--no-sampler", "--steps-only"))
    assert recording.exit_code == 0, recording.err
    assert recording.out == "rank 5 worker [0]\n"


def test_metadata_are_written_when_they_change_and_not_at_every_step(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, torch\n"
        "torch.optim.SGD([torch.zeros(1)])\n"
        "from perfscope.collectors.capture import run_file\n"
        "written, save = [], run_file.save\n"
        "run_file.save = lambda *given: written.append(given[0].outcome) or save(*given)\n"
        "sys.argv[1:] = ['--ms', '1', '--steps', '60']\n"
        f"runpy.run_path({PACED!r}, run_name='__main__')\n"
        "print('written', written, 'perfscope.collectors.capture.capturer' in sys.modules)\n"
    )
    for number, options in enumerate((CAPTURED, ("--no-sampler", "--wait", "100"))):
        recording = record(tmp_path / f"r{number}", sys.executable, "-c", code, options=options)
        assert recording.exit_code == 0, recording.err
        # At the first step, after the capture, be it of the first steps alone; at the end once more.
        assert "written ['running', 'running'] True" in recording.out
        assert recording.run().outcome == "finished"
