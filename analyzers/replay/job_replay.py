"""A job's ranks aligned and their steps replayed: what the summary and what-ifs both begin with."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.job.collectives.cost_model import CostModel, cost_models
from perfscope.analyzers.job.hosts import find_hosts
from perfscope.analyzers.job.identify import IdentifiedRanks
from perfscope.analyzers.job.system.table import system
from perfscope.analyzers.job.unprofiled import LongStepShare, long_step_share, ready_step_ns, unprofiled_step_ns
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import ReplayResult, replay
from perfscope.analyzers.replay.schedules import RecordedSchedules, record_schedules
from perfscope.frozen import dataclass
from perfscope.recording.job import Job
from perfscope.recording.metadata import RunMetadata
from perfscope.results.system import System
from perfscope.trace.trace import Int64


@dataclass(frozen=True, eq=False)
class JobReplay:
    """``runs`` is the metadata of the ranks that wrote some; ``replayed`` is the unchanged replay."""

    job: Job
    runs: Mapping[int, RunMetadata]
    result: AlignedJob
    recorded: RecordedSchedules
    replayed: ReplayResult
    models: tuple[CostModel, ...]
    core_ns: Mapping[int, Int64]
    """Rank -> for how long its training thread waited for a core in each used step; empty unless all recorded it."""

    @functools.cached_property
    def system(self) -> System | None:
        """What was sampled of the hosts; None where nothing was."""
        return system(self.job, self.result, self.runs)

    @functools.cached_property
    def unprofiled_ns(self) -> float | None:
        """The job's step without the profiler; None where no such step was timed."""
        return unprofiled_step_ns(self.runs, self.result)

    @functools.cached_property
    def long_step_share(self) -> LongStepShare | None:
        """Steps far longer than most, of which the recorded steps hold another share than the job's."""
        return long_step_share(self.runs, self.result)

    @functools.cached_property
    def ready_ns(self) -> float | None:
        """The same with batches that are ready, where loader workers set its pace and not that of the recorded steps;
        else None.
        """
        return ready_step_ns(self.runs, self.result)


def replay_job(job: Job, ranks: IdentifiedRanks) -> JobReplay:
    """Align the identified ranks, and replay their steps."""
    runs = {rank: run for rank, run in job.runs.items() if rank in ranks.partials}
    hosts = find_hosts(ranks.partials, runs, world_size(ranks.partials, runs))
    result = align_job(ranks.partials, _first_step(job, runs), hosts, _last_step(job, runs))
    loaders = {rank: run.dataloaders[0] for rank, run in runs.items() if run.dataloaders}
    recorded = record_schedules(result, loaders)
    return JobReplay(
        job,
        runs,
        result,
        recorded,
        replay(recorded.schedules),
        cost_models(result.matched),
        core_waits(job.capture, runs, result),
    )


def core_waits(capture: int | None, runs: Mapping[int, RunMetadata], result: AlignedJob) -> dict[int, Int64]:
    """Rank -> for how long its training thread waited for a core in each used step of a capture, ns; empty unless all
    ranks recorded it of all of these steps.
    """
    found: dict[int, Int64] = {}
    if capture is None:
        return found
    for rank in result.partials:
        mine = runs[rank].capture(capture) if rank in runs else None
        waited = np.array(mine.waited_ns if mine is not None else (), dtype=np.int64)
        places = result.steps - (mine.first_step if mine is not None else 0)
        if not len(waited) or not ((places >= 0) & (places < len(waited))).all():
            return {}
        found[rank] = waited[places]
    return found


def world_size(partials: Mapping[int, RankPartial], runs: Mapping[int, RunMetadata]) -> int | None:
    """Ranks of the whole job, recorded or not; None where nothing tells."""
    sizes = [run.world_size for run in runs.values()]
    sizes += [partial.world_size for partial in partials.values() if partial.world_size is not None]
    return max(sizes, default=None)


def _first_step(job: Job, runs: Mapping[int, RunMetadata]) -> int | None:
    """First step of the capture analyzed that the recorder meant to be used; None for traces of other tools."""
    if job.capture is None:
        return None
    captures = [run.capture(job.capture) for run in runs.values()]
    return max((capture.first_step for capture in captures if capture is not None), default=None)


def _last_step(job: Job, runs: Mapping[int, RunMetadata]) -> int | None:
    """Last step that ended on every rank, where the trace may hold the beginning of another: where the job ended before
    the last planned step, or where ranges alone were written, which stay open until the process ends.
    """
    seen = [run.steps.seen for run in runs.values() if run.mode in ("nvtx", "nsys") and run.outcome != "running"]
    ended = [number - 1 for number in seen]
    if job.capture is not None:
        captures = [run.capture(job.capture) for run in runs.values()]
        ended += [capture.last_step for capture in captures if capture is not None and not capture.complete]
    return min(ended, default=None)
