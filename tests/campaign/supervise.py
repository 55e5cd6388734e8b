"""Runs inputs in processes of their own, bounded in time and memory, and notes how each ended.

A stretch of inputs is one process, forked from this one after everything is imported. What it found is a line of the
results' file, so that a campaign that was ended goes on where it was. Faults are counted by where they were raised.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from perfscope.errors import PerfscopeError
from tests.analyzers.readers import fuzz
from tests.campaign import kinds, whole

SECONDS: Final = 60
"""For one input."""
MEMORY: Final = 2 << 30
"""Bytes resident in a worker, and address space that it may take beyond what it starts with."""
STRETCH: Final = 2_000
"""Inputs of one process."""

KINDS: Final = {**kinds.KINDS, **whole.KINDS}


_OF_VALUES: Final = ("rank's metadata", "launch metadata")
"""Kinds whose readers raise ValueError: collectors, too, read these files."""


class TooLong(BaseException):
    """An input took longer than allowed. No Exception, so that nothing takes it for one of its own."""


@dataclass
class Results:
    """How inputs ended."""

    ends: Counter[str] = field(default_factory=Counter)
    """By kind and end."""
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By where they were raised: how often, the first input, its kind and the text."""
    peak_bytes: int = 0
    longest_s: float = 0.0
    inputs: int = 0
    cpu_s: float = 0.0

    def add(self, one: dict[str, Any]) -> None:
        """Add a stretch's results."""
        self.ends += Counter(one["ends"])
        for key, fault in one["faults"].items():
            known = self.faults.setdefault(key, {**fault, "count": 0})
            known["count"] += fault["count"]
        self.peak_bytes = max(self.peak_bytes, one["peak_bytes"])
        self.longest_s = max(self.longest_s, one["longest_s"])
        self.inputs += one["inputs"]
        self.cpu_s += one["cpu_s"]


def fault(kind: str, dice: random.Random, folder: Path) -> tuple[str, str, str]:
    """Run one input: (how it ended, a key for a fault or nothing, its text)."""
    try:
        return KINDS[kind].run(dice, folder), "", ""
    except (PerfscopeError, ValueError) as error:
        own = isinstance(error, PerfscopeError) or (kind in _OF_VALUES and str(error).startswith(str(folder)))
        if own and str(folder) in str(error) and not whole.RAW.search(str(error).replace(str(folder), "")):
            return f"refused ({type(error).__name__})", "", ""
        what = "an error with raw words, or that names no file" if own else "an exception"
        return "fault", _place(error, what), traceback.format_exc()
    except (Exception, TooLong) as error:
        return "fault", _place(error, "an exception"), traceback.format_exc()


def _place(error: BaseException, what: str) -> str:
    """Where an error was raised: file and line of the innermost calls of the product."""
    text = str(error) if isinstance(error, whole.Unsound) else "".join(traceback.format_exception(error))
    own = re.findall(r'File "[^"]*/((?:perfscope|analyzers|collectors|reports)/[^"]+)", line (\d+)', text)
    where = " < ".join(f"{file}:{line}" for file, line in own[-1:-3:-1])
    kind = (
        text.strip().rpartition("\n")[2].partition(":")[0] if isinstance(error, whole.Unsound) else type(error).__name__
    )
    told = re.sub(r"\d+|'[^']*'|/\S+", "…", str(error))[:60] if what != "an exception" else ""
    return f"{what}: {kind} at {where} {told}".strip()


def kind_of(seed: int, number: int, names: list[str]) -> tuple[str, random.Random]:
    """The kind of an input, and the dice that determine it."""
    # Random's own seeding with a text hashes it too, but takes ten times as long.
    dice = random.Random(int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "big"))
    return dice.choices(names, [KINDS[name].share for name in names])[0], dice


