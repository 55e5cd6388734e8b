"""Waiting for a core: fires when the training threads of a host's ranks are ready to run but have no core.

Linux counts for every thread how long it was runnable without running (``/proc/<pid>/task/<tid>/schedstat``); the ranks
record that of their training threads over the steps of their captures. It is lost whatever takes the cores: more ranks
or loader workers than cores, or other processes on the host. Threads of operators that outnumber the cores are the
rule ``cpu-oversubscription``'s. On CPUs the whole step gets shorter with a core for each thread; with a device only as
far as the device waits for the host. That bounds the gain: a core that is shared with another hyper-thread is slower.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.job.system.table import listed_cores
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.rules.host.cpu_oversubscription import on_cpu_us
from perfscope.analyzers.rules.typed import data_loader
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.recording.metadata import RunMetadata
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.system import HostRow
from perfscope.text import plural, ranks_in_words

RULE: Final = "cpu-contention"
SHARE: Final = 0.1
"""Least share of the step that must be recoverable."""

_MORE_SAMPLES: Final = 0.02
"""By how much the samples per second must be able to rise to be more."""

_NOBODY: Final = 0.1
"""Cores up to which other processes use hardly any."""

_MOSTLY: Final = 0.5
"""From this share of the cores on they are the job's own processes that take them."""


@dataclass(frozen=True)
class _Crowded:
    """The ranks of one host, and how long they wait for a core."""

    host: str
    runs: tuple[RunMetadata, ...]
    waited: float
    """Share of the time of their steps, mean over the ranks."""
    cores: int
    used: float
    """Cores' worth of time that the job's processes use together."""
    recoverable_us: float
    row: HostRow | None
    """What the system sampler recorded of the host; None without."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(run.rank for run in self.runs)

    @property
    def others(self) -> float | None:
        """Cores' worth of time that processes of nobody in the job use; None where that was not recorded, and where the
        ranks may use a part of the host's cores: what the others use of these is not known.
        """
        if self.row is None or (self.row.cores_usable or self.cores) < (self.row.cores or 0):
            return None
        return self.row.other_cores

    @property
    def is_own(self) -> bool:
        """Are they the job's own processes that take the cores? Not where the threads that wait would have enough of
        them without the others.
        """
        waiting = self.waited * len(self.runs)
        return self.used >= _MOSTLY * self.cores and (self.others is None or self.others < waiting)

    @property
    def workers(self) -> int:
        return sum(loader.num_workers for run in self.runs for loader in run.dataloaders[:1])


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: the system does not count it, or little of the step waits for a core."""
    if job.steps == 0:
        return None
    hosts = grouped((run.host, run) for _, run in sorted(job.runs.items()))
    crowded = [case for host, runs in hosts.items() if (case := _crowded(job, host, tuple(runs))) is not None]
    worst = max(crowded, key=lambda case: case.recoverable_us, default=None)
    if worst is None or worst.recoverable_us < SHARE * job.step_time_us:
        return None
    return job.finding(
        RULE,
        f"The training threads of {ranks_in_words(worst.ranks)} wait for a core {worst.waited:.0%} of the time"
        f" ({_cores(worst)})",
        worst.recoverable_us,
        evidence=_evidence(worst),
        action=_action(job, worst),
        confidence=job.confidence(Confidence.MEDIUM),
    )


def _crowded(job: RuleContext, host: str, runs: tuple[RunMetadata, ...]) -> _Crowded | None:
    counted = [run.cpu for run in runs if run.cpu is not None and run.cpu.waited_ns is not None and run.cpu.wall_ns]
    # Ranks that are bound to a core each have several together.
    together = set[int]().union(*(listed_cores(cpu.cores) for cpu in counted))
    cores = max(len(together), *(run.cpu_count or 0 for run in runs))
    threads = [run.cpu_threads or 1 for run in runs]
    if len(counted) < len(runs) or not cores or (max(threads) > 1 and sum(threads) > cores):
        return None
    waited = sum(min((cpu.waited_ns or 0) / cpu.wall_ns, 1.0) for cpu in counted) / len(counted)
    rows = [row for row in job.summary.time_breakdown if row.rank in {run.rank for run in runs}]
    if not rows:
        return None
    step_us = sum(row.step_time_us for row in rows) / len(rows)
    recoverable_us = min(waited * step_us, on_cpu_us(rows, runs))
    system = job.summary.system
    row = next((row for row in system.hosts if row.host == host), None) if system is not None else None
    used = sum(cpu.process_ns / cpu.wall_ns for cpu in counted)
    if row is not None and row.job_cores is not None:
        used = row.job_cores  # with the loader workers
    return _Crowded(host, runs, waited, cores, used, recoverable_us, row)


