"""What recording costs by counts that no load changes: instructions, and misses of caches and branches, per step.

``python -m tests.benchmarks.overhead_counts [--layers 1] [--steps 20]``. Each kind of process of ``overhead_turns.py``
trains under valgrind's callgrind (Linux, ``apt install valgrind``), which runs every instruction itself and simulates
this machine's caches and a simple predictor of branches. Counting begins once the process has made its first steps, so
that nothing of a start is in it, and of the training thread alone. A process takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.benchmarks.overhead_turns import KINDS

CALLGRIND: Final = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes", "--branch-sim=yes",
                    "--separate-threads=yes")  # fmt: skip
COLUMNS: Final = {
    "instructions": ("Ir",),
    "code not in the first cache": ("I1mr",),
    "data not in the first cache": ("D1mr", "D1mw"),
    "in no cache": ("ILmr", "DLmr", "DLmw"),
    "branches mispredicted": ("Bcm", "Bim"),
}
"""Column -> events of callgrind that are added up in it."""


def counted(kind: str, layers: int, steps: int, scratch: Path) -> dict[str, float]:
    """Counts per step of one process of a kind."""
    mine = scratch / kind.replace(" ", "-")
    mine.mkdir()
    job = [sys.executable, "-m", "tests.benchmarks.overhead_turns_job", "--layers", str(layers)]
    job += ["--modules"] * (kind == "bare, more modules")
    command = [*CALLGRIND, f"--callgrind-out-file={mine}/out", f"--log-file={mine}/log", *job]
    if KINDS[kind]:
        command = [*KINDS[kind], "--output", str(mine / "recording"), "--", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        tell, answer = process.stdin, process.stdout
        assert tell is not None
        assert answer is not None

        def turn(of: int) -> None:
            print(of, file=tell, flush=True)
            json.loads(answer.readline())

        turn(steps)
        pid = re.findall(r"^==(\d+)==", (mine / "log").read_text(), re.MULTILINE)[-1]
        _control("-i", "on", pid)
        turn(steps)  # the simulated caches fill
        _control("-d", pid)
        turn(steps)
        _control("-d", pid)
        print(file=tell, flush=True)
    return per_step(mine / "out.2-01", steps)


def _control(*arguments: str) -> None:
    subprocess.run(["callgrind_control", *arguments], check=True, stdout=subprocess.DEVNULL)


def per_step(dump: Path, steps: int) -> dict[str, float]:
    """The columns of a file of callgrind, which holds so many steps."""
    text = dump.read_text()
    names = text.split("events: ", 1)[1].split("\n", 1)[0].split()
    totals = re.search(r"^(?:totals|summary): (.*)$", text, re.MULTILINE)
    assert totals is not None
    events = dict(zip(names, map(int, totals[1].split()), strict=False))
    return {column: sum(events.get(name, 0) for name in parts) / steps for column, parts in COLUMNS.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1, help="of the transformer")
    parser.add_argument("--steps", type=int, default=20, help="that are counted")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of processes, with commas")
    parser.add_argument("--keep", type=Path, help="folder for callgrind's files")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind in options.kinds.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        found = {kind: counted(kind, options.layers, options.steps, scratch) for kind in kinds}
    print(f"| per step | {' | '.join(COLUMNS)} |")
    print("|---|" + "---|" * len(COLUMNS))
    for kind, counts in found.items():
        print(f"| {kind} | {' | '.join(f'{value:,.0f}' for value in counts.values())} |")


if __name__ == "__main__":
    main()
