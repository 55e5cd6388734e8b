"""The first advice on a random job, taken: against what it promises, and against the best single change.

What a change brings is simulated: the job with a setting of ``perfscope whatif`` changed, or without a cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from perfscope.results.findings import Finding, Prediction, Severity
from perfscope.results.summary import Summary
from tests.analyzers.whatif.fsdp_variants import keeps_parameters
from tests.benchmarks.whatif_questions import Trained, network_changed
from tests.generator import (
    MIB,
    Cause,
    HostSync,
    JobSpec,
    Pause,
    RotatingPause,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
    simulate,
)
from tests.generator.truth import Truth

PROMISED = 0.05
"""Share of the step by which a gain may be other than predicted."""
BEST = 0.10
"""How much longer a step may be with the first advice than with the best single change."""
ABOUT: dict[str, type[Cause]] = {
    "launch-bound": SlowHost,
    "dataloader-workers": SlowLoader,
    "host-pauses": Pause,
    "host-syncs": HostSync,
    "ddp-bucket-size": SmallBuckets,
}
"""Rules that name what may hit all ranks, by the cause that is gone once their advice is taken, where that is no
setting."""


@dataclass(frozen=True)
class Advice:
    """The first advice. ``wrong`` is (category, words) where it is."""

    wrong: tuple[str, str] | None = None


def judge_advice(
    spec: JobSpec, missing: tuple[int, ...], summary: Summary, step_us: Callable[[Truth], float]
) -> Advice | None:
    """The first advice on a recorded job, of which ranks may be ``missing``; None where nothing is advised and nothing
    is to be gained, or where the simulator cannot do what is advised. ``step_us``: the mean of the steps that the
    analysis uses. While ranks are missing nobody can tell how late these are once the others are not, so it is enough
    that the predicted range holds what the advice brings.
    """
    known: dict[str, float] = {}

    def takes_us(trained: Trained) -> float:
        name = str(trained)
        if name not in known:
            with trained.patched():
                known[name] = step_us(simulate(trained.spec).truth) / trained.batches
        return known[name]

    before_us = takes_us(Trained(spec))
    # Nobody can be told what would help ranks that left no trace.
    seen = without_unseen(spec, missing)
    unseen_us = before_us - takes_us(Trained(seen))
    tried = {name: unseen_us + takes_us(trained) for name, trained in changes(seen)}
    best = min(tried, key=lambda name: tried[name], default="nothing")
    best_us = tried.get(best, before_us)
    finding = first_advice(summary)
    after_us, words = before_us, f"nothing is advised: {summary.verdict.headline}"
    if finding is not None:
        trained = taken(spec, finding, summary)
        if trained is None:
            return None
        after_us = takes_us(trained)
        words = f"{finding.rule} {finding.whatif}"
        predicted = finding.predicted_step_us
        gain = math.nan if predicted is None else 1 - predicted.mid / summary.job.step_time_us
        words += f" promises {gain:.1%}, brings {1 - after_us / before_us:.1%}"
        off = abs(gain - (1 - after_us / before_us)) > PROMISED
        if off and not (missing and predicted is not None and _holds(predicted, after_us, summary, before_us)):
            return Advice((f"advice off: {finding.rule}", words))
    if after_us > (1 + BEST) * best_us:
        return Advice(("not the best advice", f"{words}; {best} brings {1 - best_us / before_us:.1%}"))
    return Advice() if finding is not None or best_us < (1 - BEST) * before_us else None


def _holds(predicted: Prediction, after_us: float, summary: Summary, before_us: float) -> bool:
    """Is the share of the step that is left within what was predicted?"""
    left = after_us / before_us * summary.job.step_time_us
    return predicted.low <= left <= predicted.high


def first_advice(summary: Summary) -> Finding | None:
    """What a page lists first; where nothing is wrong, what may still be done."""
    serious = [finding for finding in summary.findings if finding.severity in (Severity.HIGH, Severity.MEDIUM)]
    return next(iter(serious or [finding for finding in summary.findings if finding.whatif]), None)


def taken(spec: JobSpec, finding: Finding, summary: Summary) -> Trained | None:
    """The job as a finding advises; None where the simulator has no such change."""
    if finding.whatif:
        return changed(spec, finding.whatif)
    if finding.rule == "straggling-rank":
        ranks = set(finding.evidence[0].ranks)
        row = next(row for row in summary.stragglers if {row.rank, *row.ranks} == ranks)
        if row.scope == "host":  # it is mended as a whole, with ranks that are not in the recording
            ranks.update(spec.ranks_of_host(spec.host_of(row.rank)))
        if row.cause == "communication":
            return Trained(spec.without(*(cause for cause in spec.causes if isinstance(cause, SlowLink))))
        return Trained(at_peers_pace(spec, ranks))
    about = ABOUT.get(finding.rule)
    causes = [cause for cause in spec.causes if about is not None and isinstance(cause, about)]
    return Trained(spec.without(*causes)) if causes else None


def changed(spec: JobSpec, settings: Mapping[str, str]) -> Trained | None:
    """The job with settings of ``perfscope whatif``; None where the simulator does not have one of them."""
    made = Trained(spec)
    for name, value in settings.items():
        if name.startswith("rank."):
            made = replace(made, spec=at_peers_pace(made.spec, {int(name.removeprefix("rank."))}))
        elif spec.strategy == "fsdp" and (name, value) in _KEEPS_PARAMETERS:
            made = replace(made, under=keeps_parameters)
        elif name in _SETTINGS:
            made = replace(made, spec=_SETTINGS[name](made.spec, value))
        else:
            return None
    return made


_KEEPS_PARAMETERS = (("fsdp.reshard_after_forward", "false"), ("zero.stage", "2"))


def _without(spec: JobSpec, kind: type[Cause]) -> JobSpec:
    return spec.without(*(cause for cause in spec.causes if isinstance(cause, kind)))


def _launches_at_once(spec: JobSpec, _: str) -> JobSpec:
    return replace(spec, host=replace(spec.host, operator_ns=0, launch_ns=0, event_ns=0))


def _in_buckets(spec: JobSpec, value: str) -> JobSpec:
    # Where it is set, it is the first bucket's limit, too.
    size = round(float(value) * MIB)
    return replace(_without(spec, SmallBuckets), bucket_bytes=size, first_bucket_bytes=size)


_SETTINGS: dict[str, Callable[[JobSpec, str], JobSpec]] = {
    "host.launch": _launches_at_once,
    "host.sync": lambda spec, _: replace(_without(spec, HostSync), end_sync=False),
    "host.pauses": lambda spec, _: _without(spec, Pause),
    "dataloader.num_workers": lambda spec, value: replace(spec, loader=replace(spec.loader, workers=int(value))),
    "ddp.bucket_cap_mb": _in_buckets,
    "network.bandwidth": lambda spec, value: network_changed(spec, bandwidth=float(value.removesuffix("x"))),
    "network.latency": lambda spec, value: network_changed(spec, latency=float(value.removesuffix("x"))),
    "pipeline.microbatches": lambda spec, value: spec.in_microbatches(int(value)),
    "zero.stage": lambda spec, value: replace(spec, strategy=f"zero{value}"),
}


def at_peers_pace(spec: JobSpec, ranks: set[int]) -> JobSpec:
    """The job in which nothing but what hits all ranks hits these."""
    return replace(spec, causes=tuple(spared for cause in spec.causes for spared in _spared(spec, cause, ranks)))


def _spared(spec: JobSpec, cause: Cause, ranks: set[int]) -> Iterator[Cause]:
    if isinstance(cause, RotatingPause):
        simulated = range(spec.first_step - spec.warmup, spec.first_step + spec.steps)
        for rank in set(range(spec.ranks)) - ranks:
            steps = tuple(step for step in simulated if cause.pauses(rank, step, spec.ranks))
            yield Pause(ranks=(rank,), steps=steps, pause_ns=cause.pause_ns)
        return
    left = None if cause.ranks is None else tuple(rank for rank in cause.ranks if rank not in ranks)
    if left != ():
        yield replace(cause, ranks=left)


def without_unseen(spec: JobSpec, missing: tuple[int, ...]) -> JobSpec:
    """The job without causes that hit ``missing`` ranks alone."""
    unseen = (cause for cause in spec.causes if cause.ranks is not None and set(cause.ranks) <= set(missing))
    return spec.without(*unseen)


def changes(spec: JobSpec) -> Iterator[tuple[str, Trained]]:
    """Single changes that a user could make: without a cause, or with a setting changed. Not without a slow link, which
    nothing shows where all use it.
    """
    for cause in spec.causes:
        if cause.category and not isinstance(cause, SlowLink) and cause.steps != (spec.first_step,):
            yield str(cause), Trained(spec.without(cause))
    for settings in _advisable(spec):
        trained = changed(spec, settings)
        if trained is not None:
            yield str(settings), trained


def _advisable(spec: JobSpec) -> Iterator[dict[str, str]]:
    if spec.end_sync or any(isinstance(cause, HostSync) for cause in spec.causes):
        yield {"host.sync": "0"}
    yield from ({"dataloader.num_workers": str(count)} for count in (2, 8) if count != spec.loader.workers)
    if spec.strategy == "ddp":
        yield from ({"ddp.bucket_cap_mb": str(size)} for size in (5, 25, 100))
    if spec.strategy == "fsdp":
        yield {"fsdp.reshard_after_forward": "false"}
    if spec.strategy == "zero3":
        yield {"zero.stage": "2"}
    if spec.pipeline > 1 and spec.schedule.chunks == 1:
        yield {"pipeline.microbatches": str(2 * spec.microbatches)}
