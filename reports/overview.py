"""The first screen: what the job was, the four numbers that matter, how sure the verdict is."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median

from perfscope.reports import money
from perfscope.reports.categories import COMMUNICATION, row_share, shares
from perfscope.reports.format import (
    ABSENT,
    byte_size,
    count,
    duration,
    known,
    plural,
    rank_list,
    share,
    significant,
)
from perfscope.reports.peak import peak_type
from perfscope.reports.run_history import drift, slowest_rank
from perfscope.summary import Job, Summary, Utilisation
from perfscope.summary_history import History

_STRATEGIES = {
    "ddp": "DDP",
    "fsdp": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "pipeline": "pipeline parallel",
    "tensor": "tensor parallel",
    "single": "single process",
    "unknown": "strategy unknown",
}
_WORTH_NAMING = 0.01
"""A rank is named as the worst when its share is this far above all ranks' share."""

_VISIBLE = 0.0005
"""A smaller share is written as none."""

_ONE_BATCH_A_RANK = {"ddp", "fsdp", "zero1", "zero2", "zero3", "single"}
"""Strategies in which every rank trains on a batch of its own."""

_SHARDING = {"fsdp", "zero3", "tensor", "pipeline"}


@dataclass(frozen=True)
class Tile:
    """One number of the first screen."""

    label: str
    definition: str
    value: str
    detail: str
    """What puts the number into proportion, or why there is none."""


@dataclass(frozen=True)
class Fact:
    """One line about the job."""

    label: str
    value: str
    code: bool = False
    """Shown in fixed width: a command, a path."""


def tiles(summary: Summary) -> tuple[Tile, ...]:
    """Step time, throughput, MFU, exposed communication, data loading and money, as far as they are known."""
    if summary.history is not None and not summary.accounting:
        return _tiles_of_history(summary, summary.history)
    first = (_step_tile(summary), _throughput_tile(summary), _mfu_tile(summary.utilisation))
    where = (_communication_tile(summary), _loading_tile(summary))
    known_tiles = (*first, *where, _cost_tile(summary))
    return tuple(tile for tile in known_tiles if tile is not None)


def identity(summary: Summary) -> tuple[str, ...]:
    """The job in a few words: model, strategy, ranks, devices, versions, when."""
    job = summary.job
    return tuple(
        part for part in (_model(job), strategy(job), _world(job), _devices(job), _torch(job), _when(job)) if part
    )


def command(job: Job) -> str:
    """The command as one would type it."""
    return shlex.join(job.command)


def facts(summary: Summary) -> tuple[Fact, ...]:
    """Everything known about the job, in the order in which one asks."""
    job = summary.job
    found = [
        Fact("Command", command(job), code=True),
        Fact("Recording", summary.source, code=True),
        Fact("Started", _when(job)),
        Fact("Model", _model(job)),
        Fact("Parameters", _parameters(job)),
        Fact("Strategy", strategy(job)),
        Fact("Batch of a rank", " × ".join(str(length) for length in job.batch_shape or ())),
        Fact("Ranks", _world(job)),
        Fact("Hosts", ", ".join(job.hosts)),
        Fact("Devices", ", ".join(job.devices)),
        Fact("Backend", job.backend or ""),
        Fact("Steps", _steps(job) if job.steps or summary.history is None else job.steps_from),
        Fact("Versions", ", ".join(f"{name} {version}" for name, version in job.versions.items())),
        Fact("PerfScope", summary.perfscope_version),
    ]
    found += [Fact(name, value, code=True) for name, value in _flat(job.settings)]
    return tuple(fact for fact in found if fact.value and fact.value != ABSENT)


def strategy(job: Job) -> str:
    """The parallel strategy in words: ``DDP``, ``FSDP + tensor parallel``."""
    named = (job.strategy,) if isinstance(job.strategy, str) else job.strategy
    return " + ".join(_STRATEGIES.get(name, name) for name in named)


