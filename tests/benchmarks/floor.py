"""The Chrome reader, on one core, against ``json.load`` and against the floor, on the same bytes.

    python -m tests.benchmarks.floor trace.json trace.json.gz

The floor is what cannot be avoided: unpacking with the fastest library there is (isal) and finding the tokens with the
fastest JSON tokeniser there is (simdjson, ``pip install pysimdjson``), warm, which keeps nothing. Each is timed in CPU
seconds of this process, in turn; the medians' ratios are printed. Without arguments a trace of ``--megabytes`` is made.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from isal import igzip

from perfscope.analyzers.readers import chrome
from tests.benchmarks import generate


def is_packed(path: Path) -> bool:
    """Gzip, by its magic."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def json_load(path: Path) -> Callable[[], object]:
    """What anyone would write."""

    def load() -> object:
        with gzip.open(path) if is_packed(path) else path.open("rb") as file:
            return json.load(file)

    return load


def floor(path: Path, size: int) -> Callable[[], object]:
    """Unpack into memory that is already there, and tokenise with a parser that has seen the file before."""
    import simdjson

    parser = simdjson.Parser()
    text = bytearray(size)

    def tokenise() -> None:
        view = memoryview(text)
        with igzip.open(path) if is_packed(path) else path.open("rb", buffering=0) as file:
            filled = 0
            while filled < size and (got := file.readinto(view[filled:])):
                filled += got
        parser.parse(text)

    return tokenise


def unpacked_size(path: Path) -> int:
    """Bytes of text."""
    if not is_packed(path):
        return path.stat().st_size
    with igzip.open(path) as file:
        return sum(len(chunk) for chunk in iter(lambda: file.read(1 << 20), b""))


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU time of one call, with nothing left over for it to clean up."""
    gc.collect()
    started = time.process_time()
    run()
    return time.process_time() - started


def compare(path: Path, rounds: int) -> str:
    """One line of the table."""
    size = unpacked_size(path)
    contenders = {
        "json": json_load(path),
        "floor": floor(path, size),
        "reader": lambda: chrome.read(path),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            seconds[name].append(cpu_seconds(run))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rates = {name: size / 1e6 / value for name, value in medians.items()}
    return (
        f"| {path.name} | {size / 1e6:.0f} | {rates['json']:.0f} | {rates['reader']:.0f} | {rates['floor']:.0f} | "
        f"{medians['json'] / medians['reader']:.1f}× | {medians['reader'] / medians['floor']:.1f}× |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--megabytes", type=float, default=64, help="size of the trace that is made without arguments")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| trace | MB | json.load MB/s | reader MB/s | floor MB/s | reader over json.load | floor over reader |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        made = [Path(folder) / name for name in ("generated.json", "generated.json.gz")] if not options.traces else []
        for path in made:
            generate.write_rank(path, 0, 8, int(options.megabytes * 1e6))
        for path in options.traces or made:
            print(compare(path, options.rounds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