def _cores(case: _Crowded) -> str:
    there = f"{plural(case.cores, 'core')} on {case.host}"
    if case.is_own or case.others is None:
        return there
    return f"{there}, of which other processes use {case.others:.2g}"


def _evidence(case: _Crowded) -> tuple[Evidence, ...]:
    return (
        Evidence("time that training threads waited for a core", case.waited, "share", case.ranks),
        Evidence("cores that the ranks may use", case.cores, ranks=case.ranks),
        Evidence("ranks on the host", len(case.runs), ranks=case.ranks),
        Evidence("cores' worth of CPU time that they use", case.used, ranks=case.ranks),
        *known("data loader workers", case.workers or None),
        *known("cores that other processes use", case.others),
        *known("threads running or waiting for a core", case.row.runnable if case.row is not None else None),
    )


def _keep_up(job: RuleContext, case: _Crowded, workers: int) -> bool:
    """Is the step shorter with so few workers, if its threads then never wait for a core? So it is taken to be where it
    is not known how long a batch takes to load.
    """
    for row in job.summary.dataloader:
        if row.rank in case.ranks and row.batch_us is not None:
            load_us = row.batch_us * row.batches_per_step
            training_us = job.step_time_us - case.recoverable_us - row.fetching_us
            without_us = max(training_us, load_us / workers) if workers else training_us + load_us
            if without_us >= job.step_time_us:
                return False
    return True


def _with_fewer_ranks(job: RuleContext, case: _Crowded) -> str:
    """What a rank for each core brings: shorter steps, of fewer samples."""
    per_second = (1 + job.ceiling(case.recoverable_us)) * case.cores / len(case.runs)
    more = f"at most {per_second:.2f}x as many" if per_second > 1 + _MORE_SAMPLES else "no more"
    return f"A step then takes less time and has fewer samples: {more} samples per second."


def _action(job: RuleContext, case: _Crowded) -> Action:
    """More cores, or fewer workers, where the job takes the cores; else nobody else on them."""
    ranks = len(case.runs)
    if case.is_own and ranks > case.cores:
        return Action(
            setting="cores per host", old=str(case.cores), new=str(ranks),
            how=f"Each rank needs a core: use a host with {ranks} cores or more. Or start fewer ranks on it, as an "
            f"argument of torchrun:\n{code('shell', f'--nproc-per-node {case.cores}')}\n{_with_fewer_ranks(job, case)}",
        )  # fmt: skip
    if case.is_own and case.workers and ranks + case.workers > case.cores:
        each, now = max((case.cores - ranks) // ranks, 0), case.workers // ranks
        shared = f"{plural(case.workers, 'worker').capitalize()} and {ranks} training threads share "
        shared += plural(case.cores, "core")
        if not _keep_up(job, case, each):
            return Action(
                setting="cores per rank", old=f"{case.cores / ranks:.3g}", new=f"{now + 1} or more",
                how=f"{shared}, and fewer workers would load too slowly. Use fewer ranks per host, a host with more "
                "cores, or make a batch cheaper to load (decode or tokenize ahead of time).",
            )  # fmt: skip
        return Action(
            setting="DataLoader(num_workers=…)", old=str(now), new=str(each),
            how=f"{shared}:\n{data_loader(num_workers=each)}\nOr a host with more cores.",
        )  # fmt: skip
    if case.is_own or (case.others is not None and case.others < _NOBODY):
        return Action(
            setting="threads of the ranks", old="share cores", new="a core each",
            how="Other processes use hardly any core there: threads of the ranks wait for one another, those that send "
            "and sum gradients (gloo's) among them. Bind each rank to cores of its own (taskset, numactl), use a host "
            "with more of them, or run fewer ranks on it.",
        )  # fmt: skip
    return Action(
        setting="other processes on the host", old="share the ranks' cores", new="none on them",
        how="Stop what else runs there (top shows it), or give the job cores of its own: taskset, numactl, a cgroup's "
        "cpuset, or the scheduler's exclusive mode (sbatch --exclusive).",
    )  # fmt: skip
