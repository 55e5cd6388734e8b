"""What to do about a straggler, by its cause and by who it is."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Final

from perfscope.analyzers.job.slow_operators import SlowOperator
from perfscope.analyzers.rank.host_activity import SAVING
from perfscope.analyzers.rank.kernel_classes import ATTENTION, MATRIX, PRODUCTS, class_of_operator
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.ranks.imbalanced_work import SPREAD, exchanges_tokens, flops_spread, of_experts, only_few
from perfscope.analyzers.rules.ranks.paused_in import ANYWHERE, asleep, may_collect, paused_in, where
from perfscope.analyzers.rules.ranks.pauses import pause_together
from perfscope.recording.metadata import CpuMetadata
from perfscope.results.rows import StragglerRow
from perfscope.text import count_per_step, duration

WAITS: Final = 0.5
"""Part of a straggler's cost from which its longer wait for a core is what to look at first."""

THREADS: Final = 0.25
"""Part of it from which the work of other threads of the process may be behind it."""

_SLOWED_BY_THREADS: Final = ("host", "compute", "launch")
"""Causes that other threads of the process may be behind: those of a slow loader load."""

OF_CAUSE: Final = {
    "compute": "Compare {who} with the other ranks: clocks, power and throttle reasons of the device ({clocks}), "
    "then the amount of work (sequence lengths, experts).",
    "dataloader": "Check the storage and the samples of {who}: batches come later there than on the other ranks; use "
    "more DataLoader workers, or spread expensive samples evenly over the ranks.",
    "launch": "Look at what slows launches on {who}: other processes on the cores, CPU frequency and NUMA binding "
    "(numactl, taskset).",
    "host": "Look for Python work that only {who} does {where}{collection}, and for other processes on the cores "
    "there.",
    "sync": "Look for .item(), printing of tensors or synchronize() on {who}: the other ranks do not wait for their "
    "devices there.",
    "copy": "Check pinned memory and the PCIe link of {who}: host-device copies take longer there than on the other "
    "ranks.",
    "communication": "Compare links and network adapters of {who} with the others' ({links}, ibstat, "
    "ethtool -S), and the place in the network: the same transfers take longer there.",
}

_IN_TURN: Final = (
    "One rank after another pauses, and each time all wait. Python's garbage collector does that, because every "
    "process starts it by its own count of objects: call gc.disable() before the loop and gc.collect() on all ranks at "
    "the same step, every 500 steps for example. If it is off already, look for other work that is not synchronized "
    "(logging, checkpoints, evaluation)."
)

_OTHERWISE_IN_TURN: Final = (
    "One rank after another pauses {where}, and each time all wait. Do what it is in the same steps on all ranks, in "
    "fewer steps, or in a thread."
)

_ASLEEP: Final = (
    "Look for what {who} waits for {where}: its thread sleeps there for most of that time, and computes nothing (a "
    "file, the network, a lock, time.sleep)."
)
_ALL_ASLEEP: Final = (
    " Their threads sleep there for most of that time, and compute nothing (a file, the network, a lock, time.sleep)."
)

_TOGETHER: Final = (
    "All of {who} pause in the same steps, now one for longer and now another, and each time the others wait. Look at "
    "what they do {where}: do it in DataLoader workers or a thread, or in fewer steps."
)

_VARYING: Final = (
    "The slowest rank changes from step to step, as it does where the work of batches varies: compare sequence lengths "
    "and experts' tokens of the ranks; pack samples to one length, or draw batches by tokens from buckets of similar "
    "length, on all ranks."
)
_RECORD_SHAPES: Final = " With shapes recorded, FLOPs show whether that is it."

_FEW_IN_TURN: Final = (
    "Compare {who} with the others, of which none is ever slow: clocks, power and temperature of their devices over "
    "time ({clocks}), which change where two share power or cooling, and what their batches hold in these steps."
)

_EQUAL_WORK: Final = (
    "The slowest rank changes from step to step, and all ranks have the same FLOPs in each: it is not the work that "
    "varies. "
)
_VARYING_CORES: Final = (
    "Look for what else runs on the cores (top shows it), for CPU frequencies that change, and for more threads than "
    "cores."
)
_VARYING_SPEED: Final = (
    "Threads hardly wait for a core, so look for CPU frequencies that change, and for caches and memory that the ranks "
    "share."
)
_HARDLY: Final = 0.05
"""Share of their steps up to which threads hardly wait for a core."""
_VARYING_CLOCKS: Final = (
    "Look for clocks, power caps and temperatures that change ({clocks}), and for "
    "kernels that take longer beside communication."
)

