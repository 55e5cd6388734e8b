"""Feeds the Chrome reader mutated traces (``tests.analyzers.readers.fuzz``) and prints how the inputs ended.

    python -m tests.benchmarks.fuzz_chrome --inputs 100000

Where the compiled scanner is built, each input must give the same trace with it as without it. ``--sanitize`` builds it
once more, with gcc's address and undefined-behaviour sanitizers, and reads with that; a fault ends the run.

A failure can be repeated: ``--seed S --first N --inputs 1``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

from perfscope.analyzers.readers import chrome
from tests.analyzers.readers.fuzz import limit_memory, run_many
from tests.benchmarks import sanitized

_SCANNER = "perfscope.analyzers.readers._scan"


def main() -> int:
    """Run the inputs asked for; exit 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many (default 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--sanitize", action="store_true", help="with the scanner built with sanitizers")
    options = parser.parse_args()
    if options.sanitize:
        arguments = [each for each in sys.argv[1:] if each != "--sanitize"]
        source = Path(chrome.__file__).with_name("_scan.c")
        # Without a limit of memory, which would be the sanitizer's.
        return sanitized.run(_SCANNER, source, ["-m", "tests.benchmarks.fuzz_chrome", *arguments])
    limit = None if "libasan" in os.environ.get("LD_PRELOAD", "") else limit_memory
    started = time.monotonic()
    batch = max(1, min(1000, options.inputs // options.jobs))
    last = options.first + options.inputs
    stretches = [(options.seed, at, min(batch, last - at)) for at in range(options.first, last, batch)]
    ends: Counter[str] = Counter()
    failures: list[str] = []
    with get_context("spawn").Pool(options.jobs, initializer=limit) as pool:
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
