"""Folders with one file changed, through the whole of ``perfscope analyze``; of some the page, JSON and texts, too."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from perfscope.analyzers import readers
from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.errors import PerfscopeError
from perfscope.recording.job import open_job
from tests.campaign import mutators, seeds
from tests.campaign.kinds import Dice, Kind
from tests.recording.mutations import outcome

RAW: Final = re.compile(
    r"Traceback|object has no attribute|codec can't|Error -?\d+ while|invalid literal|indices must be|unhashable|"
    r"not subscriptable|positional argument|unsupported operand|NoneType|not iterable|out of range|numpy|math domain|"
    r"sqlite3?\.|"
    r"cannot convert float|too many values|object is not|must be str|<class |\b[A-Z]\w+(?:Error|Warning|Exception): "
)
"""Words of Python's own exceptions: no user should have to read them."""

_SHOWN = 0.06
"""Of the analyses: everything that can be written is written, which takes longer than most of them."""


class Unsound(AssertionError):
    """An analysis ended otherwise than with a result or an error that names the folder; its text says how."""


def _change(name: str, data: bytes, dice: Dice) -> bytes:
    if name.endswith(".sqlite"):
        return mutators.change_sqlite(data, dice)
    if name.endswith((".jsonl", ".log")):
        return mutators.change_lines(data, dice)
    if name.endswith(".json"):
        changed = mutators.change_json(data, dice)
        return mutators.pack(changed, dice) if "rank0" in name and dice.random() < 0.1 else changed
    if name.endswith((".bin", ".txt")):
        return mutators.change_bytes(data, dice)
    if dice.random() < 0.4:
        return mutators.change_bytes(data, dice)
    return pickle.dumps(mutators.change_value(pickle.loads(data), dice), dice.choice((2, 4)))


def _of(held: seeds.Folder, *changed: str) -> Callable[[Dice, Path], str]:
    """Change one of the files whose names end in one of ``changed`` (all files, where none is given) and analyze."""
    names = [name for name in held if not changed or name.endswith(changed)]
    label = random.Random(repr(sorted(held)) + repr(changed)).getrandbits(32)

    def run(dice: Dice, folder: Path) -> str:
        place = folder / f"{label:08x}"
        if not place.exists():
            seeds.write(held, place)
        name = dice.choice(names)
        (place / name).write_bytes(_change(name, held[name], dice))
        try:
            if dice.random() < _SHOWN:
                if (fault := outcome(place)) is not None:
                    raise Unsound(fault)
                return "shown"
            return _analyzed(place)
        finally:
            (place / name).write_bytes(held[name])

    return run


def _analyzed(place: Path) -> str:
    told: str | None = None
    try:
        summary = analyze(place, workers=1)
    except PerfscopeError as error:
        told = str(error)
        if not RAW.search(told):
            raise
    else:
        told = next((failure.error for failure in summary.job.failures if RAW.search(failure.error)), None)
        if told is None:
            return "with failures" if summary.job.failures else "analyzed"
    # Once more, without the engine that makes a sentence of every exception: to see where it was raised.
    for source in open_job(place).sources:
        with suppress(PerfscopeError):
            for part in readers.parts(source.path):
                analyze_rank(readers.read(source.path, part))
    raise Unsound(f"raw words in a rank's failure: {told}")


_ONE: Final = {"rank0.json": json.dumps(seeds.trace(steps=2)).encode()}
_TWO: Final = {f"rank{rank}.json": json.dumps(seeds.trace(rank, 2)).encode() for rank in range(2)}
_SNAPSHOTS: Final = {"rank0.pickle": pickle.dumps(seeds.snapshot(), 4)}
_LOGS: Final = {f"node-a-pid{100 + rank}.log": seeds.inspector(rank) for rank in range(2)}
_METADATA: Final = (".run.json", "perfscope.json", ".samples.jsonl", ".steps.bin")

KINDS: Final = {
    "analyze: trace": Kind(4, _of(_ONE)),
    "analyze: traces of two ranks": Kind(1, _of(_TWO)),
    "analyze: recording": Kind(1, _of(seeds.recording(2))),
    "analyze: recording's metadata": Kind(3, _of(seeds.recording(1), *_METADATA)),
    "analyze: step histories": Kind(29, _of(seeds.histories(2))),
    "analyze: dumps and stacks": Kind(36, _of(seeds.stuck())),
    "analyze: memory snapshot": Kind(30, _of(_SNAPSHOTS)),
    "analyze: inspector logs": Kind(16, _of(_LOGS)),
    "analyze: nsys export": Kind(1, _of({"report.sqlite": seeds.EXPORTS[2]})),
}
