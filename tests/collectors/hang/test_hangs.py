"""Real trainings on gloo that come to a standstill, each in its own way: what the ranks leave in the recording."""

from __future__ import annotations

import html
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perfscope import analyze
from perfscope.recording.paths import flight_file, stacks_file
from perfscope.reports.page import page
from tests.collectors.harness import PERFSCOPE, SCRIPTS, kill_all, needs_torch, of_ranks, record
from tests.waiting import free_port, until

pytestmark = [pytest.mark.training, needs_torch]

HANGS = SCRIPTS / "hangs.py"


@contextmanager
def stuck(folder: Path, kind: str, ranks: int, steps: int = 3) -> Iterator[Path]:
    """The recording of a training that stands still after ``steps``, while it does; killed afterwards."""
    command = of_ranks(ranks, str(HANGS), kind)
    process = subprocess.Popen(
        [*PERFSCOPE, "run", "-o", str(folder), "--hang-timeout", "3", "--no-sampler", "--", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        standing = [Standing(folder, rank, steps) for rank in range(ranks)]
        until(lambda: sum(each.look() for each in standing) == ranks, "all ranks stand still", process)
        yield folder
    finally:
        kill_all(process)
        process.wait()


class Standing:
    """Whether a rank has come as far as it can: it writes the same again, having made no step for twice as long.

    On a busy machine it may have written first where it stood for no reason of its own.
    """

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        self._folder, self._rank, self._steps = folder, rank, steps
        self._written: dict[int, object] = {}

    def look(self) -> bool:
        try:
            when = flight_file(self._folder, self._rank).stat().st_mtime_ns
            content, stack = dump(self._folder, self._rank), main_thread(self._folder, self._rank)
        except FileNotFoundError:  # not yet, or not any more: it went on
            return False
        entries = content["entries"]
        if content["perfscope"]["steps"] < self._steps or not (self._steps or self._rank == 1 or entries):
            return False
        last = [(entry["profiling_name"], entry["retired"]) for entry in entries[-1:]]
        self._written[when] = (stack, len(entries), last)
        *_, before, now = None, *self._written.values()
        return before == now


def last(folder: Path, rank: int) -> tuple[str, bool, tuple[str, int] | None]:
    """A rank's last collective or message, whether it has ended, and where in the script it was called."""
    entry = dump(folder, rank)["entries"][-1]
    here = (frame for frame in entry["frames"] if frame["filename"] == str(HANGS))
    place = next(((frame["name"], frame["line"]) for frame in here), None)
    return entry["profiling_name"], entry["retired"], place


def dump(folder: Path, rank: int) -> dict[str, Any]:
    content: dict[str, Any] = pickle.loads(flight_file(folder, rank).read_bytes())
    return content


def main_thread(folder: Path, rank: int) -> list[int]:
    """Lines of the script in the main thread's stack, innermost first."""
    stack = stacks_file(folder, rank).read_text().rpartition("Thread 0x")[2]
    return [int(line) for line in re.findall(rf'File "{re.escape(str(HANGS))}", line (\d+)', stack)]


class Told(NamedTuple):
    """What the analysis says."""

    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    line: int
    """Of the script, where the missing rank stands."""


def told(folder: Path) -> Told:
    """The answer, as JSON has it, of which the page and the first advice show the place in the code, too."""
    summary = analyze(folder)
    hang = json.loads(json.dumps(summary.to_dict()))["hang"]
    (site,) = (each for each in hang["call_sites"] if each["missing"])
    assert (site["ranks"], site["file"], site["source"]) == (hang["missing_ranks"], str(HANGS), "stack")
    place = f"{site['function']} ({site['file']}:{site['line']})"
    assert place in (summary.verdict.first_action or "")
    assert place in html.unescape(page.render(summary))
    return Told(tuple(hang["missing_ranks"]), tuple(hang["waiting_ranks"]), site["line"])


def line_of(mark: str) -> int:
    """The line of the script that ends with a mark."""
    return next(n for n, line in enumerate(HANGS.read_text().splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.mark.parametrize("kind", ["sleep", "loop", "lock"])
def test_a_rank_that_is_busy_with_itself(tmp_path: Path, kind: str) -> None:
    with stuck(tmp_path / "r", kind, 2) as folder:
        assert last(folder, 0)[:2] == ("gloo:all_reduce", False)
        assert last(folder, 1)[:2] == ("gloo:broadcast", True), "its last collective is over"
        assert main_thread(folder, 1)[0] in (line_of(f"HERE {kind}"), line_of(f"HERE {kind}") - 1)  # or its while
        answer = told(folder)
        assert answer[:2] == ((1,), (0,))
        assert answer.line in (line_of(f"HERE {kind}"), line_of(f"HERE {kind}") - 1)
        assert dump(folder, 1)["perfscope"]["steps"] == dump(folder, 0)["perfscope"]["steps"] == 3


def test_an_exception_in_a_process_that_does_not_end(tmp_path: Path) -> None:
    with stuck(tmp_path / "r", "exception", 2) as folder:
        assert "\nUncaught RuntimeError\n" in stacks_file(folder, 1).read_text()
        assert main_thread(folder, 1)[0] == line_of("HERE exception")
        assert told(folder) == ((1,), (0,), line_of("HERE exception"))
        assert last(folder, 0)[:2] == ("gloo:all_reduce", False)
        assert last(folder, 1)[:2] == ("gloo:broadcast", True)


def test_a_dataloader_whose_worker_waits_for_a_lock(tmp_path: Path) -> None:
    with stuck(tmp_path / "r", "dataloader", 2) as folder:
        assert "torch/utils/data/dataloader.py" in stacks_file(folder, 1).read_text()
        assert told(folder) == ((1,), (0,), line_of("HERE dataloader"))
        assert last(folder, 0)[:2] == ("gloo:all_reduce", False)
        assert last(folder, 1)[:2] == ("gloo:broadcast", True)


def test_a_collective_left_out(tmp_path: Path) -> None:
    with stuck(tmp_path / "r", "skip", 3) as folder:
        assert last(folder, 0) == ("gloo:all_reduce", False, ("report", line_of("WAIT")))
        assert last(folder, 1)[:2] == ("gloo:broadcast", False)
        assert told(folder) == ((1,), (0, 2), line_of("HERE skip"))
        numbers = {dump(folder, rank)["entries"][-1]["collective_seq_id"] for rank in range(3)}
        assert len(numbers) == 1, "each is at the same place in the group's order, with different collectives"


def test_unlike_shapes(tmp_path: Path) -> None:
    """Gloo may end the all-reduce on ranks 0 and 2, which go on until they wait for rank 1."""
    with stuck(tmp_path / "r", "shape", 3) as folder:
        assert last(folder, 1) == ("gloo:all_reduce", False, ("report", line_of("HERE shape")))
        answer, hang = told(folder), analyze(folder).hang
    assert (answer.missing, answer.line) == ((1,), line_of("HERE shape"))
    assert hang is not None
    assert [variant.ranks for variant in hang.mismatches[0].variants] == [(0, 2), (1,)]
    assert (hang.collective, hang.last_seen[0].evidence) == ("all_reduce", "issued another operation")


def test_another_order(tmp_path: Path) -> None:
    with stuck(tmp_path / "r", "order", 3) as folder:
        assert last(folder, 1) == ("gloo:broadcast", False, ("report", line_of("HERE order")))
        assert last(folder, 2) == ("gloo:all_reduce", False, ("report", line_of("WAIT")))
        assert told(folder) == ((1,), (0, 2), line_of("HERE order"))


def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    with stuck(tmp_path / "r", "message", 3) as folder:
        assert last(folder, 2)[:2] == ("gloo:recv 2<-1", False)
        assert last(folder, 0)[:2] == last(folder, 1)[:2] == ("gloo:barrier", False)
        messages = [entry for entry in dump(folder, 1)["entries"] if entry["is_p2p"]]
        assert {entry["profiling_name"] for entry in messages} == {"gloo:recv 1<-0", "gloo:send 1->2"}
        assert all(entry["retired"] for entry in messages)
        assert dump(folder, 0)["pg_config"]["0"]["ranks"] == "[0, 1, 2]"
        assert told(folder) == ((1,), (2,), line_of("HERE message"))


def test_a_job_that_makes_no_first_step(tmp_path: Path) -> None:
    with stuck(tmp_path / "r", "setup", 2, steps=0) as folder:
        assert last(folder, 0)[:2] == ("gloo:barrier", False)
        assert main_thread(folder, 1)[0] == line_of("HERE setup")
        assert told(folder) == ((1,), (0,), line_of("HERE setup"))


SCRIPT = """
import ctypes, os, sys, time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
def steps(n):
    for _ in range(n):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        time.sleep(0.2)
steps(10)
if sys.argv[1] == "pause":
    time.sleep(6)
    steps(10)
elif sys.argv[1] == "fork":
    steps(10)
    child = os.fork()
    if not child:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
elif sys.argv[1] == "lock":
    ctypes.PyDLL(None).usleep(15_000_000)
    os._exit(9)
"""


FORKED = """
import os, sys, time, torch
def steps(n):
    for _ in range(n):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        time.sleep(0.2)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
steps(3)
child = os.fork()
if not child:
    os.environ["RANK"] = "1"
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    steps(20)
    time.sleep(1)  # what was written before, on a busy machine, is removed
    while not os.path.exists(sys.argv[1]): time.sleep(0.1)  # HERE
    os._exit(0)
while not os.waitpid(child, os.WNOHANG)[0]:
    steps(1)
"""


def test_a_rank_that_was_forked_is_watched_by_itself(tmp_path: Path) -> None:
    """It goes on for longer than it may stand still, and then stands still; its parent trains all the time."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    command = (sys.executable, "-c", FORKED, str(stacks_file(tmp_path / "r", 1)))
    recording = record(tmp_path / "r", *command, options=OPTIONS, environment=ranks)
    assert recording.exit_code == 0, recording.err
    assert [name for name in files(recording.folder) if name.endswith("stacks.txt")] == ["rank-00001.stacks.txt"]
    line = next(n for n, line in enumerate(FORKED.splitlines(), 1) if line.endswith("# HERE"))
    assert f'File "<string>", line {line} in <module>' in stacks_file(recording.folder, 1).read_text()


PARENT = """
import os, sys, time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
def rank(number):
    os.environ["RANK"] = str(number)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(60):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        time.sleep(0.15)
if sys.argv[1] == "fork":
    child = os.fork()
    if not child:
        rank(1)
        os._exit(0)
    os.waitpid(child, 0)
elif sys.argv[1] == "join":
    torch.multiprocessing.start_processes(rank, nprocs=1, start_method="fork")
else:
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.1)
print(os.path.exists(sys.argv[2]))
"""


@pytest.mark.parametrize("how", ["fork", "join", "sleep"])
def test_a_process_that_waits_for_its_ranks_is_none_that_stands_still(tmp_path: Path, how: str) -> None:
    """It makes an optimizer and no step. Where it sleeps instead, it does stand still."""
    file = stacks_file(tmp_path / "r", 0)
    recording = record(
        tmp_path / "r", sys.executable, "-c", PARENT, how, str(file), options=(*OPTIONS, "--hang-timeout", "4")
    )
    assert recording.exit_code == 0, recording.err
    assert recording.out.split() == [str(how == "sleep")]


OPTIONS = ("--steps-only", "--hang-timeout", "2", "--no-sampler")


def files(folder: Path) -> list[str]:
    """What stuck ranks left."""
    return sorted(path.name for path in folder.rglob("*") if "stacks" in path.name or "flight" in path.name)


@pytest.mark.parametrize("what", ["nothing", "pause", "fork"])
def test_a_job_that_goes_on_leaves_nothing(tmp_path: Path, what: str) -> None:
    """Also where it paused for longer, or a child that it forked ended while the timer ran in the parent."""
    recording = record(tmp_path / "r", sys.executable, "-c", SCRIPT, what, options=OPTIONS)
    assert recording.exit_code == 0, recording.err
    assert files(recording.folder) == []


def test_stacks_of_an_interpreter_that_is_locked(tmp_path: Path) -> None:
    """Nothing in Python runs from the lock to the end: the timer's own thread has written, the launcher keeps it."""
    recording = record(tmp_path / "r", sys.executable, "-c", SCRIPT, "lock", options=OPTIONS)
    assert recording.exit_code == 9
    # On a busy machine steps before the lock may take long enough to be noticed as well.
    assert "rank-00000.stacks.txt" in files(recording.folder)
    assert 'File "<string>", line 21 in <module>' in stacks_file(recording.folder, 0).read_text()
    assert "rank 0 stood still, and wrote stacks and last collectives" in recording.messages
