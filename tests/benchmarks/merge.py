"""How large merged traces are, and what making them takes.

    python -m tests.benchmarks.merge --ranks 8,64,256

Each set is written to a temporary folder and merged in a process of its own with nothing in the cache: with the default
choice of ranks and steps, and with all ranks. Memory is the peak of the whole process tree. The last column is the
size of the same slices, arrows and counters as Chrome's JSON, packed with gzip.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.analyzers.merge import perfetto_file
from tests.benchmarks import generate, measure

MERGE = """
import sys, perfscope
if __name__ == "__main__":
    options = {"ranks": "all", "max_size_mb": 10_000} if sys.argv[3] == "all" else {}
    merged = perfscope.merge(sys.argv[1], sys.argv[2], **options)
    print(merged)
"""


def rows(folder: Path, counts: list[int], megabytes: float) -> Iterator[str]:
    """A line for each number of ranks and choice."""
    for ranks in counts:
        files = folder / f"{ranks}"
        read = generate.write_set(files, ranks, int(megabytes * 1e6), packed=True)
        for choice in ("default", "all"):
            target = folder / "merged.pftrace"
            command = [sys.executable, "-c", MERGE, str(files), str(target), choice]
            cost = measure.run(command, {"PERFSCOPE_CACHE": "off"})
            size = target.stat().st_size
            slices, as_json = _as_json(target) if size < 50e6 else (0, 0)
            yield (
                f"| {ranks} | {read / 1e6:.0f} | {choice} | {slices or '':,} | {size / 1e6:.2f} | {cost.wall_s:.1f} | "
                f"{cost.cpu_s:.1f} | {cost.peak_bytes / 1e6:.0f} | {as_json / 1e6:.2f} |"
            )
        for path in files.iterdir():
            path.unlink()


def _as_json(path: Path) -> tuple[int, int]:
    """Slices of a file, and bytes of the same as Chrome's JSON."""
    file = perfetto_file.read(path)
    events: list[dict[str, object]] = []
    for uuid, track in file.tracks.items():
        events.append(
            {"ph": "M", "name": "thread_name", "pid": track.parent, "tid": uuid, "args": {"name": track.name}}
        )
        events += [
            {"ph": "X", "name": each.name, "pid": track.parent, "tid": uuid, "ts": each.start_ns / 1e3,
             "dur": each.duration_ns / 1e3, **({"args": each.args} if each.args else {})}
            for each in track.slices
        ]  # fmt: skip
        events += [
            {"ph": "C", "name": track.name, "pid": track.parent, "ts": time / 1e3, "args": {"value": value}}
            for time, value in track.values
        ]
    for number, (source, target) in enumerate(file.arrows):
        for phase, each in (("s", source), ("f", target)):
            events.append({
                "ph": phase, "bp": "e", "cat": "flow", "name": "flow", "id": number, "pid": each.track.parent,
                "tid": each.track.uuid, "ts": each.start_ns / 1e3,
            })  # fmt: skip
    text = json.dumps({"traceEvents": events}, separators=(",", ":"))
    return len(file.slices), len(gzip.compress(text.encode(), compresslevel=6))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,256", help="numbers of ranks (default 8,64,256)")
    parser.add_argument("--megabytes", type=float, default=8, help="unpacked size of each rank's trace (default 8)")
    arguments = parser.parse_args()
    print("| ranks | read MB | ranks shown | slices | file MB | wall s | CPU s | peak MB | as JSON MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for line in rows(Path(folder), [int(count) for count in arguments.ranks.split(",")], arguments.megabytes):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