def certainty(summary: Summary) -> str:
    """How sure the verdict is, and what it rests on."""
    job = summary.job
    sentences = []
    if summary.findings and not summary.verdict.healthy:
        sentences.append(f"{summary.findings[0].confidence.capitalize()} confidence.")
    if job.ranks:
        sentences.append(f"Based on {_basis(summary)}.")
    if job.perturbation is not None and known(job.perturbation):
        sentences.append(perturbation(job.perturbation))
    return " ".join(sentences)


def perturbation(ratio: float) -> str:
    """What profiling did to the steps, as a sentence."""
    change = ratio - 1
    if abs(change) < 0.02:
        return "Profiling did not change the step time noticeably."
    percent = f"{abs(change) * 100:,.0f}%"
    if change < 0:
        return f"The profiled steps were {percent} faster than the others, so the job's pace varies by itself."
    return f"Profiling slowed the steps by {percent}."


def _tiles_of_history(summary: Summary, history: History) -> tuple[Tile, ...]:
    """The same four numbers, as far as they go, where nothing but the steps' times was recorded."""
    slowest = slowest_rank(history)
    times = f"median of {plural(slowest.steps, 'step')}; 95% below {duration(slowest.p95_us)}, longest "
    no_trace = "No trace was recorded."
    loading = [row.stages_us["dataloader"] / row.mean_us for row in history.ranks if "dataloader" in row.stages_us]
    return (
        Tile("Step time", "step_time", duration(slowest.median_us), times + duration(slowest.max_us)),
        _mfu_tile(summary.utilisation),
        Tile("Exposed communication", "exposed_comm", ABSENT, no_trace),
        Tile("Data loading", "data_loading", share(max(loading)), "of the step on the rank with most of it")
        if loading
        else Tile("Data loading", "data_loading", ABSENT, no_trace),
    )


def _step_tile(summary: Summary) -> Tile:
    job = summary.job
    if not job.ranks or not known(job.step_time_us) or job.step_time_us <= 0:
        return Tile("Step time", "step_time", ABSENT, "No rank could be analyzed.")
    label = "Step time" if job.steps else "Recording"
    if not job.steps:
        detail = "Nothing marks steps: the whole recording is one window."
    elif len(job.step_time_us_per_step) > 1:
        times = job.step_time_us_per_step
        detail = f"{plural(len(times), 'step')}, {duration(min(times))} to {duration(max(times))}"
    else:
        detail = plural(len(job.steps), "step")
    if known(job.unprofiled_step_us):
        detail += f"; {duration(job.unprofiled_step_us)} without profiling"
    return Tile(label, "step_time", duration(job.step_time_us), detail)


def _throughput_tile(summary: Summary) -> Tile | None:
    """Samples a second of the whole job; None where the batch is not known or not every rank has its own."""
    job = summary.job
    named = {job.strategy} if isinstance(job.strategy, str) else set(job.strategy)
    if not job.batch_shape or not job.batches_per_step or not named <= _ONE_BATCH_A_RANK or not job.step_time_us > 0:
        return None
    step_us = job.unprofiled_step_us if known(job.unprofiled_step_us) else job.step_time_us
    ranks = job.world_size or len(job.ranks)
    samples = job.batch_shape[0] * job.batches_per_step * ranks
    pace = f" of {duration(step_us)}" if step_us != job.step_time_us else ""
    detail = f"{_whole(samples)} a step{pace}, {_whole(samples / ranks)} on each rank"
    if len(job.batch_shape) == 2:
        # The first tensor of a batch with two dimensions is (sequences, positions) in every language model.
        rate = count(samples * job.batch_shape[1] / step_us * 1e6)
        detail += f"; {rate} tokens a second, if a sample is {job.batch_shape[1]:,} tokens"
    return Tile("Samples a second", "throughput", significant(samples / step_us * 1e6), detail)


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else significant(value)