def run_stretch(seed: int, first: int, count: int, names: list[str], progress: Any = None) -> dict[str, Any]:
    """Inputs ``first`` to ``first + count``, in this process."""
    ends: Counter[str] = Counter()
    faults: dict[str, dict[str, Any]] = {}
    longest, began = 0.0, time.process_time()
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    before = signal.signal(signal.SIGALRM, _stop), sys.unraisablehook
    unraised: list[str] = []
    sys.unraisablehook = lambda event: unraised.append(f"{event.exc_value!r} {event.err_msg} {event.object!r}")
    try:
        for number in range(first, first + count):
            if progress is not None:
                progress.value = number
            kind, dice = kind_of(seed, number, names)
            signal.alarm(SECONDS)
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # users would see them
                end, key, text = fault(kind, dice, folder)
            signal.alarm(0)
            if unraised:
                end, key, text = "fault", f"not raised: {unraised[0][:60]}", unraised[0]
                unraised.clear()
            longest = max(longest, time.process_time() - start)
            ends[f"{kind}: {end}"] += 1
            if key:
                known = faults.setdefault(key, {"count": 0, "first": number, "kind": kind, "text": text[-3000:]})
                known["count"] += 1
    finally:
        signal.signal(signal.SIGALRM, before[0])
        sys.unraisablehook = before[1]
        shutil.rmtree(folder, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    used = time.process_time() - began
    return {
        "ends": ends, "faults": faults, "peak_bytes": peak, "longest_s": longest, "inputs": count, "cpu_s": used,
        "seed": seed, "first": first,
    }  # fmt: skip


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong(f"more than {SECONDS} s")


def _child(answer: Connection, progress: Any, seed: int, first: int, count: int, names: list[str]) -> None:
    fuzz.SECONDS_ALLOWED = SECONDS
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    answer.send(run_stretch(seed, first, count, names, progress))


def campaign(seed: int, numbers: Iterable[range], names: list[str], file: Path | None = None) -> Results:
    """Run stretches of inputs, each in a process; ``file`` gets a line for each.

    Those in it are not run again, unless they had faults.
    """
    for name in names:  # what they import is imported here, and not in each process
        run_stretch(seed, 0, 1, [name])
    results, done = Results(), set()
    for line in file.read_text().splitlines() if file is not None and file.exists() else ():
        known = json.loads(line)
        if known["seed"] == seed and not known["faults"]:
            done.add(known["first"])
            results.add(known)
    for stretch in numbers:
        if stretch.start in done:
            continue
        found = _in_process(seed, stretch, names)
        for one in found:
            results.add(one)
            if file is not None:
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(one) + "\n")
        click.echo(_line(results))
    return results


def _in_process(seed: int, stretch: range, names: list[str]) -> list[dict[str, Any]]:
    """The results of a stretch; one that killed its process is a fault, and the rest goes on after it."""
    context = get_context("fork")
    progress = context.Value("q", stretch.start, lock=False)
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_child, args=(theirs, progress, seed, stretch.start, len(stretch), names))
    worker.start()
    theirs.close()
    try:
        return [ours.recv()]
    except EOFError:
        worker.join()
        at = progress.value
        kind, _ = kind_of(seed, at, names)
        killed = {"count": 1, "first": at, "kind": kind, "text": f"exit code {worker.exitcode}"}
        one = {
            "ends": {f"{kind}: fault": 1}, "faults": {f"the process ended ({worker.exitcode}): {kind}": killed},
            "peak_bytes": 0, "longest_s": 0.0, "inputs": 1, "cpu_s": 0.0, "seed": seed, "first": stretch.start,
        }  # fmt: skip
        # What was before it is run again, without it; where it dies again it is another input.
        before, after = range(stretch.start, at), range(at + 1, stretch.stop)
        rest = [one for part in (before, after) if part for one in _in_process(seed, part, names)]
        return [one, *rest]
    finally:
        worker.join()


def _line(results: Results) -> str:
    analyses = sum(count for end, count in results.ends.items() if end.startswith("analyze"))
    return (
        f"{results.inputs:,} inputs ({analyses:,} analyses), {len(results.faults)} places of faults, "
        f"{results.cpu_s:.0f} s of CPU, peak {results.peak_bytes >> 20} MiB, longest {results.longest_s:.1f} s"
    )


def report(results: Results) -> str:
    """The results as text: a line for each kind, then each fault."""
    lines = [_line(results)]
    for name in KINDS:
        own = {end.partition(": ")[2] if not name.startswith("analyze") else end[len(name) + 2 :]: count
               for end, count in results.ends.items() if end.startswith(f"{name}: ")}  # fmt: skip
        if own:
            told = ", ".join(f"{end} {count:,}" for end, count in sorted(own.items(), key=lambda item: -item[1])[:6])
            lines.append(f"  {sum(own.values()):9,}  {name}: {told}")
    for key, found in sorted(results.faults.items(), key=lambda item: -item[1]["count"]):
        lines.append(f"{found['count']:6}x {key}  [{found['kind']}, --first {found['first']}]")
    return "\n".join(lines)
