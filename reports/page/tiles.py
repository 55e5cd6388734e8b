"""The numbers of the first screen: step time, throughput, MFU, exposed communication, data loading, cost."""

from __future__ import annotations

from typing import Final

from perfscope.frozen import dataclass
from perfscope.reports.page.advice import amount
from perfscope.reports.page.run_history import slowest_rank
from perfscope.results.categories import EXPOSED_COMMUNICATION
from perfscope.results.history import History
from perfscope.results.rows import JobInfo, Utilisation
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.text import ABSENT, count, duration, known, percent, plural, significant

_LOOKS_UP: Final = "aten::embedding"
"""The operator with which models look tokens up."""

_ALL_BUT: Final = 0.99
"""Share of the FLOPs from which one type stands for all."""


_WORTH_NAMING = 0.01
"""A rank is named as the worst when its share is this far above all ranks' share."""


_VISIBLE = 0.0005
"""A smaller share counts as none."""


@dataclass(frozen=True)
class Tile:
    """One number of the first screen."""

    label: str
    definition: str
    value: str
    detail: str
    """What the number is to be compared with, or why there is none."""


def tiles(summary: Summary) -> tuple[Tile, ...]:
    """Step time, throughput, MFU, exposed communication, data loading and money, as far as they are known."""
    if summary.history is not None and not summary.time_breakdown:
        return _tiles_of_history(summary, summary.history)
    if summary.job.ranks and not summary.time_breakdown:
        return ()  # Dumps alone: nothing was measured.
    first = (_step_tile(summary), _throughput_tile(summary), _mfu_tile(summary.utilisation))
    alone = len(summary.job.ranks) == 1 and not any(row.comm_us > 0 for row in summary.time_breakdown)
    where = (None if alone else _communication_tile(summary), _loading_tile(summary))
    known_tiles = (*first, *where, _cost_tile(summary))
    return tuple(tile for tile in known_tiles if tile is not None)


def peak_type(utilisation: Utilisation) -> str:
    """The type of the peak: ``bfloat16``, or ``mixed, mostly tf32`` where products ran in several types."""
    dtype = utilisation.dtype or ""
    mixed = dtype and utilisation.flops_by_dtype.get(dtype, 1.0) < _ALL_BUT
    return f"mixed, mostly {dtype}" if mixed else dtype


def _tiles_of_history(summary: Summary, history: History) -> tuple[Tile, ...]:
    """The same numbers, as far as they are known, for a recording of step times alone."""
    slowest = slowest_rank(history)
    times = f"median of {plural(slowest.steps, 'step')}; 95th percentile {duration(slowest.p95_us)}, longest "
    no_trace = "No trace was recorded."
    loading = [row.stages_us["dataloader"] / row.mean_us for row in history.ranks if "dataloader" in row.stages_us]
    return (
        Tile("Step time", "step_time", duration(slowest.median_us), times + duration(slowest.max_us)),
        _mfu_tile(summary.utilisation),
        Tile("Exposed communication", "exposed_comm", ABSENT, no_trace),
        Tile("Data loading", "data_loading", percent(max(loading)), "of the step, on the rank that waits longest")
        if loading
        else Tile("Data loading", "data_loading", ABSENT, no_trace),
    )


def _step_tile(summary: Summary) -> Tile:
    job = summary.job
    if not job.ranks or not known(job.step_time_us) or job.step_time_us <= 0:
        return Tile("Step time", "step_time", ABSENT, "No rank could be analyzed.")
    label = "Step time" if job.steps else "Recording"
    if not job.steps:
        detail = f"{job.steps_from[:1].upper()}{job.steps_from[1:]}: the whole recording is one window."
    elif len(job.step_time_us_per_step) > 1:
        times = job.step_time_us_per_step
        detail = f"{plural(len(times), 'step')}, {duration(min(times))} to {duration(max(times))}"
    else:
        detail = plural(len(job.steps), "step")
    if known(job.unprofiled_step_us):
        return Tile(label, "step_us", duration(job.step_us), f"Without the profiler; {_recorded(job, detail)}")
    if job.steps:
        detail += f", with the profiler's overhead: {_no_unprofiled(job)}"
    return Tile(label, "step_time", duration(job.step_time_us), detail)


def _no_unprofiled(job: JobInfo) -> str:
    """Why it is not known what a step takes without the profiler."""
    if known(job.perturbation):
        return "too few unprofiled steps were timed"
    if job.command:
        return "no step was timed while the profiler neither recorded nor wrote its trace; let the job make more steps"
    return "the time without it is not known"


def _recorded(job: JobInfo, detail: str) -> str:
    """What the recorded steps take, of which everything else on the page is a share."""
    return f"with it {duration(job.step_time_us)} ({detail})"


