"""How each kind of file is changed and read, by its reader alone: milliseconds for an input.

A target takes a file's content and reads it as the product does; what it may raise is in ``supervise.fault``.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfscope.analyzers import cached, readers
from perfscope.analyzers.compare.budget_file import read_budget
from perfscope.analyzers.compare.check import check
from perfscope.analyzers.compare.compare import compare
from perfscope.analyzers.hang.answer import find_hang
from perfscope.analyzers.history import rank_history
from perfscope.analyzers.job.collectives.inspector import as_collectives, inspector_costs
from perfscope.analyzers.job.inspected import job_inspector
from perfscope.analyzers.job.system.samples import read_samples
from perfscope.analyzers.job.tables.ncu import read_export
from perfscope.analyzers.live.job import LiveJob
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.readers import flight, nsys, snapshot, stacks
from perfscope.analyzers.snapshots.job_snapshots import of_snapshot
from perfscope.collectors.agreement import PLANS_FILE, RECORD, REQUESTS_FILE, Board
from perfscope.execution.cache import Cache
from perfscope.recording import history, metadata
from perfscope.recording.job import Job, open_job
from perfscope.reports import terminal
from perfscope.reports.compare import terminal as comparison_terminal
from perfscope.results.file import load_summary
from tests.analyzers.job.tables.test_ncu import DETAILS, RAW
from tests.analyzers.live.live_jobs import MemorySource
from tests.analyzers.readers import fuzz
from tests.campaign import mutators, seeds

Dice = random.Random


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    share: int
    """Of 1,000 inputs."""
    run: Callable[[Dice, Path], str]
    """Make one input in a folder of the worker's own and read it; how it ended. Raises what the product raised."""


