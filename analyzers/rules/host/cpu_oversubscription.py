"""CPU threads per rank: fires when the ranks of a host spread their operators over more threads than there are cores.

Operators on the CPU run on ``torch.get_num_threads()`` threads in every rank. With more of them than cores, threads
that wait for each other at the end of every operator also wait for a core. torchrun therefore sets OMP_NUM_THREADS=1
where nobody sets it (torch ``distributed/run.py``); other launchers leave it at the number of cores, in each rank.
Source: PyTorch performance tuning guide, "Utilize OpenMP".

More threads than cores are harmless as long as few of them run at once, as in most training on GPUs. So the rule needs
a queue of threads, or a CPU quota that stops them, in what the system sampler recorded. With n threads ready to run on
c cores a fair scheduler gives each c/n of a core, so without the job's queue the host's part of a step would take at
least c/n of its time: that bounds the gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.system import HostRow
from perfscope.results.time_breakdown import TimeBreakdown

RULE: Final = "cpu-oversubscription"
SHARE: Final = 0.05
"""Least share of the step that must be recoverable."""
BUSY: Final = 0.9
"""Share of the usable cores that must be busy, or the host's."""
QUEUE: Final = 1.25
"""From this many runnable threads per usable core there is a queue."""
ON_HOST: Final = ("idle_dataloader", "idle_launch", "idle_host")
"""Categories in which a step with a device waits for the host; without a device every category is the host's."""


@dataclass(frozen=True)
class _Oversubscribed:
    """The ranks of one host, and their threads."""

    host: HostRow
    cores: float
    """All that the ranks may use."""
    threads: int
    """Per rank, the most."""
    wanted: int
    """Of all ranks together."""
    fitting: int
    """Threads per rank that fit the cores."""
    recoverable_us: float


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: nothing sampled, threads that fit or are not at work, or little of the step on the CPU."""
    if job.summary.system is None or job.steps == 0:
        return None
    candidates = [case for host in job.summary.system.hosts if (case := _oversubscribed(job, host)) is not None]
    if not candidates:
        return None
    worst = max(candidates, key=lambda case: case.recoverable_us)
    if worst.recoverable_us < SHARE * job.step_time_us:
        return None
    change = {"env.OMP_NUM_THREADS": str(worst.fitting)}
    step = job.predict(change) if job.predict is not None else None
    worth_us = (1 - SHARE) * job.step_time_us
    if step is not None and step.low > worth_us:
        return None  # There is a queue, but little of the step waits for it.
    # Where the range of the prediction holds no gain as well, it only bounds the gain.
    clear = step is not None and step.mid <= worth_us
    saved_us = worst.recoverable_us
    if step is not None:
        saved_us = min(saved_us, job.step_time_us - step.low)
    doubtful = job.info.few_steps or worst.host.samples < 3 or (step is not None and not clear)
    return job.finding(
        RULE,
        f"{worst.wanted} CPU threads of {_ranks(worst)} compete for {worst.cores:g} cores on {worst.host.host}",
        saved_us,
        evidence=_evidence(job, worst),
        action=_action(job, worst),
        confidence=Confidence.LOW if doubtful else Confidence.MEDIUM,
        whatif=change if clear else {},
    )


def _oversubscribed(job: RuleContext, host: HostRow) -> _Oversubscribed | None:
    runs = [job.runs[rank] for rank in host.ranks if rank in job.runs]
    threads = [run.cpu_threads for run in runs if run.cpu_threads]
    cores = host.cores_usable
    if not cores or len(threads) < len(runs) or not threads or sum(threads) <= cores:
        return None
    workers, worker_cores = _loading(job, host)
    fitting = max(int((cores * _physical_share(host) - worker_cores) / len(runs)), 1)
    queued = _queued_share(host, cores, sum(threads) + workers, fitting * len(runs))
    delayed = max(queued, host.throttled_share or 0.0)
    if fitting >= max(threads) or delayed <= 0:
        return None
    rows = [row for row in job.summary.time_breakdown if row.rank in host.ranks]
    recoverable_us = delayed * on_cpu_us(rows, runs)
    return _Oversubscribed(host, cores, max(threads), sum(threads), fitting, recoverable_us)


def _loading(job: RuleContext, host: HostRow) -> tuple[int, float]:
    """Data loader workers, and the cores that they use."""
    assert job.summary.system is not None
    rows = [row for row in job.summary.system.processes if row.rank in host.ranks]
    return sum(row.workers for row in rows), sum(row.workers * (row.worker_cores or 0.0) for row in rows)


def _physical_share(host: HostRow) -> float:
    """Physical over logical cores: two hyper-threads of a core are not twice as fast."""
    return host.cores_physical / host.cores if host.cores_physical and host.cores else 1.0


def _queued_share(host: HostRow, cores: float, own: int, fitting: int) -> float:
    """Share of its time that work on the host waits in the job's queue; 0 where cores are free or there is none.

    Of n runnable threads the job has its part of the busy cores (a fair scheduler gives each thread the same), and at
    most its ``own`` threads; the others, m, remain. With its threads ``fitting``, work takes
    max(m + fitting, c)/n of its time.
    """
    used = host.job_cores / cores if host.job_cores is not None else 0.0
    runnable = host.runnable or 0.0
    if max(used, host.cpu_share or 0.0) < BUSY:
        return 0.0
    mine = min(runnable * _part(host), own)
    if mine < QUEUE * cores:
        return 0.0
    return max(1 - max(runnable - mine + fitting, cores) / runnable, 0.0)


def _part(host: HostRow) -> float:
    """The job's part of the host's busy cores; all where that is not known."""
    if host.job_cores is None or not host.cpu_share or not host.cores:
        return 1.0
    return min(host.job_cores / (host.cpu_share * host.cores), 1.0)


def on_cpu_us(rows: Sequence[TimeBreakdown], runs: Sequence[RunMetadata]) -> float:
    """Time per step that depends on the host's cores, mean over its ranks; all of it where they train on CPUs."""
    if not rows:
        return 0.0
    if all(run.device.type == "cpu" for run in runs):
        return sum(row.step_time_us for row in rows) / len(rows)
    return sum(row.categories()[name] for row in rows for name in ON_HOST) / len(rows)


