"""CPU threads a rank: fires when the ranks of a host spread their operators over more threads than there are cores.

Operators on the CPU run on ``torch.get_num_threads()`` threads in every rank. With more of them than cores, threads
that wait for each other at the end of every operator also wait for a core. torchrun therefore sets OMP_NUM_THREADS=1
where nobody sets it (torch ``distributed/run.py``); other launchers leave it at the number of cores, in each rank.
Source: PyTorch performance tuning guide, "Utilize OpenMP".

More threads than cores are harmless as long as few of them run at once, as in most training on GPUs. So the rule asks
for the queue that they make, or for a quota that keeps them from running, in the sampler's record. With n threads
ready to run on c cores a fair scheduler gives each c/n of a core, so without the job's queue what the host does in a
step would take at least c/n of its time: that bounds the gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import settings_of
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.metadata import RunMetadata
from perfscope.summary import AccountRow
from perfscope.summary_system import HostRow

RULE: Final = "cpu-oversubscription"
SHARE: Final = 0.05
"""Share of the step that must be recoverable at most."""
BUSY: Final = 0.9
"""Share of the usable cores that must be busy, or the host's."""
QUEUE: Final = 1.25
"""Runnable threads per usable core from which they count as a queue."""
ON_HOST: Final = ("idle_dataloader", "idle_launch", "idle_host")
"""Rows of the account in which a step with a device waits for the host; without a device every row is the host's."""


@dataclass(frozen=True)
class _Crowd:
    """The ranks of one host and their threads."""

    host: HostRow
    cores: float
    """That the ranks may use together."""
    threads: int
    """Per rank, the most."""
    wanted: int
    """Of all ranks together."""
    fitting: int
    """Threads per rank that fit the cores."""
    recoverable_us: float


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: nothing sampled, threads that fit or are not at work, or little of the step on the CPU."""
    if facts.system is None or facts.steps == 0:
        return None
    crowds = [crowd for host in facts.system.hosts if (crowd := _crowd(facts, host)) is not None]
    if not crowds:
        return None
    worst = max(crowds, key=lambda crowd: crowd.recoverable_us)
    if worst.recoverable_us < SHARE * facts.step_time_us:
        return None
    change = {"env.OMP_NUM_THREADS": str(worst.fitting)}
    played = facts.predict(change) if facts.predict is not None else None
    worth_ns = (1 - SHARE) * facts.step_time_us * 1e3
    if played is not None and played.low > worth_ns:
        return None  # They queue, and little of the step waits for that.
    # A step of which so little is work that its range holds the gain and none of it bounds the gain, and no more.
    told = played is not None and played.mid <= worth_ns
    saved_us = worst.recoverable_us
    if played is not None:
        saved_us = min(saved_us, facts.step_time_us - played.low / 1e3)
    doubtful = facts.few_steps or worst.host.samples < 3 or (played is not None and not told)
    return Finding(
        rule=RULE,
        title=f"{worst.wanted} CPU threads of {_ranks(worst)} compete for {worst.cores:g} cores on {worst.host.host}",
        severity=Severity.of_share(saved_us / facts.step_time_us),
        evidence=_evidence(facts, worst),
        action=_action(facts, worst),
        confidence=Confidence.LOW if doubtful else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, saved_us),
        whatif=change if told else {},
    )


def _crowd(facts: JobFacts, host: HostRow) -> _Crowd | None:
    runs = [facts.runs[rank] for rank in host.ranks if rank in facts.runs]
    threads = [run.cpu_threads for run in runs if run.cpu_threads]
    cores = host.cores_usable
    if not cores or len(threads) < len(runs) or not threads or sum(threads) <= cores:
        return None
    workers, worker_cores = _loading(facts, host)
    fitting = max(int((cores * _physical_share(host) - worker_cores) / len(runs)), 1)
    queued = _held_up(host, cores, sum(threads) + workers, fitting * len(runs))
    held_up = max(queued, host.throttled_share or 0.0)
    if fitting >= max(threads) or held_up <= 0:
        return None
    rows = [row for row in facts.accounting if row.rank in host.ranks]
    recoverable_us = held_up * _on_cpu_us(rows, runs)
    return _Crowd(host, cores, max(threads), sum(threads), fitting, recoverable_us)


def _loading(facts: JobFacts, host: HostRow) -> tuple[int, float]:
    """Data loader workers, and the cores that they keep busy."""
    assert facts.system is not None
    rows = [row for row in facts.system.processes if row.rank in host.ranks]
    return sum(row.workers for row in rows), sum(row.workers * (row.worker_cores or 0.0) for row in rows)


def _physical_share(host: HostRow) -> float:
    """Hyper-threads of one core do not compute twice as fast."""
    return host.cores_physical / host.cores if host.cores_physical and host.cores else 1.0


def _held_up(host: HostRow, cores: float, own: int, fitting: int) -> float:
    """Share of its time that work on the host is held up by the job's queue; 0 where cores are free or there is none.

    Of n runnable threads the job has its part of the busy cores (a fair scheduler gives each thread the same), and at
    most its ``own`` threads; the others, m, stay. With its threads ``fitting``, work takes max(m + fitting, c)/n of its
    time.
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


