"""Simulated step histories of jobs with a planted delay: the ranks' own clocks, their noise, and how they wait.

A simulator of its own: nothing of the analyzers is used. A rank is a clock that is advanced by its own work, and set to
the time at which others have come where it waits. What is written is what a rank's training thread would have seen: for
each step its time, that of its stages, and what it waited in each, by a clock with an offset and a drift.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from perfscope.recording.history import CORE_IN, Block, pack
from perfscope.recording.metadata import RunMetadata, save
from perfscope.recording.paths import run_file, steps_file

Array = npt.NDArray[np.float64]

WORK: Final = ("other", "dataloader", "forward", "backward", "optimizer")
"""What a step does, in its order."""

STRATEGIES: Final = ("ddp", "fsdp", "zero1", "pipeline")
PATTERNS: Final = ("steady", "intermittent", "rotating", "late")
MS: Final = 1000.0


@dataclass(frozen=True)
class PlantedDelay:
    """A planted delay."""

    stage: str
    pattern: str
    """``late``: steady from the middle of the run on."""
    ranks: tuple[int, ...]
    share: float
    """Extra own time of a slow step, as a share of the step."""
    every: float = 0.2
    """Probability that a step is slow, with ``intermittent``."""


@dataclass(frozen=True)
class RunPlan:
    """One job."""

    strategy: str
    ranks: int
    steps: int
    step_ms: float
    noise: float
    """Standard deviation of each stage of each step, as a share of it."""
    unlike: float
    """Standard deviation of the ranks' speed."""
    transfer: float
    """Communication that nothing overlaps, as a share of the step."""
    replicas: int = 1
    """Of a pipeline."""
    put_off: float = 0.0
    """Time in which a rank's thread waits for a core, while it works, as a share of the step; it comes in bursts."""
    cause: PlantedDelay | None = None
    second: PlantedDelay | None = None
    """Another one, of another rank."""
    accumulation: int = 1
    """Forwards and backwards in a step, of which the last one waits for the other ranks (DDP, ZeRO-1)."""
    evaluation_every: int = 0
    """Every so many steps all ranks evaluate, for several steps' time; 0: never."""
    restart_at: int = 0
    """Steps of an attempt before this one, which the job began anew after; 0: none."""
    seed: int = 0

    @property
    def causes(self) -> tuple[PlantedDelay, ...]:
        """The planted delays."""
        return tuple(cause for cause in (self.cause, self.second) if cause is not None)


@dataclass
class SeenSteps:
    """What each rank saw, µs: steps x ranks; stages and waits by name."""

    step: Array
    stages: dict[str, Array]
    waits: dict[str, Array] = field(default_factory=dict)