def _evidence(job: RuleContext, case: _Oversubscribed) -> tuple[Evidence, ...]:
    ranks = case.host.ranks
    assert job.summary.system is not None
    waited = [row for row in job.summary.system.processes if row.rank in ranks and row.waited_share is not None]
    most = max(waited, key=lambda row: row.waited_share or 0.0, default=None)
    what = "time the main thread waited for a core (worst rank)"
    return (
        Evidence("CPU threads per rank", case.threads, ranks=ranks),
        Evidence("ranks on the host", len(ranks), ranks=ranks),
        Evidence("cores that they may use", case.cores, ranks=ranks),
        *known("threads running or waiting for a core", case.host.runnable),
        *known("share of the host's CPU time in use", case.host.cpu_share, "share"),
        *known("time throttled by a CPU quota", case.host.throttled_share or None, "share"),
        *(known(what, most.waited_share, "share", (most.rank,)) if most is not None else ()),
    )


def _action(job: RuleContext, case: _Oversubscribed) -> Action:
    variable = job.runs[case.host.ranks[0]].environment.get("OMP_NUM_THREADS", "")
    new = str(case.fitting)
    setting, old = "OMP_NUM_THREADS", variable or str(case.threads)
    how = (
        f"Before the command that starts the ranks:\n{code('shell', f'export OMP_NUM_THREADS={new}')}\n"
        f"If the training script sets the number itself, there:\n{code('python', f'torch.set_num_threads({new})')}"
    )
    if variable == new:
        setting, old = "torch.set_num_threads", str(case.threads)
        how = (
            f"In the training script, which sets more than OMP_NUM_THREADS={new}:\n"
            f"{code('python', f'torch.set_num_threads({new})')}"
        )
    elif job.settings("accelerate"):
        setting = "--num_cpu_threads_per_process"
        how = (
            "As an argument of accelerate launch, which sets OMP_NUM_THREADS for each rank:\n"
            f"{code('shell', f'--num_cpu_threads_per_process {new}')}"
        )
    return Action(setting=setting, old=old, new=new, how=how)


def _ranks(case: _Oversubscribed) -> str:
    count = len(case.host.ranks)
    return f"{count} ranks" if count > 1 else f"rank {case.host.ranks[0]}"
