"""How time and memory grow with the size of a file and with the number of ranks.

    python -m tests.benchmarks.growth

Each row is one ``perfscope.analyze`` in a process of its own, with nothing from the cache. Memory is the peak of the
whole process tree. Ranks are small files, of which the larger sets hold more of the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks import generate, measure

ANALYZE = """
import sys, perfscope
if __name__ == "__main__":
    summary = perfscope.analyze(sys.argv[1])
    assert len(summary.job.ranks) == int(sys.argv[2]), summary.job
"""
READ = """
import sys
from pathlib import Path
from perfscope.analyzers.readers import chrome
chrome.read(Path(sys.argv[1]))
"""


def by_size(folder: Path, sizes: list[float], rounds: int) -> Iterator[str]:
    """Lines for one file of each size: reading alone."""
    for megabytes in sizes:
        path = folder / f"{megabytes:g}.json.gz"
        written = generate.write_rank(path, 0, 8, int(megabytes * 1e6))
        cost = measure.median([measure.run([sys.executable, "-c", READ, str(path)]) for _ in range(rounds)])
        path.unlink()
        yield f"| {written / 1e6:.0f} | {cost.wall_s:.2f} | {cost.cpu_s:.2f} | {cost.peak_bytes / 1e6:.0f} |"


def by_ranks(folder: Path, counts: list[int], megabytes: float, rounds: int) -> Iterator[str]:
    """Lines for sets of each number of ranks: reading and the whole analysis."""
    for ranks in counts:
        files = folder / f"{ranks}"
        generate.write_set(files, ranks, int(megabytes * 1e6), packed=True)
        command = [sys.executable, "-c", ANALYZE, str(files), str(ranks)]
        cost = measure.median([measure.run(command, {"PERFSCOPE_CACHE": "off"}) for _ in range(rounds)])
        for path in files.iterdir():
            path.unlink()
        yield (
            f"| {ranks} | {cost.wall_s:.2f} | {cost.cpu_s:.2f} | {cost.peak_bytes / 1e6:.0f} | "
            f"{cost.cpu_s / ranks * 1e3:.0f} |"
        )


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="*", default=[10, 50, 100, 250, 500], help="MB, unpacked")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256], help="numbers of ranks")
    parser.add_argument("--megabytes", type=float, default=2, help="unpacked size of each rank's file (default 2)")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("| MB unpacked | wall s | CPU s | peak MB |\n|---|---|---|---|", flush=True)
        for line in by_size(folder, options.sizes, options.rounds):
            print(line, flush=True)
        print("\n| ranks | wall s | CPU s | peak MB | CPU ms a rank |\n|---|---|---|---|---|", flush=True)
        for line in by_ranks(folder, options.ranks, options.megabytes, options.rounds):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
