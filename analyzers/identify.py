"""Which partial is which rank: by content before name, nothing guessed in silence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.same_capture import of_one_capture
from perfscope.engine import Outcome
from perfscope.job import Job, TraceSource
from perfscope.summary import Failure, Note


@dataclass
class Identified:
    """The ranks that can be analyzed together, and what became of everything else."""

    partials: dict[int, RankPartial] = field(default_factory=dict)
    sources: dict[int, TraceSource] = field(default_factory=dict)
    """Where each of them was read."""
    failures: list[Failure] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def identify(job: Job, outcomes: list[Outcome[TraceSource, RankPartial]]) -> Identified:
    """Sort outcomes into ranks of one job. Files that do not belong are failures that say why."""
    found = Identified()
    for problem in job.problems:
        found.failures.append(Failure(rank=problem.rank, path=str(problem.path), error=problem.error))
    read: list[tuple[TraceSource, RankPartial]] = []
    for outcome in sorted(outcomes, key=lambda outcome: _in_order(outcome.item)):
        if outcome.result is None:
            source = outcome.item
            found.failures.append(
                Failure(rank=source.named_rank, path=str(source.path), error=outcome.error or "no result")
            )
        else:
            read.append((outcome.item, outcome.result))
    read = _label_processes(read, found)
    together, others = of_one_capture(_of_one_world(read, found))
    found.failures.extend(others)
    for source, partial in together:
        _place(source, partial, found, alone=len(read) == 1)
    _keep_common_steps(found)
    return found


def _in_order(source: TraceSource) -> tuple[str, int, str]:
    part = source.part or ""
    return str(source.path), len(part), part  # parts are numbers


def _label_processes(
    read: list[tuple[TraceSource, RankPartial]], found: Identified
) -> list[tuple[TraceSource, RankPartial]]:
    """Number the processes of one report of which none says its rank: they can be told apart, and compared.

    Only where there is nothing else in the job, since then no number can be another rank's.
    """
    alone_in_file = len({source.path for source, _ in read}) == 1 and len(read) > 1
    if not alone_in_file or any(partial.rank is not None for _, partial in read):
        return read
    found.notes.append(
        Note(
            about="ranks",
            text="Nothing in the report says which rank its processes are, so they are numbered by process id, which "
            "need not be the job's own order: "
            + ", ".join(f"{rank} is {partial.source}" for rank, (_, partial) in enumerate(read))
            + ". Let each process emit an NVTX mark, such as perfscope::rank#0 of 2.",
            ranks=tuple(range(len(read))),
        )
    )
    return [(source, replace(partial, rank=rank)) for rank, (source, partial) in enumerate(read)]


def _of_one_world(
    read: list[tuple[TraceSource, RankPartial]], found: Identified
) -> list[tuple[TraceSource, RankPartial]]:
    """Traces of another world size belong to another job: the commonest world stays."""
    sizes = Counter(partial.world_size for _, partial in read if partial.world_size is not None)
    if len(sizes) < 2:
        return read
    kept_size = max(sizes, key=lambda size: (sizes[size], size))
    kept = []
    for source, partial in read:
        if partial.world_size in (None, kept_size):
            kept.append((source, partial))
        else:
            found.failures.append(
                Failure(
                    rank=partial.rank,
                    path=str(source.path),
                    error=f"belongs to a job of {partial.world_size} ranks, the others to one of {kept_size}: analyze "
                    "it by itself",
                )
            )
    return kept


def _place(source: TraceSource, partial: RankPartial, found: Identified, *, alone: bool) -> None:
    rank = partial.rank if partial.rank is not None else source.named_rank
    if rank is None and alone:
        rank = 0
        found.notes.append(Note(about="ranks", text="The trace does not say which rank it is; it is shown as rank 0."))
    if rank is None:
        found.failures.append(
            Failure(
                rank=None,
                path=str(source.path),
                error=_unknown(source, partial),
            )
        )
        return
    if partial.rank is None and source.named_rank is not None:
        found.notes.append(
            Note(
                about="ranks", text=f"Rank {rank} is known by its file's name only ({source.path.name}).", ranks=(rank,)
            )
        )
    if partial.rank is not None and source.named_rank not in (None, partial.rank):
        found.notes.append(
            Note(
                about="ranks",
                text=f"{source.path.name} holds rank {partial.rank}, whatever its name says.",
                ranks=(partial.rank,),
            )
        )
    if rank in found.partials:
        found.failures.append(
            Failure(
                rank=rank,
                path=str(source.path),
                error=f"a second trace of rank {rank}; {found.partials[rank].source} is the one analyzed: put captures "
                "into folders of their own, or analyze this file by itself",
            )
        )
        return
    found.partials[rank] = partial
    found.sources[rank] = source


def _unknown(source: TraceSource, partial: RankPartial) -> str:
    if source.part is not None:
        return (
            f"{partial.source}: neither the report (by an NVTX mark such as perfscope::rank#0 of 8, MPI, or the "
            "environment of nsys) nor its name says which rank this is: name a report of one rank rank<N>, or analyze "
            "it by itself"
        )
    return (
        "neither its content (distributedInfo) nor its name says which rank it is: name it rank<N>.json, or analyze it "
        "by itself"
    )


def _keep_common_steps(found: Identified) -> None:
    """Ranks that share no step number with the rest were recorded at another time: they cannot be compared."""
    marked = {
        rank: set(map(int, partial.steps.number)) for rank, partial in found.partials.items() if partial.steps.marked
    }
    unmarked = [rank for rank, partial in found.partials.items() if not partial.steps.marked]
    if marked and unmarked:
        for rank in unmarked:
            _reject(
                found, rank, "nothing in it marks steps while the other ranks' do: record it with a profiler schedule"
            )
    if len(marked) < 2:
        return
    votes = Counter(step for steps in marked.values() for step in steps)
    most = max(votes.values())
    # The steps that most ranks have; among equals those of the lowest rank that has any.
    candidates = {step for step, count in votes.items() if count == most}
    lowest = next(rank for rank in sorted(marked) if marked[rank] & candidates)
    common = marked[lowest] & candidates
    for rank, steps in sorted(marked.items()):
        if not steps & common:
            _reject(
                found,
                rank,
                f"has steps {_span(steps)}, none of steps {_span(common)} that the others have: another job or another "
                "capture; analyze it by itself",
            )


def _reject(found: Identified, rank: int, error: str) -> None:
    partial = found.partials.pop(rank)
    found.failures.append(Failure(rank=rank, path=partial.source, error=error))


def _span(steps: set[int]) -> str:
    return f"{min(steps)}" if len(steps) == 1 else f"{min(steps)}..{max(steps)}"