_MACHINE: Final = (
    "all its ranks are equally slow, so the cause is the machine, not one process. Run without it to confirm."
)
_WHOLE_HOST: Final = (
    "Compare clocks, power caps and temperature of {who} with other hosts' ({clocks}), "
    f"its CPU governor, and other processes there: {_MACHINE}"
)
_CORES_OF_HOST: Final = (
    "Compare the CPUs of {who} with other hosts': governor and frequency, NUMA binding, other processes there (top), "
    f"and what its loop reads from disks or the network: {_MACHINE}"
)
_OF_WHOLE_HOST: Final = {
    "dataloader": "Compare what {who} reads its samples from with other hosts' (mount, local disk, network), and the "
    f"cores that its DataLoader workers have, other processes there included: {_MACHINE}",
    "copy": "Compare the PCIe links of {who} with other hosts' (width and generation), its NUMA binding and pinned "
    f"memory: {_MACHINE}",
    "communication": OF_CAUSE["communication"],
    **dict.fromkeys(("host", "launch", "sync"), _CORES_OF_HOST),
}
"""Cause -> what to look at where all ranks of a host have it; of compute ``_WHOLE_HOST``."""

_WHOLE_STAGE: Final = (
    "Compare clocks of the devices and efficiency of the kernels of this pipeline stage ({who}) with another stage's: "
    "all its ranks are slow with the same work. If that does not help, move layers to other stages."
)

_LINK: Final = (
    "Compare the {who} with those of other groups: width and errors of NVLink or PCIe ({links}), network adapters and "
    "switches on the way (ibstat, ethtool -S). Which of these ranks it is, a lone slow group does not show."
)

_SAVING: Final = (
    "Save checkpoints in fewer steps, or without stopping the others: {who} copies the state and a thread writes it "
    "(torch.distributed.checkpoint.async_save), or all ranks write their part at once "
    "(torch.distributed.checkpoint.save)."
)

_LATE_BATCH: Final = (
    "Load more batches ahead, with DataLoader(prefetch_factor=…) or more workers: one batch of {who} came late. Where "
    "single samples take long to load, any rank may draw the next one. If it is this rank again, check what it reads "
    "its samples from."
)
_SEVERAL_STEPS: Final = 4
"""Recorded steps from which a wait in one of them is the exception."""

_SLOW_ON_CPU: Final = (
    "Look for other processes on the cores of {who}, the CPU frequency and the number of threads (OMP_NUM_THREADS) "
    "there, then the amount of work (sequence lengths, experts)."
)

_SLOWER_CORES: Final = (
    "Look at the cores of {who}: other processes there (top; on virtual machines also steal time), their frequency, "
    "and the number of threads (OMP_NUM_THREADS)."
)
_AS_MANY: Final = 0.02
"""Relative difference of FLOPs up to which ranks compute as much."""

_LONGER_SEQUENCES: Final = (
    "compare the lengths of sequences (attention takes longer with their square), masks, and which kernel attention "
    "uses there, with the other ranks': pack samples to one length, and use the same kernel on all."
)
_MORE_TOKENS: Final = "compare how many tokens are routed to its experts with the other ranks'."
_OTHER_SHAPES: Final = (
    "compare shapes with the other ranks' (perfscope run records them), and names of kernels: more data, or another "
    "kernel for the same."
)


def by_cause(job: RuleContext, cause: str, who: str) -> str:
    """The remedy of one cause of several."""
    template = _SLOW_ON_CPU if cause == "compute" and not job.on_devices else OF_CAUSE[cause]
    return _written(job, template, who, ANYWHERE)


def by_straggler(job: RuleContext, worst: StragglerRow, who: str) -> str:
    """The remedy of a straggler's cause; of host work, by the name of what that is, if it is known."""
    name = paused_in(job, worst)
    return _written(job, _template(job, worst, name), who, where(job, name))


def _written(job: RuleContext, template: str, who: str, place: str) -> str:
    collection = ", for garbage collection" if may_collect(job) else ""
    return template.format(who=who, where=place, collection=collection, **job.device_commands)


def _template(job: RuleContext, worst: StragglerRow, pauses_in: str) -> str:
    run = job.runs.get(worst.rank)
    is_cpu = not job.on_devices or (run is not None and run.device.type == "cpu")
    if worst.scope == "job" and worst.cause == "compute":
        return _of_slow_in_turn(job, worst, is_cpu=is_cpu)
    if worst.scope == "job" and worst.cause == "host":
        return _of_pauses_in_turn(job, worst)
    if worst.scope == "job":
        return OF_CAUSE[worst.cause]
    if worst.scope == "host":
        return _OF_WHOLE_HOST.get(worst.cause, _CORES_OF_HOST if is_cpu else _WHOLE_HOST)
    if worst.scope == "stage":
        return _WHOLE_STAGE
    if worst.scope == "link":
        return _LINK
    if pauses_in == SAVING:
        return _SAVING
    if worst.cause == "compute" and is_cpu:
        return _SLOW_ON_CPU
    if worst.cause == "dataloader" and len(worst.steps) == 1 and job.steps >= _SEVERAL_STEPS:
        return _LATE_BATCH
    return _ASLEEP if worst.cause == "host" and asleep(job, worst) else OF_CAUSE[worst.cause]


