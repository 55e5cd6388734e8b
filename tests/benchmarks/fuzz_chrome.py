"""Feeds the Chrome reader mutated traces (``tests.analyzers.readers.fuzz``) and prints how the inputs ended.

    python -m tests.benchmarks.fuzz_chrome --inputs 100000

A failure can be repeated: ``--seed S --first N --inputs 1``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from multiprocessing import get_context

from tests.analyzers.readers.fuzz import limit_memory, run_many


def main() -> int:
    """Run the inputs asked for; exit 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many (default 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    started = time.monotonic()
    batch = max(1, min(1000, options.inputs // options.jobs))
    last = options.first + options.inputs
    stretches = [(options.seed, at, min(batch, last - at)) for at in range(options.first, last, batch)]
    ends: Counter[str] = Counter()
    failures: list[str] = []
    with get_context("spawn").Pool(options.jobs, initializer=limit_memory) as pool:
        for some_ends, some_failures in pool.starmap(run_many, stretches, chunksize=1):
            ends += some_ends
            failures += some_failures
    print(f"{options.inputs} inputs in {time.monotonic() - started:.0f} s, {len(failures)} failures")
    for end, count in sorted(ends.items()):
        print(f"  {count:7d}  {end}")
    for failure in failures[:20]:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
