"""Jobs as NVIDIA's tests of resiliency break them: a Megatron MoE job, of whose 16 ranks one or two have a fault.

Groups, their names, the collectives of a layer and the recorder's setting as in the dumps of nvidia-resiliency-ext:
tensor parallel 4, two stages, experts over all 8 ranks of a stage, and dumps of what is active, without start events.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from tests.stuck.dumps import EPOCH_NS, Recorder, dump
from tests.stuck.faults import Fault, acted, broken
from tests.stuck.machine import Machine
from tests.stuck.program import Action, Collective, Group, Job, Join, Message, Messages, Sync

KINDS = {
    "GPU_ERROR": "error", "GPU_SLEEP": "stall", "LOCK_GIL": "sleep", "WORKLOAD_EXC": "sleep", "ASYNC_EXC": "sleep",
    "SIGNAL_EXC": "sleep", "OS_ABORT": "die", "SEGFAULT": "die", "SIGKILL": "die", "SIGTERM": "die", "SIGSTOP": "die",
}  # fmt: skip
"""What of each is in the dumps; a process that is stopped or dead leaves none."""
TIMEOUT_NS = 180_000_000_000


@dataclass(frozen=True)
class Injected:
    """A job after its faults."""

    kind: str
    machine: Machine
    faults: tuple[Fault, ...]
    recorder: Recorder

    healthy: Job

    def dump(self, rank: int) -> bytes | None:
        """The dump of a rank; None of one that left none."""
        fault = next((fault for fault in self.faults if fault.rank == rank), None)
        if fault is not None and fault.kind == "die":
            return None
        issued = self.machine.ranks[rank].issued
        failed_ns = issued[-8].created_ns if fault is not None and fault.kind == "error" else None
        return dump(self.machine, rank, self.recorder, failed_ns=failed_ns)

    def write(self, folder: Path) -> None:
        """Write the dumps under the names of the real ones; half of the jobs' are copies that lost their times."""
        end_ns = max(each.created_ns for rank in self.machine.ranks for each in rank.issued)
        written_ns = EPOCH_NS + end_ns + TIMEOUT_NS
        for rank in range(16):
            content = self.dump(rank)
            if content is not None:
                path = folder / f"_dump_{rank}"
                path.write_bytes(content)
                if end_ns % 2:
                    os.utime(path, ns=(written_ns, written_ns))

    def __str__(self) -> str:
        return f"{self.kind} on {sorted(self.ranks)}"

    @property
    def ranks(self) -> frozenset[int]:
        """Where the faults are."""
        return frozenset(fault.rank for fault in self.faults)


def inject(seed: int, kind: str) -> Injected:
    """A job of a seed, with one or two ranks of the second stage or of any that fail at about the same time."""
    rng = random.Random(f"{seed}/{kind}")
    while True:
        job = megatron(rng)
        ranks = rng.sample(range(16), rng.choice([1, 2, 2]))
        length = min(len(program) for program in job.programs)
        first = rng.randrange(length // 2, length - 8)
        faults = [Fault(rank, KINDS[kind], first + rng.randrange(6)) for rank in ranks]
        machine = Machine(broken(job, faults), seed).run()
        if len(acted(machine, faults)) == len(faults) and not machine.finished:
            return Injected(kind, machine, tuple(faults), Recorder(2000, only_active=True, frames=False), job)


def megatron(rng: random.Random) -> Job:
    """Steps of a pipeline of two stages; forwards go through the pipeline's group, gradients through the world's."""
    stages = [range(8), range(8, 16)]
    groups = [Group("0", "default_pg", tuple(range(16)))]
    tensor = [Group(str(35 + n), "TENSOR_MODEL_PARALLEL_GROUP", tuple(range(4 * n, 4 * n + 4))) for n in range(4)]
    data = [
        Group(str(1 + rank), "DATA_PARALLEL_GROUP_WITH_CP", (rank, rank + 4)) for rank in (*range(4), *range(8, 12))
    ]
    pipes = [Group(str(39 + 3 * rank), "PIPELINE_MODEL_PARALLEL_GROUP", (rank, rank + 8)) for rank in range(8)]
    expert = [Group(str(71 + n), "EXPERT_MODEL_PARALLEL_GROUP", tuple(stage)) for n, stage in enumerate(stages)]
    both = [
        Group(str(63 + n), "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", tuple(stage)) for n, stage in enumerate(stages)
    ]
    groups += [*tensor, *data, *pipes, *expert, *both]
    layers, micro, steps = rng.randint(1, 3), rng.randint(2, 4), rng.randint(3, 5)
    programs = []
    for rank in range(16):
        stage, pipe = rank // 8, pipes[rank % 8]
        own = next(group for group in data if rank in group.ranks)
        layer = layers * _layer(tensor[rank // 4], expert[stage], both[stage], rng.randrange(1500, 2500))
        step: list[Action] = []
        peer = rank + 8 if stage == 0 else rank - 8
        forward = Messages(pipe, (Message(stage == 0, peer, (2048, 5120)),), batched=False)
        backward = Messages(groups[0], (Message(stage == 1, peer, (2048, 5120)),), batched=False)
        if stage == 0:
            step += micro * [*layer, forward, backward, *layer]
        else:
            step += micro * [forward, *layer, *layer, backward]
        step += [Collective(own, "_reduce_scatter_base", (8192,), (4096,), "Float", blocking=False), Join(own)]
        step += [Collective(groups[0], "all_reduce", (1,), (1,), "Float"), Sync()]
        programs.append(steps * step)
    return Job(groups, programs)


def _layer(tensor: Group, expert: Group, both: Group, tokens: int) -> list[Action]:
    """Attention and experts; how many tokens go to whom is another number on each rank."""
    return [
        Collective(tensor, "_all_gather_base", (2048, 5120), (8192, 5120)),
        Collective(tensor, "_reduce_scatter_base", (8192, 5120), (2048, 5120)),
        Collective(both, "all_reduce", (264,), (264,)),
        Uneven(expert, "all_to_all", (2048, 5120), (tokens, 5120)),
        Uneven(expert, "all_to_all", (tokens, 5120), (2048, 5120)),
    ]


@dataclass(frozen=True)
class Uneven(Collective):
    """An all-to-all whose sizes differ from rank to rank."""

    @property
    def signature(self) -> tuple[object, ...]:
        """The sizes need not fit."""
        return self.kind, self.dtype
