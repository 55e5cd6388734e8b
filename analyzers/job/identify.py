"""Which trace is which rank of the job: its content counts before its name, and every guess becomes a note.

Of several traces of one rank, those recorded at the same time as the other ranks' are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Final

from perfscope.analyzers.job.apart import Read, jobs_apart, share_time
from perfscope.analyzers.job.assumed_groups import with_assumed_groups
from perfscope.analyzers.job.step_numbers import numbered_alike
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.execution.outcome import Outcome
from perfscope.frozen import dataclass
from perfscope.recording.captures import natural, worker_in_name
from perfscope.recording.job import Job, TraceSource
from perfscope.recording.paths import rank_and_capture_of_trace_file
from perfscope.results.notes import Note, note
from perfscope.results.rows import Failure
from perfscope.text import plural, rank_list

_FEW: Final = 3
"""Steps that all ranks share from which on no rank is left out for more of them."""
_TIMES: Final = 2
"""How many times as many the others must share at least."""
_TWO: Final = 2


@dataclass
class IdentifiedRanks:
    """The ranks that can be analyzed together, and why the other traces cannot."""

    partials: dict[int, RankPartial] = field(default_factory=dict)
    sources: dict[int, TraceSource] = field(default_factory=dict)
    """Where each of them was read."""
    failures: list[Failure] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    by_file_name: dict[int, str] = field(default_factory=dict)
    """Names of files of which nothing else tells their rank."""
    left_out: set[int] = field(default_factory=set)
    """Ranks of this job whose traces are among the failures."""
    apart: list[list[Read]] = field(default_factory=list)
    """Traces of other jobs that ran at the same time, by job; they are among the failures."""

    def reject(self, rank: int | None, path: object, error: str) -> None:
        """Record why a trace is not analyzed."""
        self.failures.append(Failure(rank=rank, path=str(path), error=error))


def identify(job: Job, outcomes: list[Outcome[TraceSource, RankPartial]]) -> IdentifiedRanks:
    """Sort outcomes into ranks of one job. Files that do not belong to it are failures that say why."""
    ranks = IdentifiedRanks()
    for problem in job.problems:
        ranks.reject(problem.rank, problem.path, problem.error)
    read: list[Read] = []
    # Parts are numbers.
    for outcome in sorted(
        outcomes, key=lambda each: (str(each.item.path), len(each.item.part or ""), each.item.part or "")
    ):
        if outcome.result is None:
            source = outcome.item
            if source.named_rank is not None:
                ranks.left_out.add(source.named_rank)
            ranks.reject(source.named_rank, source.path, outcome.error or "no result")
        else:
            read.append((outcome.item, outcome.result))
    read, *ranks.apart = jobs_apart(_label_processes(_ranks_by_name(read, ranks), ranks))
    for other in ranks.apart:
        _reject_job(other, read, ranks)
    for source, partial in _of_one_capture(_of_one_world(read, ranks), ranks):
        _place(source, partial, ranks, alone=len(read) == 1)
    _note_file_names(ranks)
    _keep_recorded_devices(ranks)
    ranks.partials = numbered_alike(ranks.partials)
    _keep_common_steps(ranks)
    _keep_many_steps(ranks)
    ranks.left_out -= ranks.partials.keys()
    _assume_groups(ranks)
    return ranks


def _assume_groups(ranks: IdentifiedRanks) -> None:
    """Where no trace says which ranks take part in a collective, what the collectives' times show."""
    assumed = with_assumed_groups(ranks.partials, ranks.left_out)
    if assumed is None:
        return
    ranks.partials, groups = assumed
    recorded = sorted(ranks.partials)
    size = ranks.partials[recorded[0]].world_size or len(recorded)
    kind = "groups_assumed" if groups > 1 else "world_assumed" if len(recorded) == size else "world_assumed_in_part"
    ranks.notes.append(note("ranks", kind, recorded, count=size, groups=groups))


def _ranks_by_name(read: list[Read], ranks: IdentifiedRanks) -> list[Read]:
    """The ranks of the names, which are all different, where the contents of traces of the same time repeat ranks.

    Profilers that start before ``init_process_group`` write rank 0 of 1 on all ranks, and scripts copy what they wrote
    for one. Two jobs of fewer ranks than there are traces, which ran at the same time, repeat them, too.
    """
    named = [source.named_rank for source, _ in read]
    stated = [partial.rank for _, partial in read]
    if len(read) < 2 or None in named or None in stated or len(set(named)) < len(read) or len(set(stated)) == len(read):
        return read
    sizes = {partial.world_size for _, partial in read}
    largest = max(rank for rank in named if rank is not None)
    fits = len(sizes) == 1 and all(size is None or size > largest for size in sizes)
    copied = len(set(stated)) == 1 and sizes <= {None, 1}
    if not (fits or copied) or set(_captures(read)) != {0}:
        return read
    numbers, repeated = ([rank for rank in each if rank is not None] for each in (named, stated))
    ranks.notes.append(note("ranks", "ranks_repeated", numbers, stated=sorted(set(repeated))))
    return [
        (source, replace(partial, rank=source.named_rank, world_size=partial.world_size if fits else None))
        for source, partial in read
    ]