def _of_pauses_in_turn(job: RuleContext, worst: StragglerRow) -> str:
    """Of hosts that pause, together or one after another."""
    if pause_together(job, worst.ranks):
        return _TOGETHER
    if may_collect(job):
        return _IN_TURN
    return _OTHERWISE_IN_TURN + (_ALL_ASLEEP if asleep(job, worst) else "")


def _of_slow_in_turn(job: RuleContext, worst: StragglerRow, *, is_cpu: bool) -> str:
    """Of ranks that compute longer in turn: the same ones each time, by work that varies, or by their devices."""
    if only_few(job, worst):
        return _SLOW_ON_CPU if is_cpu else _FEW_IN_TURN
    spread = flops_spread(job)
    if spread is not None and spread < SPREAD:
        on_cores = _VARYING_SPEED if _hardly_wait(job) else _VARYING_CORES
        return _EQUAL_WORK + (on_cores if is_cpu else _VARYING_CLOCKS)
    return _VARYING + (_RECORD_SHAPES if spread is None else "")


def _hardly_wait(job: RuleContext) -> bool:
    """Is it known of all ranks that their training threads seldom wait for a core?"""
    cpus = _cpus(job)
    return len(cpus) == len(job.ranks) and all(
        cpu.waited_ns is not None and cpu.waited_ns <= _HARDLY * cpu.wall_ns for cpu in cpus.values()
    )


def knows_waits_for_cores(job: RuleContext, worst: StragglerRow) -> bool:
    """Is it recorded for how long the training threads of these ranks waited for a core, where that may make them late?
    A straggler of a job on devices is told by these.
    """
    if job.on_devices or worst.cause not in _SLOWED_BY_THREADS:
        return True
    cpus = _cpus(job)
    return all(rank in cpus and cpus[rank].waited_ns is not None for rank in worst.members)


def slow_operator(job: RuleContext, worst: StragglerRow) -> SlowOperator | None:
    """The operator in which a rank is busy for longer than its peers, where it is one above all."""
    return job.slow_operators.get(worst.rank) if worst.scope == "rank" else None


def in_operator(job: RuleContext, worst: StragglerRow, who: str) -> str:
    """What to do where a rank computes longer in one operator above all; empty where it does not."""
    operator = slow_operator(job, worst)
    if operator is None:
        return ""
    if operator.is_own_work:
        often = count_per_step(operator.calls)
        times, others = f"{often} {'time' if often == '1' else 'times'} per step", count_per_step(operator.others_calls)
        if operator.own_us:
            times, others = f"{times} ({duration(operator.own_us)})", f"{others} ({duration(operator.others_us)})"
        others = f"its peers {others}" if operator.others_calls else "its peers never do"
        rest = f"{operator.alone}, which they never do" if operator.alone else "most of the rest as often as they do"
        return (
            f"{who[0].upper()}{who[1:]} calls {operator.name} {times}, {others}, and {rest}: it does work that is not "
            "its part of the batch. Do that (metrics, evaluation, generation, logging, checks) in fewer steps, or in "
            "another process, or share it among the ranks."
        )
    if operator.kind:
        return _not_by_clocks(job, operator, who)
    if _is_as_much(job, worst, operator):
        return (
            f"{operator.name} takes {duration(operator.own_us)} per step on {who} and {duration(operator.others_us)} "
            "on its peers, for as many calls and as many FLOPs: it has no more to compute. "
            f"{_SLOWER_CORES.format(who=who)}"
        )
    return (
        f"Look at {operator.name}: it takes {duration(operator.own_us)} per step on {who} and "
        f"{duration(operator.others_us)} on its peers, which call it as often. Its other operators are not slower, or "
        "not as much: compare what this one works on there (sizes, data, Python inside it) with the other ranks'. If "
        "that is the same, look at the rank's cores or device."
    )


def _is_as_much(job: RuleContext, worst: StragglerRow, operator: SlowOperator) -> bool:
    """Does a matrix product of a job on CPUs take longer on a rank that computes as many FLOPs as the others?"""
    work = work_over_peers(job, worst)
    if job.on_devices or work is None or class_of_operator(operator.name) not in PRODUCTS:
        return False
    return abs(work - 1) <= _AS_MANY


