"""Feeds the Chrome reader mutated traces and checks that it neither crashes, hangs, bloats nor loses events in silence.

What a trace mutated at random holds is not known, but some things must hold of any: it gives a sound ``Trace`` or a
``TraceError`` that names the file, within the time and memory allowed. Where the mutation's effect is known, the result
is compared with it: cut files keep what precedes the cut, an event damaged in one place costs at most itself and is
counted, and JSON that is still valid holds as many events as ``json`` finds in it.

An input is determined by the seed and its number, so a failure can be repeated.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import signal
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from perfscope.analyzers.readers import chrome, chrome_scan
from perfscope.errors import TraceError
from perfscope.trace.trace import ParseReport, Trace
from tests.analyzers.readers.helpers import differences

SECONDS_ALLOWED = 5.0
"""For inputs of a few kB that take about a millisecond; the rest is for a busy machine."""
MEMORY_ALLOWED = 512 << 20
"""Address space that a worker may take beyond what it starts with."""

SLICES = (1, 7, 64, 300, 1000, 4096, 1 << 19)
TOKENS = (
    b"NaN", b"Infinity", b"-Infinity", b"inf", b"-nan(ind)", b'"', b'""', b"\\", b"\\u", b"\\ud800", b"\\u0000", b"\0",
    b"\x01", b"\n", b"\x7f", b"\xff\xfe", b"\xf0\x9f\x98", b"{", b"}", b"[", b"]", b",", b":", b"},{", b'},\n{"ph"',
    b'"}, {"name": "', b"]}", b'"ph": "X",', b'"traceEvents": [', b"null", b"true", b"1e999", b"-1e-999", b"9" * 40,
    b"-" + b"9" * 400, b"0x10", b"1.5.5", b"[" * 3000, b'{"a":' * 2000, b"/*", b"'", b"  ", b"\xef\xbb\xbf",
    b"9" * 5000, b'"' + b"9" * 5000 + b'"', b"1e9999999999999999999", b'"Seq": ' + b"9" * 5000,
    b'"pid": "x' + b"9" * 5000,
    b'"ts": "soon"', b'"dur": -1', b'"args": 5', b'"args": {"device": [1]}', b'"baseTimeNanoseconds": 1e30,',
)  # fmt: skip


class TooLong(Exception):
    """An input took longer than allowed. No TraceError, so that the reader cannot take it for one of its own."""


class Wrong(AssertionError):
    """The reader did something that it must not do."""


@dataclass(frozen=True)
class Case:
    """One input, what was done to it, and how to check the result."""

    kind: str
    content: bytes
    slice_bytes: int
    check: Callable[[Trace | None], None]
    """Given the trace, or None where the reader refused the file; raises Wrong."""


# --- what is mutated ------------------------------------------------------------------------------------------------


def events_of(dice: random.Random, count: int, phases: str) -> list[dict[str, Any]]:
    """Events of every kind that writers write, each with a name of its own; most are complete events."""
    found = []
    for at in range(count):
        name = dice.choice(["aten::mm", "void kernel<{lambda()#1}, {lambda()#2}>", "a, b", "été", "x}, {y", "]}"])
        phase = dice.choice(phases) if dice.random() < 0.3 else "X"
        event: dict[str, Any] = {"ph": phase, "name": f"{name} {at}", "pid": dice.randint(0, 3), "tid": 7}
        event["ts"] = round(dice.uniform(0, 1e9), 3) if dice.random() < 0.8 else dice.randint(0, 10**9)
        if phase == "X":
            event["cat"] = dice.choice(["cpu_op", "kernel", "cuda_runtime", "user_annotation", "python_function"])
            event["dur"] = round(dice.uniform(0, 1e4), 3)
            event["args"] = {
                "External id": at, "correlation": at, "device": 0, "stream": 7, "Input Dims": [[at, 2], []],
                "Input type": ["float", ""], "nested": [{"name": "x"}, {"ph": "X"}],
            }  # fmt: skip
        found.append(event)
    found.append({"ph": "X", "cat": "cpu_op", "name": "last", "pid": 1, "tid": 1, "ts": 5, "dur": 1})
    return found


def pieces_of(dice: random.Random, phases: str = "sfMi") -> tuple[bytes, list[dict[str, Any]], list[bytes], bytes]:
    """A trace as (text before its events, its events, the text of each, text after them)."""
    events = events_of(dice, dice.randint(0, 12), phases)
    indent = dice.choice([None, None, 2])
    separators = dice.choice([(", ", ": "), (",", ":")])
    texts = [json.dumps(event, indent=indent, separators=separators).encode() for event in events]
    metadata = {"schemaVersion": 1, "distributedInfo": {"rank": 1, "world_size": 2}, "baseTimeNanoseconds": 1000}
    text = json.dumps(metadata).encode()
    shape = dice.randrange(3)
    if shape == 0:
        return b"[", events, texts, b"]"
    if shape == 1:
        return text[:-1] + b', "traceEvents": [\n', events, texts, b"\n]}"
    return b'{"traceEvents": [', events, texts, b"], " + text[1:]


# --- mutations whose effect is not known ----------------------------------------------------------------------------


def mutate(dice: random.Random, data: bytearray) -> None:
    """Change some bytes somewhere."""
    at = dice.randrange(len(data)) if data else 0
    length = min(int(dice.expovariate(0.05)), 400)
    match dice.randrange(7):
        case 0 if data:
            data[at] ^= 1 << dice.randrange(8)
        case 1 if data:
            data[at] = dice.randrange(256)
        case 2:
            del data[at:]
        case 3:
            del data[at : at + length]
        case 4:
            source = dice.randrange(len(data)) if data else 0
            data[at:at] = data[source : source + length]
        case 5:
            data[at:at] = bytes(dice.randrange(256) for _ in range(min(length, 30)))
        case _:
            data[at:at] = dice.choice(TOKENS)


def at_random(dice: random.Random) -> Case:
    """Anything anywhere, in traces with ranges in two halves too: which of these belong together may change."""
    before, _, texts, after = pieces_of(dice, "sfMiBBEEb")
    data = bytearray(before + b",\n".join(texts) + after)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        mutate(dice, data)
    content = bytes(data)
    return Case("text", content, dice.choice(SLICES), lambda trace: _like_json(content, trace))


def _like_json(content: bytes, trace: Trace | None) -> None:
    """Valid JSON holds the events that ``json`` finds in it."""
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=_not_json)
    except (ValueError, RecursionError):
        return
    if isinstance(document, dict):
        if content.count(b'"traceEvents"') != 1:
            return
        document = document.get("traceEvents")
    if not isinstance(document, list):
        return
    phases = Counter(event.get("ph") for event in document if isinstance(event, dict) and _is_plain(event.get("ph")))
    kept, dropped = (len(trace), trace.parse_report.dropped_events) if trace else (0, phases["X"] + phases["B"])
    reported = trace is not None and (trace.parse_report.truncated or trace.parse_report.notes)
    if (kept + dropped < phases["X"] and not reported) or kept > phases["X"] + phases["B"]:
        raise Wrong(f"valid JSON with {phases['X']} complete events: {kept} kept, {dropped} dropped")
    if trace is None and any(_is_sound(event) for event in document if isinstance(event, dict)):
        raise Wrong("refused valid JSON that holds a sound event")


def _not_json(constant: str) -> None:
    raise ValueError(constant)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_sound(event: dict[str, Any]) -> bool:
    """A complete event that nothing excuses from being read."""
    times = (event.get("ts"), event.get("dur", 0))
    return event.get("ph") == "X" and all(type(value) in (int, float) and 0 <= value < 1e12 for value in times)


def packed(dice: random.Random) -> Case:
    """A packed file with damage in the packing."""
    before, events, texts, after = pieces_of(dice)
    plain = before + b",\n".join(texts) + after
    pack = dice.choice(_PACKS)
    data = bytearray(pack(plain))
    for _ in range(dice.choice((0, 1, 1, 2))):
        mutate(dice, data)
    whole = bytes(data) == pack(plain)
    complete = sum(event["ph"] == "X" for event in events)

    def check(trace: Trace | None) -> None:
        if whole and (trace is None or len(trace) != complete):
            raise Wrong("a whole packed file was not read whole")
        if trace is not None and len(trace) < complete and not _reports_drops(trace):
            raise Wrong(f"{complete - len(trace)} of {complete} events lost without a word")

    return Case("packed", bytes(data), dice.choice(SLICES), check)


def _gzipped(plain: bytes) -> bytes:
    """Without the time of day, so that a case can be repeated."""
    return gzip.compress(plain, mtime=0)


def _in_two_members(plain: bytes) -> bytes:
    cut = len(plain) // 2
    return _gzipped(plain[:cut]) + _gzipped(plain[cut:])


def _zipped(plain: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("trace.json"), plain)
    return data.getvalue()


_PACKS: list[Callable[[bytes], bytes]] = [_gzipped, _in_two_members, _zipped]
with suppress(ImportError):
    _PACKS.append(import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd").compress)


def _reports_drops(trace: Trace) -> bool:
    return trace.parse_report != ParseReport()


# --- mutations whose effect is known --------------------------------------------------------------------------------


def cut(dice: random.Random) -> Case:
    """A file whose end is missing: what is whole before the cut is kept, in order, and the cut is reported."""
    before, events, texts, after = pieces_of(dice)
    plain = before + b",\n".join(texts) + after
    length = dice.randrange(len(plain))
    ends = [len(before) + sum(map(len, texts[: at + 1])) + 2 * at for at in range(len(texts))]
    names = [event["name"] for event, end in zip(events, ends, strict=True) if end <= length and event["ph"] == "X"]
    content = plain[:length]

    def check(trace: Trace | None) -> None:
        if names and trace is None:
            raise Wrong(f"refused, though {len(names)} whole events precede the cut")
        if trace is not None and _names(trace) != sorted(names):
            raise Wrong(f"cut after {len(names)} events: {len(trace)} kept")
        if trace is not None and not trace.parse_report.truncated:
            raise Wrong("does not report that it is cut")

    return Case("cut", content, dice.choice(SLICES), check)


_HARMFUL = (
    b"NaN", b"-Infinity", b"inf", b'"a "b" c"', b'"C:\\dir\\"', b'"\x01"', b'"\n"', b'"\\u12"', b"1.5.5", b"[1, 2}",
    b"nul", b"",
)  # fmt: skip


def one_event(dice: random.Random) -> Case:
    """One event with an argument that is not JSON: all others are read, and this one is read or counted."""
    before, events, texts, after = pieces_of(dice)
    at = dice.randrange(len(events))
    harm = dice.choice(_HARMFUL)
    texts[at] = texts[at].rstrip()[:-1].rstrip() + b', "odd": ' + harm + b"}"
    others = Counter(event["name"] for place, event in enumerate(events) if place != at and event["ph"] == "X")
    content = before + b",\n".join(texts) + after

    def check(trace: Trace | None) -> None:
        kept = Counter(_names(trace)) if trace else Counter()
        if missing := others - kept:
            raise Wrong(f"damage in event {at} cost others: {sorted(missing)}")
        extra = kept - others
        if trace is None or extra.total() > 1 or set(extra) - {events[at]["name"]}:
            if trace is None and not others:
                return
            raise Wrong(f"damage in event {at} made events: {sorted(extra)}")
        if not (trace.parse_report.dropped_events or trace.parse_report.repaired_events):
            raise Wrong(f"damage in event {at} is not counted: {trace.parse_report}")

    return Case("one event", content, dice.choice(SLICES), check)


def _names(trace: Trace) -> list[str]:
    return sorted(trace.name_of(row) for row in range(len(trace)))


# --- running --------------------------------------------------------------------------------------------------------

KINDS = ((at_random, 5), (packed, 2), (cut, 1), (one_event, 2))


def case_of(seed: int, number: int) -> Case:
    """The input of one number."""
    dice = random.Random(f"{seed}/{number}")
    makers, weights = zip(*KINDS, strict=True)
    made: Case = dice.choices(makers, weights)[0](dice)
    return made


def run_one(seed: int, number: int, folder: Path) -> str:
    """Read one input and check what came of it; returns its kind. Raises Wrong, or whatever the reader raised."""
    case = case_of(seed, number)
    path = folder / "trace.json"
    path.write_bytes(case.content)
    trace = _read(path, case)
    if chrome_scan.IS_BUILT:
        reference = _read(path, case, compiled=False)
        if (trace is None) != (reference is None) or (trace and (found := differences(trace, reference))):
            raise Wrong(f"the compiled scanner reads something else than Python: {found if trace else 'refused'}")
    case.check(trace)
    if trace is None:
        return f"{case.kind}: refused"
    trace.self_check()
    return f"{case.kind}: {'with drops' if _reports_drops(trace) else 'whole'}"


def _read(path: Path, case: Case, **options: Any) -> Trace | None:
    """The trace; None where the reader refuses it with an error that names the file."""
    with _time_limit(SECONDS_ALLOWED):
        try:
            return chrome.read(path, slice_bytes=case.slice_bytes, **options)
        except TraceError as error:
            if str(path) not in str(error):
                raise Wrong(f"the error does not name the file: {error}") from error
            return None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_many(seed: int, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Run a stretch of inputs; (how many ended how, a line for each failure)."""
    ends: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            try:
                ends[run_one(seed, number, Path(folder))] += 1
            except Exception as error:
                failures.append(f"--seed {seed} --first {number} --inputs 1: {type(error).__name__}: {error}")
    return ends, failures


def limit_memory() -> None:
    """Make allocations beyond what is allowed fail, in this process."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_ALLOWED, resource.RLIM_INFINITY))