def _read(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _chrome(dice: Dice, folder: Path) -> str:
    """A trace as text, gzip or zip, with its values or its bytes changed."""
    changed = mutators.change_json(_TRACES[dice.randrange(2)], dice)
    if dice.random() < 0.2:
        changed = mutators.pack(changed, dice)
    path = _read(folder / "rank0.json", changed)
    trace = readers.read(path, readers.parts(path)[0])
    trace.self_check()
    return "read"


def _chrome_checked(dice: Dice, folder: Path) -> str:
    """A trace where what must be left after the change is known: nothing is lost in silence."""
    return fuzz.run_one(dice.getrandbits(48), 0, folder)


def _nsys(dice: Dice, folder: Path) -> str:
    path = _read(folder / "report.sqlite", mutators.change_sqlite(dice.choice(seeds.EXPORTS), dice))
    for part in readers.parts(path):
        nsys.read(path, part).self_check()
    return "read"


def _flight(dice: Dice, folder: Path) -> str:
    rank = dice.randrange(len(_FLIGHTS))
    document = pickle.loads(_FLIGHTS[rank])
    way = dice.random()
    if way < 0.4:
        data = mutators.change_bytes(pickle.dumps(document, dice.choice((2, 4, 5))), dice)
    elif way < 0.8:
        data = pickle.dumps(mutators.change_value(document, dice), dice.choice((2, 4)))
    else:
        data = mutators.change_json(json.dumps(document).encode(), dice)
    path = _read(folder / "nccl_trace_rank_0", data)
    dump = flight.read(path)
    if dice.random() < 0.5:
        whole = {other: flight.parse(each) for other, each in enumerate(_FLIGHTS)}
        find_hang({**whole, rank: dump}, {})
    return "read"


def _stacks(dice: Dice, folder: Path) -> str:
    path = _read(folder / "rank-00000.stacks.txt", mutators.change_bytes(dice.choice(seeds.STACKS), dice))
    threads = stacks.read(path)
    main = stacks.main_thread(threads)
    return "read" if main and stacks.user_call(main.calls) else "no call"


def _snapshot(dice: Dice, folder: Path) -> str:
    if dice.random() < 0.5:
        data = mutators.change_bytes(_SNAPSHOT, dice)
    else:
        data = pickle.dumps(mutators.change_value(pickle.loads(_SNAPSHOT), dice), dice.choice((2, 4, 5)))
    path = _read(folder / "rank0.pickle", data)
    of_snapshot(snapshot.read(path), 0, 80 << 30)
    return "read"


def _inspector(dice: Dice, folder: Path) -> str:
    path = _read(folder / "node-a-pid100.log", mutators.change_lines(_LOG, dice))
    rows, failures = job_inspector(Job(folder, (), inspector=(path,)))
    as_collectives(rows)
    inspector_costs(rows)
    return "read" if rows else f"{len(failures)} refused"


def _history(dice: Dice, folder: Path) -> str:
    # Every other one has values that no collector writes, under a right checksum.
    is_changed = dice.random() < 0.5
    data = mutators.change_bytes(_STEPS, dice) if is_changed else history.pack(_block(dice)) + _STEPS
    path = _read(folder / "rank-00000.steps.bin", data)
    last = rank_history.last_step(path)
    for attempt in rank_history.read_attempts(path):
        rank_history.reduce_steps(attempt, rank_history.RankFile(0, "", path), rank_history.bin_width(last))
    history.unpack_growing(data)
    return "read"


def _block(dice: Dice) -> history.Block:
    def number(bits: int) -> int:
        return dice.choice((0, 1, 40_000, 1 << bits - 2, (1 << bits) - 1))

    count = dice.choice((1, 2, 50))
    times = [number(62) if dice.random() < 0.2 else 40_000 for _ in range(count)]
    stages = dict.fromkeys(dice.sample(history.STAGES, dice.randrange(4)), times)
    waits = dice.choice((None, {}, {"forward": times, "core": times}))
    first, began = number(62), dice.choice((-1, 1)) * number(62)
    return history.Block(number(31), first, began, times, stages, dice.randbytes(count), waits)


def _run(dice: Dice, folder: Path) -> str:
    path = _read(folder / "rank-00000.run.json", mutators.change_json(_RUN, dice))
    return "with problems" if len(metadata.load_run(path).problems) > 1 else "read"


def _launch(dice: Dice, folder: Path) -> str:
    metadata.load_launch(_read(folder / "perfscope.json", mutators.change_json(_LAUNCH, dice)))
    return "read"


def _samples(dice: Dice, folder: Path) -> str:
    path = _read(folder / "host-node0.samples.jsonl", mutators.change_lines(_SAMPLES, dice))
    return f"{len(read_samples(path, -(2**63), 2**63 - 1))} runs"


def _live(dice: Dice, folder: Path) -> str:
    """A running job's files, looked at twice while one of them changes."""
    files = dict(_HISTORIES)
    name = dice.choice(list(files))
    change = mutators.change_lines if name.endswith("jsonl") else mutators.change_bytes
    if name.endswith(".json"):
        change = mutators.change_json
    files[name] = change(files[name], dice)
    source = MemorySource({key: data[: len(data) // 2] if key == name else data for key, data in files.items()})
    job = LiveJob(folder / "watched", source)
    job.look()
    source.files = files
    return job.look().state


def _summary(dice: Dice, folder: Path) -> str:
    """A summary or a page of other origin; where it is taken, what is made of it and compared with the true one."""
    if dice.random() < 0.25:
        path = _read(folder / "report.html", mutators.change_bytes(_PAGE, dice))
    else:
        path = _read(folder / "summary.json", mutators.change_json(_SUMMARY, dice))
    found = load_summary(path)
    if dice.random() < 0.6:
        terminal.verdict(found)
        comparison_terminal.comparison(compare(_known(folder), found))
    return "taken"


def _known(folder: Path) -> Any:
    if folder not in _TRUE:
        _TRUE[folder] = load_summary(_read(folder / "true.json", _SUMMARY))
    return _TRUE[folder]


def _budget(dice: Dice, folder: Path) -> str:
    if dice.random() < 0.5:
        path = _read(folder / "budget.toml", mutators.change_bytes(_BUDGET, dice))
    else:
        path = _read(folder / "budget.json", mutators.change_json(_BUDGET_JSON, dice))
    budget = read_budget(path)
    check(_known(folder), budget, baselines=[_known(folder)])
    return "taken"


def _cache(dice: Dice, folder: Path) -> str:
    """An entry of the cache that somebody else wrote: its bytes, or its pickle under a right checksum."""
    body = _partial(folder)
    if dice.random() < 0.7:
        body = mutators.change_bytes(body[16:], dice)
        body = hashlib.blake2b(body, digest_size=16).digest() + body
    else:
        body = mutators.change_bytes(body, dice)
    cache = Cache(folder / "cache")
    cache.save("entry.rank", lambda path: path.write_bytes(body))
    partial = cache.load("entry.rank", lambda entry: cached._unpack(entry.read_bytes()))
    return "refused" if partial is None else "taken"


def _partial(folder: Path) -> bytes:
    if folder not in _PARTIALS:
        path = _read(folder / "whole.json", _TRACES[0])
        _PARTIALS[folder] = cached._pack(analyze_rank(readers.read(path)), path)
    return _PARTIALS[folder]


def _ncu(dice: Dice, folder: Path) -> str:
    text = dice.choice((RAW, DETAILS)).encode()
    return f"{min(len(read_export(_read(folder / 'kernels.csv', mutators.change_bytes(text, dice)))), 3)} kernels"


def _board(dice: Dice, folder: Path) -> str:
    """What ranks agree about captures: files in the recording, which somebody else may have written to."""
    own = folder / "board" / ".bootstrap"
    own.mkdir(parents=True, exist_ok=True)
    plan = {"number": 0, "start": 5, "active": 3, "attempt": 0, "reason": "asked", "asked": True, "request": 0}
    for name, content in ((PLANS_FILE, plan), (REQUESTS_FILE, {"active": 5})):
        data = mutators.change_json(json.dumps(content).encode(), dice)
        (own / name).write_bytes((data.ljust(RECORD - 1) + b"\n") * dice.choice((1, 3)))
    board = Board(folder / "board", 0)
    board.look()
    return f"{board.open_request() is not None}"


_NAMES: Final = (
    "rank0.json", "rank-00000.run.json", "rank-00001.capture-0.trace.json.gz", "perfscope.json", "rank0.nsys-rep",
    "rank-00000.steps.bin", "host-a.samples.jsonl", "rank0.pickle", "nccl_trace_rank_1", "a-pid3.log", "x.sqlite",
    "rank-99999999999999999999.run.json", "rank-00000.capture-99999999999.trace.json", "step_9" * 30 + ".json",
    "trace_rank\u0661.json", "a\nb.json", "\udcff.json", "iteration_1", "job-1", ".hidden.json", "rank0.stack",
)  # fmt: skip


def _folder(dice: Dice, folder: Path) -> str:
    """A folder of odd names, some of them folders."""
    place = folder / "odd"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    some = (_TRACES[0], _RUN, _LAUNCH, _STEPS, _SAMPLES, _SNAPSHOT, _FLIGHTS[0], _LOG, b"", b"{}", dice.randbytes(40))
    for _ in range(dice.randrange(1, 6)):
        name = dice.choice(_NAMES)
        inside = place / dice.choice(("", "", "iteration_1", "job-1", "nccl-inspector", "rank0.json"))
        try:
            inside.mkdir(exist_ok=True)
            if dice.random() < 0.1:
                (inside / name).mkdir()
            else:
                (inside / name).write_bytes(dice.choice(some))
        except OSError:  # there is a file or a folder of that name
            continue
    return f"{len(open_job(place, dice.choice((None, None, 0, 1, -1, 10**12))).sources) > 0}"


_TRACES: Final = (json.dumps(seeds.trace()).encode(), json.dumps(seeds.trace(1, 2, 1), indent=1).encode())
_FLIGHTS: Final = [pickle.dumps(made, 2) for made in seeds.flights().values()]
_SNAPSHOT: Final = pickle.dumps(seeds.snapshot(), 4)
_LOG: Final = seeds.inspector(0)
_STEPS: Final = seeds.steps(0)
_RUN: Final = json.dumps(seeds.run()).encode()
_LAUNCH: Final = json.dumps(seeds.launch()).encode()
_SAMPLES: Final = seeds.samples()
_HISTORIES: Final = seeds.histories()
_SUMMARY, _PAGE = seeds.summary()
_BUDGET_JSON: Final = json.dumps(
    {
        "fail_on": "high", "ignore": ["dataloader"], "step_time": {"max": "2 s", "regression": "5 %"},
        "exposed_communication": {"max": "15 %"}, "mfu": {"min": 0.1, "optional": True},
    }
).encode()  # fmt: skip
_BUDGET: Final = (
    b'fail_on = "high"\nignore = ["dataloader"]\n[step_time]\nmax = "2 s"\nregression = "5 %"\n'
    b'[exposed_communication]\nmax = "15 %"\n[mfu]\nmin = 0.1\noptional = true\n'
)
_TRUE: Final[dict[Path, Any]] = {}
_PARTIALS: Final[dict[Path, bytes]] = {}

KINDS: Final = {
    "trace": Kind(45, _chrome),
    "trace, checked": Kind(30, _chrome_checked),
    "nsys export": Kind(8, _nsys),
    "flight-recorder dump": Kind(45, _flight),
    "stacks": Kind(140, _stacks),
    "memory snapshot": Kind(50, _snapshot),
    "inspector log": Kind(130, _inspector),
    "step history": Kind(50, _history),
    "rank's metadata": Kind(110, _run),
    "launch metadata": Kind(60, _launch),
    "samples": Kind(90, _samples),
    "watched recording": Kind(5, _live),
    "summary or page": Kind(8, _summary),
    "budget": Kind(20, _budget),
    "cache entry": Kind(35, _cache),
    "ncu export": Kind(80, _ncu),
    "capture plans": Kind(40, _board),
    "folder of odd names": Kind(20, _folder),
}