def _label_processes(read: list[Read], ranks: IdentifiedRanks) -> list[Read]:
    """Number traces of which none has a known rank, so that they can be compared: the processes of one report, or the
    files of processes that were recorded at the same time.

    Only where the job has no other traces, since then no number can be another rank's.
    """
    if len(read) < 2 or any(partial.rank is not None for _, partial in read):
        return read
    if len({source.path for source, _ in read}) == 1:
        kind = "ranks_by_process_id"
    elif _ran_together(read):
        kind, read = "ranks_by_file_order", sorted(read, key=lambda each: natural(each[0].path.name))
    else:
        return read
    order = ", ".join(f"{rank} is {partial.source}" for rank, (_, partial) in enumerate(read))
    ranks.notes.append(note("ranks", kind, range(len(read)), order=order))
    return [(source, replace(partial, rank=rank)) for rank, (source, partial) in enumerate(read)]


def _ran_together(read: list[Read]) -> bool:
    """Are these files, whose names say no rank, of different processes that were recorded at the same time?"""
    if any(source.named_rank is not None or source.part is not None for source, _ in read):
        return False
    processes = [process for _, partial in read for process in partial.processes]
    own = all(partial.processes for _, partial in read) and len(set(processes)) == len(processes)
    return (own or _of_workers(read)) and set(_captures(read)) == {0}


def _of_workers(read: list[Read]) -> bool:
    """Do the names say that each is of another worker, and the collectives that these took part in the same job?"""
    workers = [worker_in_name(source.path) for source, _ in read]
    return (
        None not in workers and len(set(workers)) == len(read) and all(share_time(read[0], each) for each in read[1:])
    )


def _of_one_world(read: list[Read], ranks: IdentifiedRanks) -> list[Read]:
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
            ranks.reject(
                partial.rank,
                source.path,
                f"belongs to a job of {partial.world_size} ranks, the others to one of {kept_size}: analyze "
                "it by itself",
            )
    return kept


def _reject_job(other: list[Read], read: list[Read], ranks: IdentifiedRanks) -> None:
    """Record that the traces of another job that ran at the same time are not analyzed with the others."""
    mine, theirs = (next((partial.world_size for _, partial in job), None) for job in (read, other))
    why = (
        f"belongs to a job of {theirs} ranks, the others to one of {mine}: analyze it by itself"
        if mine != theirs
        else "belongs to another job that ran at the same time: analyze it by itself"
    )
    for source, partial in other:
        ranks.reject(partial.rank, source.path, why)


def _place(source: TraceSource, partial: RankPartial, ranks: IdentifiedRanks, *, alone: bool) -> None:
    rank = partial.rank if partial.rank is not None else source.named_rank
    if rank is None and alone:
        rank = 0
        ranks.notes.append(note("ranks", "rank_unknown"))
    if rank is None:
        ranks.reject(None, source.path, _unknown(source, partial))
        return
    # The names that PerfScope gives to its own files are no guess.
    if partial.rank is None and source.named_rank is not None and not rank_and_capture_of_trace_file(source.path):
        ranks.by_file_name.setdefault(rank, source.path.name)
    if partial.rank is not None and source.named_rank not in (None, partial.rank):
        ranks.notes.append(
            note("ranks", "file_of_another_rank", (partial.rank,), rank=partial.rank, file=source.path.name)
        )
    if rank in ranks.partials:
        ranks.reject(
            rank,
            source.path,
            f"a second trace of rank {rank}; {ranks.partials[rank].source} is the one analyzed: put captures "
            "into folders of their own, or analyze this file by itself",
        )
        return
    ranks.partials[rank] = partial
    ranks.sources[rank] = source


def _note_file_names(ranks: IdentifiedRanks) -> None:
    """One note, of however many ranks names of files alone tell which they are."""
    numbers = sorted(ranks.by_file_name)
    if len(numbers) == 1:
        (rank,) = numbers
        ranks.notes.append(note("ranks", "rank_by_file_name", numbers, rank=rank, file=ranks.by_file_name[rank]))
    elif numbers:
        file, more = ranks.by_file_name[numbers[0]], len(numbers) - 1
        ranks.notes.append(note("ranks", "ranks_by_file_names", numbers, file=file, more=more))


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


_CUT: Final = "the file ends early, and no step in it is whole: copy it again"
_UNMARKED: Final = "nothing in it marks steps while the other ranks' do: record it with a profiler schedule"


