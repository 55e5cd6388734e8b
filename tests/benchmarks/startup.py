"""How long a user waits for a command to start, relative to ``python -c pass`` on the same machine.

    python -m tests.benchmarks.startup

All commands run in turn; the table has the medians of their wall and CPU time and of their ratios to the interpreter
alone. ``perfscope run`` is timed until the command that it starts runs. ``analyze`` reads a sample of two ranks and
writes its page: with an empty cache, then with what the first one cached. Modules are compiled beforehand.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.measure import compiling

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "healthy"
PERFSCOPE = (sys.executable, "-m", "perfscope")


class Times(NamedTuple):
    """Seconds of one run."""

    wall_s: float
    cpu_s: float


def timed(command: list[str], environment: dict[str, str] | None = None) -> Times:
    """Run a command to its end, with its children's CPU time."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**compiling(), **(environment or {})}
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return Times(wall_s, usage.ru_utime + usage.ru_stime)


def until_started(folder: Path) -> Times:
    """``perfscope run`` until its command runs; the CPU time is that of the whole run."""
    mark = folder / "started"
    shell = f"touch {mark}"
    before = time.time()
    cpu_s = timed([*PERFSCOPE, "run", "--overwrite", "-o", str(folder / "recording"), "--", "sh", "-c", shell]).cpu_s
    return Times(mark.stat().st_mtime - before, cpu_s)


def contenders(folder: Path) -> dict[str, Callable[[], Times]]:
    """What is timed, the interpreter alone first."""
    sample, cache = folder / "sample", folder / "cache"
    shutil.copytree(SAMPLE, sample)
    analyze = [*PERFSCOPE, "analyze", str(sample), "--quiet"]

    def cold() -> Times:
        shutil.rmtree(cache, ignore_errors=True)
        return timed(analyze, {"PERFSCOPE_CACHE": str(cache)})

    return {
        "python -c pass": lambda: timed([sys.executable, "-c", "pass"]),
        "perfscope --help": lambda: timed([*PERFSCOPE, "--help"]),
        "perfscope --version": lambda: timed([*PERFSCOPE, "--version"]),
        "perfscope run, until the command starts": lambda: until_started(folder),
        "perfscope analyze, empty cache": cold,
        "perfscope analyze, cached": lambda: timed(analyze, {"PERFSCOPE_CACHE": str(cache)}),
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    runs: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        commands = contenders(Path(folder))
        for _ in range(options.rounds + 1):
            for name, run in commands.items():
                runs.setdefault(name, []).append(run())
    # The first round compiles modules.
    whole = {name: times[1:] for name, times in runs.items()}
    alone = whole["python -c pass"]
    print("| command | wall s | CPU s | wall, times the interpreter's | CPU, times the interpreter's |")
    print("|---|---|---|---|---|")
    for name, times in whole.items():
        wall_s, cpu_s = (statistics.median(values) for values in zip(*times, strict=True))
        pairs = list(zip(times, alone, strict=True))
        wall = statistics.median(one.wall_s / other.wall_s for one, other in pairs)
        cpu = statistics.median(one.cpu_s / max(other.cpu_s, 1e-3) for one, other in pairs)
        print(f"| `{name}` | {wall_s:.3f} | {cpu_s:.3f} | {wall:.1f} | {cpu:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