def _on_cpu_us(rows: Sequence[AccountRow], runs: Sequence[RunMetadata]) -> float:
    """Time per step that is the host's, mean over its ranks."""
    if not rows:
        return 0.0
    if all(run.device.type == "cpu" for run in runs):
        return sum(row.step_time_us for row in rows) / len(rows)
    return sum(row.rows()[name] for row in rows for name in ON_HOST) / len(rows)


def _evidence(facts: JobFacts, crowd: _Crowd) -> tuple[Evidence, ...]:
    ranks = crowd.host.ranks
    rows = [
        Evidence(what="CPU threads per rank", value=crowd.threads, unit="", ranks=ranks),
        Evidence(what="ranks on the host", value=len(ranks), unit="", ranks=ranks),
        Evidence(what="cores that they may use", value=crowd.cores, unit="", ranks=ranks),
    ]
    if crowd.host.runnable is not None:
        rows.append(Evidence(what="threads running or waiting for a core", value=crowd.host.runnable, unit=""))
    if crowd.host.cpu_share is not None:
        rows.append(Evidence(what="share of the host's CPU time in use", value=crowd.host.cpu_share, unit="share"))
    if crowd.host.throttled_share:
        rows.append(Evidence(what="time held back by a CPU quota", value=crowd.host.throttled_share, unit="share"))
    assert facts.system is not None
    waited = [row for row in facts.system.processes if row.rank in ranks and row.waited_share is not None]
    if waited:
        most = max(waited, key=lambda row: row.waited_share or 0.0)
        rows.append(
            Evidence(
                what="time the main thread waited for a core (worst rank)",
                value=most.waited_share or 0.0,
                unit="share",
                ranks=(most.rank,),
            )
        )
    return tuple(rows)


def _action(facts: JobFacts, crowd: _Crowd) -> Action:
    variable = facts.runs[crowd.host.ranks[0]].environment.get("OMP_NUM_THREADS", "")
    new = str(crowd.fitting)
    if variable == new:
        return Action(
            setting="torch.set_num_threads",
            old=str(crowd.threads),
            new=new,
            how=f"torch.set_num_threads({new}) in the training script, which asks for more than OMP_NUM_THREADS={new}.",
        )
    if settings_of(facts, "accelerate"):
        return Action(
            setting="--num_cpu_threads_per_process",
            old=variable or str(crowd.threads),
            new=new,
            how=f"accelerate launch --num_cpu_threads_per_process {new} …, which sets OMP_NUM_THREADS for each rank.",
        )
    return Action(
        setting="OMP_NUM_THREADS",
        old=variable or str(crowd.threads),
        new=new,
        how=f"export OMP_NUM_THREADS={new} before the command that starts the ranks; where the training script sets "
        f"the number itself, torch.set_num_threads({new}) there.",
    )


def _ranks(crowd: _Crowd) -> str:
    count = len(crowd.host.ranks)
    return f"{count} ranks" if count > 1 else f"rank {crowd.host.ranks[0]}"