def _keep_common_steps(ranks: IdentifiedRanks) -> None:
    """Ranks that share no step number with the rest were recorded at another time: they cannot be compared."""
    marked = {
        rank: set(map(int, partial.steps.number)) for rank, partial in ranks.partials.items() if partial.steps.marked
    }
    unmarked = [rank for rank, partial in ranks.partials.items() if not partial.steps.marked]
    if marked and unmarked:
        for rank in unmarked:
            cut = ranks.partials[rank].parse_report.truncated
            _reject(ranks, rank, _CUT if cut else _UNMARKED)
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
                ranks,
                rank,
                f"has steps {rank_list(steps)}, none of steps {rank_list(common)} that the others have: "
                "another job or another capture; analyze it by itself",
            )


def _keep_recorded_devices(ranks: IdentifiedRanks) -> None:
    """Leave out ranks without device events beside ranks that have some: their devices would seem idle.

    A file that was cut has its operators before its device events, so its steps may look whole on the host. Whole files
    without any are left out where more ranks have some: else the job may train on CPUs, with a few ranks on devices.
    """
    without = [rank for rank, partial in sorted(ranks.partials.items()) if not partial.has_device_work]
    cut = [rank for rank in without if ranks.partials[rank].parse_report.truncated]
    if len(without) == len(ranks.partials):
        return
    for rank in cut:
        _reject(
            ranks, rank, "the file ends early, before its device events, so its device would seem idle: copy it again"
        )
    if 2 * (len(without) - len(cut)) >= len(ranks.partials):
        return
    for rank in sorted({*without} - {*cut}):
        _reject(
            ranks,
            rank,
            "holds no device events while the other ranks' traces do, so its device would seem idle: record it with "
            "ProfilerActivity.CUDA",
        )


def _keep_many_steps(ranks: IdentifiedRanks) -> None:
    """A rank that shares few steps with the others, which share many: theirs count for more. Its file was cut, say.

    Example: of steps 0-3 on ranks 0, 1 and 3, and step 0 on rank 2, all share one step, and the others four.
    """
    while len(ranks.partials) > _TWO:
        own = {rank: set(partial.steps.number.tolist()) for rank, partial in ranks.partials.items()}
        counts = Counter(step for steps in own.values() for step in steps)
        shared = [step for step, count in counts.items() if count == len(own)]
        of_others = {step for step, count in counts.items() if count == len(own) - 1}
        missed = {rank: len(of_others - steps) for rank, steps in own.items()}
        rank = max(sorted(own), key=missed.__getitem__)
        others = len(shared) + missed[rank]
        if len(shared) >= _FEW or others < max(_TIMES * len(shared), 1):
            return
        _reject(
            ranks,
            rank,
            f"has only {plural(len(shared), 'step')} in common with the other ranks, which have "
            f"{others}: it is left out for them; record it again, or analyze it by itself",
        )


def _reject(ranks: IdentifiedRanks, rank: int, error: str) -> None:
    partial = ranks.partials.pop(rank)
    ranks.left_out.add(rank)
    ranks.reject(rank, partial.source, error)


def _of_one_capture(read: Sequence[Read], ranks: IdentifiedRanks) -> list[Read]:
    """The traces of one capture, where a rank has several traces; the others are rejected.

    Traces whose steps overlap in time, directly or through others, are of one capture. The capture that most ranks have
    is taken, of equals the last. A rank without a trace of it keeps its latest one. Copies of a trace, which overlap
    too, are left to the caller.
    """
    rank_of = [partial.rank if partial.rank is not None else source.named_rank for source, partial in read]
    counts = Counter(rank for rank in rank_of if rank is not None)
    if not counts or max(counts.values()) == 1:
        return list(read)
    capture_of = _captures(read)
    votes = Counter(capture for capture, _ in {*zip(capture_of, rank_of, strict=True)})
    chosen = max(votes, key=lambda capture: (votes[capture], capture))
    wanted: dict[int | None, int] = {}
    for rank, capture in zip(rank_of, capture_of, strict=True):
        wanted[rank] = max(wanted.get(rank, capture), capture, key=lambda each: (each == chosen, each))
    kept = []
    for (source, partial), rank, capture in zip(read, rank_of, capture_of, strict=True):
        if rank is None or capture == wanted[rank]:
            kept.append((source, partial))
            continue
        steps = f" (steps {rank_list(partial.steps.number.tolist())})" if partial.steps.marked else ""
        ranks.reject(
            rank,
            source.path,
            f"another capture of rank {rank}{steps}, recorded at another time than those analyzed; to see it, put the "
            "captures into folders of their own",
        )
    return kept


def _captures(read: Sequence[Read]) -> list[int]:
    """For each trace the number of its capture, the earliest 0: traces that overlap in time share one."""
    starts = [int(partial.steps.host_start_ns[0]) for _, partial in read]
    ends = [int(partial.steps.host_end_ns[-1]) for _, partial in read]
    captures = [0] * len(read)
    number, last_end = -1, 0
    for row in sorted(range(len(read)), key=lambda row: (starts[row], ends[row])):
        if number < 0 or starts[row] >= last_end:
            number, last_end = number + 1, ends[row]
        captures[row] = number
        last_end = max(last_end, ends[row])
    return captures
