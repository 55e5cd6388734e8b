"""What recording costs a training that runs for long: whole processes in turn, recorded and not.

``python -m tests.benchmarks.overhead_turns [--layers 4] [--turns 100] [--starts 4]``. ``overhead.py`` goes from one
contender to the next in one process, which replaces and restores functions each time; here each process stays what it
is from its start to its end, started as a user does, and all share one core and make a few steps each in turn. A turn's
first step finds the core's caches as other work left them, the others as the training itself did. Two of the processes
are bare: what they differ by is noise, of the layout of memory too, so several are started of each kind. Importing
modules changes that layout as well: so one process imports some of the standard library and does nothing with them, and
one is a rank of a recorded job that is not recorded itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median, stdev
from typing import Final

from tests.benchmarks.overhead import PERFSCOPE

RUN: Final = (*PERFSCOPE, "run", "--no-sampler")
KINDS: Final[dict[str, Sequence[str]]] = {
    "bare": (),
    "bare again": (),
    "bare, more modules": (),
    "not recorded": (*RUN, "--ranks", "1000000"),
    "waiting": (*RUN, "--wait", "1000000000"),
    "always-on": (*RUN, "--steps-only"),
}

Turn = list[tuple[int, int]]
"""Wall and CPU time of each step of a turn, ns."""


def take_turns(layers: int, steps: int, turns: int) -> dict[str, list[Turn]]:
    """One process of each kind, from its start to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        processes = {}
        for number, (kind, prefix) in enumerate(KINDS.items()):
            command = [sys.executable, "-m", "tests.benchmarks.overhead_turns_job", "--layers", str(layers)]
            command += ["--modules"] * (kind == "bare, more modules")
            if prefix:
                command = [*prefix, "--output", str(Path(scratch, f"recording-{number}")), "--", *command]
            processes[kind] = stack.enter_context(
                subprocess.Popen(
                    command, env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        order = list(KINDS)
        for _ in range(turns):
            random.shuffle(order)
            for kind in order:
                tell, answer = processes[kind].stdin, processes[kind].stdout
                assert tell is not None
                assert answer is not None
                print(steps, file=tell, flush=True)
                found[kind].append(json.loads(answer.readline()))
    return found


def longer_us(found: dict[str, list[Turn]], kind: str, than: str, clock: int, *, first: bool = False) -> float:
    """What a step takes longer than in the process of kind ``than``, µs: median over the turns of what the turn's first
    step, or the median of its others, takes longer.
    """

    def of(turn: Turn) -> float:
        times = [step[clock] for step in turn]
        return times[0] if first else median(times[1:])

    return median(of(mine) - of(its) for mine, its in zip(found[kind], found[than], strict=True)) / 1000


def shown(values: Sequence[float]) -> str:
    """Mean of several processes, and its standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.0f}" if len(values) > 1 else ""
    return f"{mean(values):+.0f}{error}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the transformer: some 1.6 ms per step each")
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--starts", type=int, default=4, help="processes started of each kind")
    options = parser.parse_args(arguments)
    runs = [take_turns(options.layers, options.steps, options.turns) for _ in range(options.starts)]
    step_ms = median(step[1] for run in runs for turn in run["bare"] for step in turn) / 1e6
    print(f"{options.starts} processes of each kind, {options.turns} turns of {options.steps} steps in each;")
    print(f"a bare step takes {step_ms:.2f} ms of CPU (median)\n")
    print(
        "| longer than bare, µs | CPU | wall | CPU, first of a turn | CPU, than not recorded |\n|---|---|---|---|---|"
    )
    for kind in KINDS:
        if kind == "bare":
            continue
        cells = [
            shown([longer_us(run, kind, "bare", clock, first=first) for run in runs])
            for clock, first in ((1, False), (0, False), (1, True))
        ]
        cells.append(shown([longer_us(run, kind, "not recorded", 1) for run in runs]))
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