def draw(seed: int, *, healthy: bool) -> RunPlan:
    """A random job."""
    rng = np.random.default_rng(seed)
    strategy = STRATEGIES[int(rng.integers(len(STRATEGIES)))]
    ranks = int(rng.choice([2, 3, 4, 8, 16, 32, 64, 128, 256]))
    replicas = 1
    if strategy == "pipeline":
        ranks = int(rng.choice([2, 3, 4, 8, 16, 32, 64]))
        replicas = int(rng.choice([1, 2, ranks // 4])) if ranks > 3 else 1
    plan = RunPlan(
        strategy=strategy,
        ranks=ranks,
        steps=int(rng.integers(120, 500)),
        step_ms=float(np.exp(rng.uniform(np.log(10), np.log(2000)))),
        noise=float(np.exp(rng.uniform(np.log(0.002), np.log(0.05)))),
        unlike=float(rng.uniform(0, 0.004)),
        transfer=float(rng.uniform(0.01, 0.2)),
        replicas=replicas,
        seed=seed,
    )
    if healthy:
        return plan
    pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
    width = 1
    if pattern in ("steady", "late") and rng.random() < 0.2 and strategy != "pipeline":
        width = ranks // 8 if ranks >= 16 else 1  # a host of many
    first = int(rng.integers(ranks // width)) * width
    # The rest of a pipeline waits for the slow stage for the whole step, so a delay there costs about as much.
    share = float(rng.uniform(0.06, 0.4)) if strategy != "pipeline" else float(rng.uniform(0.15, 0.4))
    cause = PlantedDelay(
        stage=("dataloader", "forward", "backward", "optimizer")[int(rng.integers(4))],
        pattern=pattern,
        ranks=tuple(range(first, first + width)),
        share=share,
        every=float(rng.uniform(0.1, 0.5)),
    )
    return RunPlan(**{**vars(plan), "cause": cause})


def draw_eventful(seed: int, *, healthy: bool) -> RunPlan:
    """A random job of 8 to 256 ranks in which more happens: accumulation, evaluations, a restart, two slow ranks."""
    plan = draw(seed, healthy=healthy)
    rng = np.random.default_rng([seed, 11])
    if plan.ranks < 8 or plan.strategy == "pipeline":
        ranks = int(rng.choice([8, 16, 32, 64, 128, 256]))
        strategy = ("ddp", "fsdp", "zero1")[int(rng.integers(3))]
        plan = replace(plan, ranks=ranks, replicas=1, strategy=strategy)
        if plan.cause is not None:
            plan = replace(plan, cause=replace(plan.cause, ranks=(int(rng.integers(ranks)),)))
    plan = replace(
        plan,
        accumulation=int(rng.choice([1, 2, 4, 8])),
        evaluation_every=int(rng.choice([0, 25, 60])),
        restart_at=int(rng.choice([0, 30, 90])),
    )
    cause = plan.cause
    if cause is None or rng.random() < 0.5 or cause.pattern != "steady":
        return plan
    others = [rank for rank in range(plan.ranks) if rank not in cause.ranks]
    stage = ("dataloader", "forward", "backward", "optimizer")[int(rng.integers(4))]
    return replace(plan, second=replace(cause, stage=stage, ranks=(int(rng.choice(others)),)))


def simulate(plan: RunPlan, *, without_cause: bool = False) -> SeenSteps:
    """Run the job; the random numbers are the same without the cause."""
    rng = np.random.default_rng([plan.seed, 7])
    work = _work(plan, rng)
    varies = np.random.default_rng([plan.seed, 8])
    for cause in () if without_cause else plan.causes:
        work[cause.stage] += _extra(plan, cause, varies)
    put_off = _put_off(plan, np.random.default_rng([plan.seed, 10]))
    for name in WORK:
        work[name] += put_off[name]
    clock = np.zeros(plan.ranks)
    recorded = SeenSteps(
        np.zeros((plan.steps, plan.ranks)), {name: np.zeros((plan.steps, plan.ranks)) for name in WORK}
    )
    recorded.waits = {name: np.zeros((plan.steps, plan.ranks)) for name in WORK}
    evaluation = np.zeros((plan.steps, plan.ranks))
    if plan.evaluation_every:
        evaluation[:: plan.evaluation_every] = 4 * plan.step_ms * MS * (1 + rng.normal(0, plan.noise, plan.ranks))
        recorded.stages["evaluation"] = evaluation
    recorded.waits |= {CORE_IN[name]: put_off[name].copy() for name in WORK}
    for step in range(plan.steps):
        began = clock.copy()
        clock += evaluation[step]
        for name, duration, waited in _advance(plan, {name: work[name][step] for name in WORK}, clock):
            recorded.stages[name][step] += duration + waited
            recorded.waits[name][step] += waited
        recorded.step[step] = clock - began
    drift = 1 + np.random.default_rng([plan.seed, 9]).normal(0, 3e-5, plan.ranks)
    recorded.step *= drift
    for times in (*recorded.stages.values(), *recorded.waits.values()):
        times *= drift
    return recorded


def write(recorded: SeenSteps, plan: RunPlan, folder: Path) -> None:
    """The recording as ``perfscope run --steps-only`` leaves it, eight ranks to a host."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = plan.ranks // plan.replicas
    for rank in range(plan.ranks):
        offset_ns = 1_700_000_000_000_000_000 + rank * 3_000_000_000
        columns = {name: _whole(times[:, rank]) for name, times in recorded.stages.items() if name != "other"}
        waits = {name: _whole(times[:, rank]) for name, times in recorded.waits.items()}
        step = recorded.step[:, rank].round().astype(int) + len(recorded.stages)  # stages that are rounded up must fit
        attempts = [Block(1 if plan.restart_at else 0, 0, offset_ns, step.tolist(), columns, bytes(plan.steps), waits)]
        if plan.restart_at:  # the attempt before had the first rank slow, which is nobody's delay any more
            ended = step[: plan.restart_at] * (2 if rank == 0 else 1)
            before_ns = offset_ns - int(ended.sum()) * 1000
            attempts.insert(0, Block(0, 0, before_ns, ended.tolist(), {}, bytes(len(ended)), {}))
        steps_file(folder, rank).write_bytes(b"".join(map(pack, attempts)))
        settings = {"pipeline": {"stages": stages, "stage": [rank % stages]}} if plan.strategy == "pipeline" else {}
        names = {"fsdp": ("fsdp",), "pipeline": ("pipeline",)}.get(plan.strategy, ("ddp",))
        run = RunMetadata(
            rank=rank, world_size=plan.ranks, host=f"host{rank // 8}", mode="steps", strategies=names, settings=settings
        )
        save(run, run_file(folder, rank))


def _whole(times: Array) -> list[int]:
    """In whole µs."""
    whole: list[int] = times.round().astype(int).tolist()
    return whole


def _work(plan: RunPlan, rng: np.random.Generator) -> dict[str, Array]:
    """Own time of every stage, µs: steps x ranks."""
    whole = plan.step_ms * MS
    parts = dict(zip(WORK, (0.02, 0.02, 0.3, 0.58, 0.08), strict=True))
    speed = 1 + rng.normal(0, plan.unlike, plan.ranks)
    shape = (plan.steps, plan.ranks)
    work = {name: whole * part * speed * (1 + rng.normal(0, plan.noise, shape)) for name, part in parts.items()}
    together = 1 + rng.normal(0, 0.02, plan.steps)[:, None]  # batches of unlike size, the same on all ranks
    for name in ("forward", "backward"):
        work[name] *= together
    pauses = rng.random(shape) < 2e-4  # the operating system, now and then
    work["other"] += pauses * rng.uniform(0, 0.1, shape) * whole
    if plan.strategy == "pipeline":
        work["other"][:, 0] += 0.01 * whole
    return {name: np.maximum(values, 1.0) for name, values in work.items()}


def _put_off(plan: RunPlan, rng: np.random.Generator) -> dict[str, Array]:
    """What each stage takes longer without a core, µs: most of it in one stage of a step, or in none."""
    shape = (plan.steps, plan.ranks)
    bursts = rng.exponential(plan.put_off * plan.step_ms * MS, shape)
    where = rng.choice(["forward", "backward", "optimizer"], shape)
    return {name: bursts * (where == name) for name in WORK}


def _extra(plan: RunPlan, cause: PlantedDelay, rng: np.random.Generator) -> Array:
    """Own time that a cause adds, µs."""
    extra = np.zeros((plan.steps, plan.ranks))
    amount = cause.share * plan.step_ms * MS * (1 + rng.normal(0, 0.05, (plan.steps, plan.ranks)))
    if cause.pattern == "rotating":
        who = (np.arange(plan.steps) + rng.integers(plan.ranks)) % plan.ranks
        extra[np.arange(plan.steps), who] = 1
    elif cause.pattern == "intermittent":
        extra[np.ix_(np.flatnonzero(rng.random(plan.steps) < cause.every), cause.ranks)] = 1
    else:
        extra[plan.steps // 2 if cause.pattern == "late" else 0 :, list(cause.ranks)] = 1
    return extra * amount


Advanced = Iterator[tuple[str, Array, Array]]
"""Stage, own time of each rank in it, and waiting."""


def _advance(plan: RunPlan, work: dict[str, Array], clock: Array) -> Advanced:
    """One step; moves ``clock``."""
    nothing = np.zeros(plan.ranks)
    for name in ("other", "dataloader"):
        clock += work[name]
        yield name, work[name], nothing
    transfer = plan.transfer * plan.step_ms * MS
    if plan.strategy == "pipeline":
        yield from _pipeline(plan, work, clock, transfer)
    elif plan.strategy == "fsdp":
        for name in ("forward", "backward"):
            yield name, work[name], _gathered(work[name], clock, transfer / 16)
    else:
        clock += work["forward"]
        yield "forward", work["forward"], nothing
        last = work["backward"] / plan.accumulation
        clock += work["backward"] - last
        yield "backward", work["backward"], _reduced(last, clock, transfer)
    clock += work["optimizer"]
    waited = nothing
    if plan.strategy == "zero1":  # every rank sends what it has updated
        waited = clock.max() + transfer / 4 - clock
        clock += waited
    yield "optimizer", work["optimizer"], waited


def _reduced(work: Array, clock: Array, transfer: float, buckets: int = 6) -> Array:
    """A backward with an all-reduce for each bucket, under it but for the last; what each rank waits at the end."""
    reduced = 0.0
    for bucket in range(1, buckets + 1):
        reduced = max(reduced, float((clock + work * bucket / buckets).max())) + transfer
    clock += work
    waited = reduced - clock
    clock += waited
    return waited


def _gathered(work: Array, clock: Array, transfer: float, layers: int = 8) -> Array:
    """Layers whose parameters are gathered one layer ahead; what each rank waits."""
    waited = np.zeros_like(work)
    gathered = float(clock.max()) + transfer
    for _ in range(layers):
        waits = np.maximum(gathered - clock, 0)
        clock += waits
        waited += waits
        gathered = max(gathered, float(clock.max())) + transfer  # the next, asked for before this layer's work
        clock += work / layers
    return waited


def _pipeline(plan: RunPlan, work: dict[str, Array], clock: Array, transfer: float) -> Advanced:
    """1F1B over ``ranks / replicas`` stages, then an all-reduce of each stage's replicas."""
    stages = plan.ranks // plan.replicas
    batches = 2 * stages
    forward, backward = work["forward"] / batches, work["backward"] / batches
    begin = clock.copy()
    for replica in range(plan.replicas):
        mine = slice(replica * stages, (replica + 1) * stages)
        clock[mine] = _one_f_one_b(clock[mine].copy(), forward[mine], backward[mine], batches)
    waited = clock - begin - work["forward"] - work["backward"]
    if plan.replicas > 1:
        for stage in range(stages):
            together = clock[stage::stages].max() + transfer / 4
            waited[stage::stages] += together - clock[stage::stages]
            clock[stage::stages] = together
    nothing = np.zeros(plan.ranks)
    yield "forward", work["forward"], nothing
    yield "backward", work["backward"], nothing
    yield "other", nothing, np.maximum(waited, 0)


def _one_f_one_b(clock: Array, forward: Array, backward: Array, batches: int) -> Array:
    """When each stage is done."""
    stages = len(clock)
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, batches)
        order = [("f", batch) for batch in range(ahead)]
        for batch in range(batches):
            order.append(("b", batch))
            if ahead + batch < batches:
                order.append(("f", ahead + batch))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    place = [0] * stages
    left = sum(map(len, orders))
    while left:
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                kind, batch = orders[stage][place[stage]]
                before = ("f", stage - 1, batch) if kind == "f" else ("b", stage + 1, batch)
                edge = before[1] < 0 or before[1] == stages
                if not edge and before not in done:
                    break
                ready = 0.0 if edge else done[before]
                clock[stage] = max(clock[stage], ready) + (forward if kind == "f" else backward)[stage]
                done[kind, stage, batch] = float(clock[stage])
                place[stage] += 1
                left -= 1
    return clock