def _cost_tile(summary: Summary) -> Tile | None:
    cost = summary.cost
    if cost is None:
        return None
    each = money.amount(cost.price_per_device_hour, cost)
    detail = f"{plural(cost.devices, 'device')} at {each} an hour"
    if cost.per_1000_steps is not None:
        detail += f"; {money.amount(cost.per_1000_steps, cost)} per 1,000 steps"
    best = max(
        (row.per_day for row in (*cost.savings, *((cost.plan,) if cost.plan else ())) if not row.bounded), default=0.0
    )
    if best > 0:
        detail += f"; up to {money.amount(best, cost)} a day can be saved"
    return Tile("Cost of a day", "cost", money.amount(cost.per_day, cost), detail)


def since(summary: Summary) -> str:
    """Since when the job is limited so, as far as the recording tells; empty where nothing limits it."""
    job = summary.job
    if summary.verdict.healthy or not job.steps:
        return ""
    sentences = []
    blamed = summary.stragglers[:1]
    if blamed and blamed[0].steps and summary.findings and "straggl" in summary.findings[0].rule:
        held = blamed[0].steps
        if len(held) == len(job.steps):
            sentences.append(f"In every recorded step ({rank_list(job.steps)}).")
        else:
            sentences.append(
                f"In {len(held)} of {plural(len(job.steps), 'recorded step')}, first in step {held[0]:,}, last in step "
                f"{held[-1]:,}."
            )
    elif len(job.steps) > 1:
        sentences.append(f"Over the recorded steps {rank_list(job.steps)}.")
    moved = drift(summary.history) if summary.history is not None else ""
    if moved:
        sentences.append(f"{moved[0].upper()}{moved[1:]}.")
    return " ".join(sentences)


def _mfu_tile(utilisation: Utilisation) -> Tile:
    if utilisation.mfu is None or not known(utilisation.mfu):
        return Tile("MFU", "mfu", ABSENT, _sentence(utilisation.why_absent or "Not computed from this recording"))
    coverage = utilisation.flops_coverage
    bounded = coverage is not None and coverage < 0.995
    peak = utilisation.peak_tflops
    detail = f"of {significant(peak)} TFLOP/s {peak_type(utilisation)} a device".replace("  ", " ") if peak else ""
    if bounded:
        detail += f"; a lower bound: shapes of {share(coverage)} of the matrix work"
    return Tile("MFU", "mfu", ("≥ " if bounded else "") + share(utilisation.mfu), detail.removeprefix("; "))


def _communication_tile(summary: Summary) -> Tile:
    rows = summary.accounting
    if not rows:
        return Tile("Exposed communication", "exposed_comm", ABSENT, "No rank could be analyzed.")
    taken = shares(rows)
    wait, transfer = (taken[name] for name in COMMUNICATION)
    if not any(row.comm_us > 0 for row in rows):
        return Tile("Exposed communication", "exposed_comm", "0%", "No communication in this recording.")
    worst = max(rows, key=lambda row: row_share(row, *COMMUNICATION))
    detail = f"{share(wait)} waiting, {share(transfer)} transfer"
    if any(row.wait_is_bound for row in rows):
        detail = (
            f"at least {share(wait)} waiting, at most {share(transfer)} transfer: not every participant was recorded"
            if wait >= _VISIBLE
            else "Transfer, or waiting for ranks that were not recorded."
        )
    elif row_share(worst, *COMMUNICATION) - wait - transfer >= _WORTH_NAMING:
        detail += f"; most on rank {worst.rank} ({share(row_share(worst, *COMMUNICATION))})"
    return Tile("Exposed communication", "exposed_comm", share(wait + transfer), detail)