def work_over_peers(job: RuleContext, worst: StragglerRow) -> float | None:
    """Model FLOPs of a rank that computes for longer, over the other ranks' median; None where shapes are not
    recorded, or where ranks of several pipeline stages are not comparable.
    """
    if worst.scope != "rank" or worst.cause != "compute" or job.summary.pipeline is not None:
        return None
    sums = {rank: sum(steps.flops) for rank, steps in job.per_step.items() if steps.flops is not None}
    return over_others(sums, worst.rank)


def over_others(sums: Mapping[int, float], rank: int) -> float | None:
    """The value of a rank over the others' median; None where either is not known."""
    others = [value for other, value in sums.items() if other != rank]
    return sums[rank] / median(others) if rank in sums and others and median(others) else None


def _not_by_clocks(job: RuleContext, operator: SlowOperator, who: str) -> str:
    """What to do where a few kernels take longer, and those that clocks would slow as much do not."""
    work = _LONGER_SEQUENCES if operator.kind == ATTENTION else _OTHER_SHAPES
    if operator.kind == MATRIX and exchanges_tokens(job):
        work = f"{_MORE_TOKENS} {of_experts(job)} Else {_OTHER_SHAPES}"
    return (
        f"{work[0].upper()}{work[1:]}\n{operator.name}: {duration(operator.own_us)} per step on {who}, "
        f"{duration(operator.others_us)} on its peers, as many calls. Other kernels, which clocks would slow as "
        "much, are as quick as theirs: clocks, power and temperature are not the cause."
    )


def waits_for_cores(job: RuleContext, worst: StragglerRow, who: str) -> tuple[str, ...]:
    """Sentences, where one rank is late mostly because its training thread waits for a core longer than its peers' do:
    whatever it does then takes longer, loading on that thread too; or while other threads of its process compute, which
    also take the interpreter's lock where they run Python.
    """
    # Autograd's thread beside a device, and those that operators are spread over, are the training's own.
    alone = {rank for rank, run in job.runs.items() if run.device.type == "cpu" and (run.cpu_threads or 1) == 1}
    threads_us = {
        rank: (cpu.process_ns - cpu.thread_ns) / cpu.steps / 1e3 for rank, cpu in _cpus(job).items() if rank in alone
    }
    beside_us, waits_us = _longer_us(threads_us, worst), waits_longer_us(job, worst)
    said = []
    by_threads = worst.cause in _SLOWED_BY_THREADS
    of_own_threads = by_threads and beside_us >= WAITS * waits_us > 0 and beside_us >= THREADS * worst.lost_us
    if of_own_threads or (by_threads and beside_us >= WAITS * worst.lost_us):
        said.append(
            f"Look at what other threads of {who} do (checkpoints, prefetching, logging): they compute for "
            f"{duration(beside_us)} per step longer than its peers', on the cores and, in Python, under the "
            "interpreter's lock that its training thread needs."
        )
    if waits_us >= WAITS * worst.lost_us and not of_own_threads:
        late = (
            f"its training thread waits for a core {duration(waits_us)} per step longer than its peers' for such work"
        )
        said.append(f"Look for other processes on the cores of {who}: {late}.")
    return tuple(said)


def waits_longer_us(job: RuleContext, worst: StragglerRow) -> float:
    """For how long per step a rank's training thread waits for a core, more than its peers' do. Who works more waits
    longer where all wait: that part is its work's.
    """
    cpus = _cpus(job)
    waited_us = {rank: cpu.waited_ns / cpu.steps / 1e3 for rank, cpu in cpus.items() if cpu.waited_ns is not None}
    ran_us = {rank: cpus[rank].thread_ns / cpus[rank].steps / 1e3 for rank in waited_us}
    by_work_us = max(_longer_us(ran_us, worst), 0.0) * _peers_rate(waited_us, ran_us, worst)
    return _longer_us(waited_us, worst) - by_work_us


def _cpus(job: RuleContext) -> dict[int, CpuMetadata]:
    return {run.rank: run.cpu for run in job.runs.values() if run.cpu is not None and run.cpu.steps}


def _peers_rate(waited_us: Mapping[int, float], ran_us: Mapping[int, float], worst: StragglerRow) -> float:
    """For how long the other ranks wait for a core per time on one, median; 0 where that is not known."""
    rates = [waited_us[rank] / ran_us[rank] for rank in waited_us if rank not in worst.members and ran_us[rank] > 0]
    return median(rates) if rates else 0.0


def _longer_us(per_rank: Mapping[int, float], worst: StragglerRow) -> float:
    """By how much more of this one rank has than the median of the others; 0 where that is not known."""
    others = [us for rank, us in per_rank.items() if rank not in worst.members]
    if worst.scope != "rank" or worst.rank not in per_rank or not others:
        return 0.0
    return per_rank[worst.rank] - median(others)
