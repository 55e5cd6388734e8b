"""``perfscope.export_chakra``: the recorded steps as Chakra's execution traces, which network simulators take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from perfscope.analyzers.analyze import JobAnalysis, job_analysis
from perfscope.analyzers.export.graph import ChakraRank, write_rank
from perfscope.analyzers.export.plan import rank_plans
from perfscope.analyzers.merge.choice import requested_numbers
from perfscope.analyzers.read_ranks import Progress, executor_for
from perfscope.errors import PerfscopeError, UnusableInput
from perfscope.execution import engine
from perfscope.frozen import dataclass
from perfscope.recording.whole import write_text
from perfscope.text import rank_list

NAME: Final = "perfscope"
"""Files are ``perfscope.<rank>.et``: simulators ask for the path before the rank."""
GROUPS_FILE: Final = "comm_group.json"


@dataclass(frozen=True, kw_only=True)
class ExportedChakra:
    """The files that ``export_chakra`` wrote."""

    folder: Path
    workload: Path
    """What the files' names begin with: ASTRA-sim's ``--workload-configuration``."""
    groups: Path
    """``comm_group.json``: ASTRA-sim's ``--comm-group-configuration``."""
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    nodes: int
    communication: int
    """Nodes that stand for collectives, sends and recvs."""
    notes: tuple[str, ...]
    """What the files do not hold as it was recorded, one sentence each."""


def export_chakra(
    path: str | Path,
    folder: str | Path,
    *,
    steps: str | None = None,
    capture: int | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ExportedChakra:
    """Write the recorded steps of the job at ``path`` into ``folder``: a file for each rank and ``comm_group.json``.

    Each file is a graph: what the rank computes (with its operations and bytes, where shapes are recorded), what its
    host does while the device is idle, its collectives and messages, and what each waits for. Replayed with the
    recorded lengths it takes the recorded time. ``steps`` (``12-14``) are consecutive; by default all that follow one
    another. The other arguments are those of ``analyze``.

    Raises UnusableInput where nothing can be read or ``steps`` are not there; PerfscopeError where a file cannot be
    written.
    """
    place = Path(folder)
    with job_analysis(path, capture=capture, executor=executor, workers=workers, progress=progress) as analysis:
        chosen = _chosen(steps, analysis.replay.result.steps.tolist())
        try:
            place.mkdir(parents=True, exist_ok=True)
            return _write(analysis, place, chosen, executor, workers)
        except OSError as error:
            raise PerfscopeError(
                f"{error.filename or place}: cannot be written ({error.strerror}); choose another folder"
            ) from error


def _write(
    analysis: JobAnalysis, folder: Path, steps: Sequence[int], executor: Executor | None, workers: int | None
) -> ExportedChakra:
    result, job = analysis.replay.result, analysis.summary.job
    world = max(job.world_size or 0, max(result.partials) + 1)
    plans, communicators, notes = rank_plans(result, analysis.sources, steps, world, folder.absolute(), NAME)
    written: dict[int, ChakraRank] = {}
    with executor_for([plan.source for plan in plans], executor, workers) as chosen:
        for outcome in engine.map_items(write_rank, plans, chosen):
            if outcome.result is None:
                raise PerfscopeError(f"rank {outcome.item.rank} cannot be exported: {outcome.error}")
            written[outcome.item.rank] = outcome.result
    groups = folder / GROUPS_FILE
    write_text(groups, json.dumps(communicators.document(), indent=1) + "\n")
    missing = sorted(set(range(world)) - set(written))
    if missing:
        notes.append(
            f"Ranks {rank_list(missing)} of {world} are not in the recording: simulators need a file of each rank."
        )
    if not any(file.flops for file in written.values()):
        notes.append(
            "No operation's size is recorded: nodes have their recorded lengths and no num_ops. Record shapes "
            "(perfscope run does) for a simulator's own model of the device."
        )
    return ExportedChakra(
        folder=folder,
        workload=folder / NAME,
        groups=groups,
        ranks=tuple(sorted(written)),
        steps=tuple(steps),
        nodes=sum(file.nodes for file in written.values()),
        communication=sum(file.communication for file in written.values()),
        notes=tuple(notes),
    )


def _chosen(requested: str | None, used: Sequence[int]) -> tuple[int, ...]:
    """Consecutive steps. Raises UnusableInput where those that are asked for are not there or have a gap."""
    if requested is None:
        return max(_runs(used), key=len)
    chosen = requested_numbers(requested, "--steps", used)
    if len(_runs(chosen)) > 1:
        raise UnusableInput(f"--steps {requested}: choose steps that follow one another, such as {_runs(chosen)[0][0]}")
    return chosen


def _runs(steps: Sequence[int]) -> list[tuple[int, ...]]:
    """Stretches of consecutive numbers, in order."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return [tuple(run) for run in runs]