def _loading_tile(summary: Summary) -> Tile:
    rows = summary.accounting
    if not rows:
        return Tile("Data loading", "data_loading", ABSENT, "No rank could be analyzed.")
    taken = shares(rows)["idle_dataloader"]
    if not summary.dataloader and taken == 0:
        return Tile("Data loading", "data_loading", "0%", "No data loader in this recording.")
    worst = max(rows, key=lambda row: row_share(row, "idle_dataloader"))
    workers = sorted({row.num_workers for row in summary.dataloader if row.num_workers is not None})
    parts = []
    if row_share(worst, "idle_dataloader") - taken >= _WORTH_NAMING:
        parts.append(f"most on rank {worst.rank} ({share(row_share(worst, 'idle_dataloader'))})")
    if workers:
        parts.append(f"{' or '.join(str(number) for number in workers)} worker{'' if workers == [1] else 's'} a rank")
    return Tile("Data loading", "data_loading", share(taken), _sentence("; ".join(parts), stop=""))


def _basis(summary: Summary) -> str:
    job = summary.job
    steps = plural(len(job.steps), "step") if job.steps else "one window without steps"
    if summary.history is not None and not summary.accounting:
        steps = f"how long {plural(max(row.steps for row in summary.history.ranks), 'step')} took, without a trace,"
    size = job.world_size
    if size is not None and size > len(job.ranks):
        return f"{steps} of {len(job.ranks):,} out of {plural(size, 'rank')}"
    everyone = {1: "the only rank", 2: "both ranks"}.get(len(job.ranks), f"all {len(job.ranks):,} ranks")
    return f"{steps} of {everyone}"


def _steps(job: Job) -> str:
    if not job.steps:
        return f"none found ({job.steps_from})" if job.steps_from else "none found"
    times = [time for time in job.step_time_us_per_step if known(time)]
    middle = f", median {duration(median(times))}" if times else ""
    source = f", found by {job.steps_from}" if job.steps_from else ""
    return f"{rank_list(job.steps)} ({plural(len(job.steps), 'step')}{middle}{source})"


def _world(job: Job) -> str:
    present = len(job.ranks)
    size = job.world_size if job.world_size is not None else present
    text = plural(size, "rank") if present >= size else f"{present:,} of {plural(size, 'rank')}"
    return text + (f" on {plural(len(job.hosts), 'host')}" if job.hosts else "")


def _model(job: Job) -> str:
    if not job.model or not job.model.get("name"):
        return ""
    parameters = job.model.get("parameters")
    return str(job.model["name"]) + (f", {count(parameters)} parameters" if parameters else "")


def _parameters(job: Job) -> str:
    model = job.model or {}
    number, size = model.get("parameters"), model.get("parameter_bytes")
    if not number:
        return ""
    named = {job.strategy} if isinstance(job.strategy, str) else set(job.strategy)
    shard = f", the shard that rank {min(job.ranks)} holds" if job.ranks and named & _SHARDING else ""
    dtypes = ", ".join(str(dtype) for dtype in model.get("dtypes") or ())
    return f"{number:,}" + (f" ({byte_size(size)}{', ' + dtypes if dtypes else ''})" if size else "") + shard


def _devices(job: Job) -> str:
    named = ["CPU" if device == "cpu" else device for device in job.devices[:2]]
    return ", ".join(named) + (f" and {len(job.devices) - 2} other kinds" if len(job.devices) > 2 else "")


def _torch(job: Job) -> str:
    return f"PyTorch {job.versions['torch']}" if "torch" in job.versions else ""


def _when(job: Job) -> str:
    """The start in UTC to the minute; as written where it is no ISO time."""
    try:
        moment = datetime.fromisoformat((job.started_at or "").replace("Z", "+00:00"))
    except ValueError:
        return job.started_at or ""
    if moment.tzinfo is None:
        return moment.strftime("%Y-%m-%d %H:%M")
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _flat(settings: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Settings as (dotted name, value as JSON); what is None was not set and is left out."""
    lines: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            lines.append((f"{prefix}{name}", text))
    return lines


def _sentence(text: str, stop: str = ".") -> str:
    text = text[:1].upper() + text[1:]
    return text if not text or text.endswith(".") else text + stop