def _throughput_tile(summary: Summary) -> Tile | None:
    """Samples/s of the whole job; None where the batch is not known or not every rank has its own."""
    job = summary.job
    samples, step_us = job.samples_per_step, job.step_us
    if not samples or not job.samples_per_rank or not job.step_time_us > 0:
        return None
    detail = f"{_whole(samples)} per step, {_whole(job.samples_per_rank)} per rank"
    if step_us != job.step_time_us:
        detail += ", without profiling"
    if job.positions_per_sample and _looks_up(summary):
        # The first tensor of a batch with two dimensions is (sequences, positions) in every language model.
        rate = count(samples * job.positions_per_sample / step_us * 1e6)
        detail += f"; {rate} tokens/s if a sample is {_whole(job.positions_per_sample)} tokens"
    return Tile("Throughput", "throughput", f"{significant(samples / step_us * 1e6)} samples/s", detail)


def _looks_up(summary: Summary) -> bool:
    """May the model look tokens up? Where operators are recorded, one that does is among them: with none, the second
    dimension of a batch is of features.
    """
    return not summary.operators or any(row.name == _LOOKS_UP for row in summary.operators)


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else significant(value)


def _cost_tile(summary: Summary) -> Tile | None:
    cost = summary.cost
    if cost is None:
        return None
    each = amount(cost.price_per_device_hour, cost)
    detail = f"{plural(cost.devices, 'device')} at {each} per hour"
    if cost.per_1000_steps is not None:
        detail += f"; {amount(cost.per_1000_steps, cost)} per 1,000 steps"
    best = max(
        (row.per_day for row in (*cost.savings, *((cost.plan,) if cost.plan else ())) if not row.bounded), default=0.0
    )
    if best > 0:
        detail += f"; savings up to {amount(best, cost)} per day"
    return Tile("Cost per day", "cost", amount(cost.per_day, cost), detail)


def _mfu_tile(utilisation: Utilisation) -> Tile:
    if utilisation.mfu is None or not known(utilisation.mfu):
        return Tile("MFU", "mfu", ABSENT, _sentence(utilisation.why_absent or "Not computed from this recording"))
    coverage = utilisation.flops_coverage
    bounded = coverage is not None and coverage < 0.995
    peak = utilisation.peak_tflops
    dtype = peak_type(utilisation)
    detail = f"of {significant(peak)} TFLOP/s per device" + (f" ({dtype})" if dtype else "") if peak else ""
    if bounded:
        detail += f"; a lower bound: shapes are known for {percent(coverage)} of the matrix operators' time"
    return Tile("MFU", "mfu", ("≥ " if bounded else "") + percent(utilisation.mfu), detail.removeprefix("; "))


def _communication_tile(summary: Summary) -> Tile:
    rows = summary.time_breakdown
    if not rows:
        return Tile("Exposed communication", "exposed_comm", ABSENT, "No rank could be analyzed.")
    taken = shares(rows)
    wait, transfer = (taken[name] for name in EXPOSED_COMMUNICATION)
    if not any(row.comm_us > 0 for row in rows):
        return Tile("Exposed communication", "exposed_comm", "0%", "No communication in this recording.")
    worst = max(rows, key=lambda row: row.share(*EXPOSED_COMMUNICATION))
    detail = f"{percent(wait)} waiting, {percent(transfer)} transfer"
    if any(row.wait_is_bound for row in rows):
        absent = summary.job.may_lack_ranks
        why = "not every rank was recorded" if absent else "who waits for whom is not recorded"
        detail = (
            f"at least {percent(wait)} waiting, at most {percent(transfer)} transfer: {why}"
            if wait >= _VISIBLE
            else f"Transfer, or waiting for {'ranks that were not recorded' if absent else 'other ranks'}."
        )
    elif worst.share(*EXPOSED_COMMUNICATION) - wait - transfer >= _WORTH_NAMING:
        detail += f"; most on rank {worst.rank} ({percent(worst.share(*EXPOSED_COMMUNICATION))} of its step)"
    return Tile("Exposed communication", "exposed_comm", percent(wait + transfer), detail)


def _loading_tile(summary: Summary) -> Tile:
    rows = summary.time_breakdown
    if not rows:
        return Tile("Data loading", "data_loading", ABSENT, "No rank could be analyzed.")
    taken = shares(rows)["idle_dataloader"]
    if not summary.dataloader and taken == 0:
        return Tile("Data loading", "data_loading", "0%", "No data loader in this recording.")
    worst = max(rows, key=lambda row: row.share("idle_dataloader"))
    workers = sorted({row.num_workers for row in summary.dataloader if row.num_workers is not None})
    parts = []
    if worst.share("idle_dataloader") - taken >= _WORTH_NAMING:
        parts.append(f"most on rank {worst.rank} ({percent(worst.share('idle_dataloader'))} of its step)")
    if workers:
        parts.append(f"{' or '.join(str(number) for number in workers)} worker{'' if workers == [1] else 's'} per rank")
    return Tile("Data loading", "data_loading", percent(taken), _sentence("; ".join(parts), stop=""))


def _sentence(text: str, stop: str = ".") -> str:
    text = text[:1].upper() + text[1:]
    return text if not text or text.endswith(".") else text + stop
