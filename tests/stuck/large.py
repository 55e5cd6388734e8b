"""A large mesh that stands still: the dumps of as many ranks and entries as are asked for, and the rank at fault."""

from __future__ import annotations

import random
from pathlib import Path

from tests.stuck.dumps import Recorder, dump
from tests.stuck.faults import acted, broken, draw
from tests.stuck.layouts import mesh
from tests.stuck.machine import Machine
from tests.stuck.program import Collective, Job


def write_large(folder: Path, ranks: int, entries: int, kind: str, seed: int = 1) -> int:
    """Write dumps of ``ranks`` (a multiple of 64) with about ``entries`` each, under torch's names; who is at fault.

    Tensor parallel 8, four stages, the rest data-parallel, experts over two or more of those.
    """
    rng = random.Random(seed)
    steps = 2
    while True:
        job = mesh(random.Random(seed), 8, 4, ranks // 32, min(8, ranks // 32), steps)
        if 3 * min(_entries(job, rank) for rank in range(0, ranks, ranks // 4)) > 4 * entries:
            break
        steps *= 2
    while True:
        fault = draw(rng, job, kind, rng.randrange(ranks))
        machine = Machine(broken(job, [fault] if fault else []), seed).run()
        if fault is not None and acted(machine, [fault]) and not machine.finished:
            break
    for rank in range(ranks):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(dump(machine, rank, Recorder(entries)))
    return fault.rank


def _entries(job: Job, rank: int) -> int:
    return sum(
        1 if isinstance(action, Collective) else len(getattr(action, "parts", ())) for action in job.programs[rank]
    )
