"""DDP ``bucket_cap_mb``: fires when all-reduces are exposed because buckets are small and many, or one is big and late.

With t(S) = alpha + S·slope for one all-reduce of S bytes (fitted from this recording), n buckets over G bytes of
gradients cost n·alpha + G·slope in all. Many small buckets pay alpha over and over; a big last bucket starts only when
the backward is over, so all of it is exposed. Defaults: 25 MiB, the first 1 MiB (torch ``nn/parallel/distributed.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, sqrt
from typing import Final

from perfscope.analyzers.rules.communication.ddp_arguments import written
from perfscope.analyzers.rules.communication.small_buckets import bounded
from perfscope.analyzers.rules.communication.traffic import CollectiveTraffic, traffic
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.whatif.bucketing import DEFAULT_CAP, MIB, bucket_cap
from perfscope.analyzers.whatif.curves import bucket_sizes
from perfscope.frozen import dataclass
from perfscope.results.findings import Action, Evidence, Finding, Predict, Prediction

RULE: Final = "ddp-bucket-size"
SHARE: Final = 0.05
"""Least share of the step that is exposed transfer, and that the change must recover."""
LATENCY_BOUND: Final = 0.5
"""Buckets are too small when alpha is at least this share of the all-reduce time; of less the replay decides."""
LATE_SHARE: Final = 1 / 3
"""A bucket is big when it holds at least this share of the gradient bytes."""
NEARLY: Final = 1.05
"""How many times as long as the shortest step one may be that is surely no longer than now."""
_AS_LONG: Final = 1.001
"""How many times as long as now a step is that is as long: ranges end where nothing is saved, but for rounding."""
_FAR_OVER: Final = 2
"""From so many times DDP's limit for a bucket on, a lone one would be several."""
_TOO_SMALL: Final = "DDP's gradient buckets are too small"
_TOO_BIG: Final = "DDP's last gradient bucket is too big to overlap the backward"


@dataclass(frozen=True)
class _BucketSize:
    """A ``bucket_cap_mb``, what it saves per step, and what is wrong with the present one."""

    cap_mib: int
    saved_us: float
    problem: str


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no DDP, too little exposed, or nothing to gain by another size."""
    return _modelled(job) or bounded(job, RULE)


def _modelled(job: RuleContext) -> Finding | None:
    """By the cost model and by replays."""
    # Gradients travel in the group that moves the most.
    buckets = traffic(job, "all_reduce") if job.torch_ddp else None
    if buckets is None:
        return None
    rows = job.summary.time_breakdown
    exposed_us = min(sum(row.exposed_comm_transfer_us for row in rows) / len(rows), buckets.transfer_us)
    if exposed_us < SHARE * job.step_time_us:
        return None
    size = None if buckets.alpha_us is None else _by_model(buckets, buckets.alpha_us, exposed_us)
    if job.predict is not None:
        open_to_replay = size is not None or _latency_us(buckets) >= SHARE * job.step_time_us
        size = (_best(job, buckets, size, job.predict) if open_to_replay else None) or _sure(job, buckets, job.predict)
    if size is None or size.saved_us < SHARE * job.step_time_us:
        return None
    old = bucket_cap(job.runs)
    if old is not None and (size.cap_mib <= old if size.problem == _TOO_SMALL else size.cap_mib >= old):
        return None  # as many for another reason: several models, several backwards, several types
    return job.finding(
        RULE,
        f"{size.problem}: {job.share(exposed_us):.0%} of the step is exposed all-reduce",
        size.saved_us,
        evidence=(
            Evidence("exposed all-reduce per step (mean), at most", exposed_us, "us", job.ranks),
            Evidence("all-reduces per step", buckets.count, ranks=job.ranks),
            Evidence("gradient bytes per step", buckets.bytes, "bytes", job.ranks),
            Evidence("largest bucket", buckets.largest, "bytes", job.ranks),
            *known("latency of one all-reduce, fitted", buckets.alpha_us, "us", job.ranks),
        ),
        action=Action(
            setting="DistributedDataParallel(bucket_cap_mb=…)",
            old=None if old is None else f"{old:g}",
            new=str(size.cap_mib),
            how=written(job.framework, bucket_cap_mb=size.cap_mib),
        ),
        confidence=job.confidence(),
        whatif={"ddp.bucket_cap_mb": str(size.cap_mib)},
    )


def _by_model(buckets: CollectiveTraffic, alpha_us: float, exposed_us: float) -> _BucketSize | None:
    """The size that the cost model gives; None where the present one is no worse."""
    return _larger(buckets, alpha_us, exposed_us) or _smaller(buckets, alpha_us, exposed_us)


def _larger(buckets: CollectiveTraffic, alpha_us: float, exposed_us: float) -> _BucketSize | None:
    """A larger size, where the latency of the all-reduces is half of their time."""
    latency_us = buckets.count * alpha_us
    if latency_us < LATENCY_BOUND * (latency_us + buckets.bytes * buckets.us_per_byte) or buckets.count <= 2:
        return None
    # Four times the size at which starting and moving cost the same: alpha is then a fifth of the time.
    size = 4 * alpha_us / buckets.us_per_byte if buckets.us_per_byte > 0 else buckets.bytes
    cap = max(ceil(min(size, buckets.bytes / 2) / MIB), 1)
    count = max(ceil(buckets.bytes / (cap * MIB)), 1)
    saved = min((buckets.count - count) * alpha_us, exposed_us)
    return _BucketSize(cap, saved, _TOO_SMALL)


def _smaller(buckets: CollectiveTraffic, alpha_us: float, exposed_us: float) -> _BucketSize | None:
    """A smaller size, where one bucket holds so many gradients that it starts late and stays exposed."""
    if buckets.largest < LATE_SHARE * buckets.bytes or buckets.us_per_byte == 0:
        return None
    # The tail costs alpha + S·slope, more buckets cost alpha each: least in sum at S = sqrt(alpha·G / slope).
    size = sqrt(alpha_us * buckets.bytes / buckets.us_per_byte)
    cap = max(round(size / MIB), 1)
    if cap * MIB >= buckets.largest / 2:
        return None
    tail = alpha_us + cap * MIB * buckets.us_per_byte
    added = (buckets.bytes / (cap * MIB) - buckets.count) * alpha_us
    now = alpha_us + buckets.largest * buckets.us_per_byte
    saved = min(now, exposed_us) - tail - max(added, 0.0)
    return _BucketSize(cap, saved, _TOO_BIG)


def _latency_us(buckets: CollectiveTraffic) -> float:
    """What fewer buckets could save: that all but two of them have to start; 0 where that is not known."""
    return max(buckets.count - 2, 0) * (buckets.alpha_us or 0.0)


def _best(
    job: RuleContext, buckets: CollectiveTraffic, size: _BucketSize | None, predict: Predict
) -> _BucketSize | None:
    """The size with the shortest replayed step, from 1 MiB up to all gradients in one bucket; where that may also make
    the step longer, as where parameters' sizes are not known, one that does not, if that is nearly as short.

    On many ranks only the size that the cost model gives. ``size`` as it is where sizes cannot be replayed.
    """
    of_model = set() if size is None else {size.cap_mib}
    replayed = _replayed(sorted(of_model.union(bucket_sizes(job.summary, job.runs))), predict)
    if not replayed:
        return size
    safe = (each for each in replayed if each[0].high < job.step_time_us and each[0].mid <= NEARLY * replayed[0][0].mid)
    step, cap = next(safe, replayed[0])
    problem = _problem(buckets, cap) if size is None else size.problem
    return _BucketSize(cap, job.step_time_us - step.mid, problem)


def _problem(buckets: CollectiveTraffic, cap_mib: int) -> str:
    """What is wrong with the present buckets where this size is better."""
    return _TOO_SMALL if cap_mib * MIB > buckets.bytes / buckets.count else _TOO_BIG


def _sure(job: RuleContext, buckets: CollectiveTraffic, predict: Predict) -> _BucketSize | None:
    """The best size where the cost model, which a busy host blurs, names none, but even the longest step that the
    replay allows for is no longer; or where all gradients are in one bucket: none of it can overlap, whatever it takes.
    """
    replayed, alone = _replayed(bucket_sizes(job.summary, job.runs), predict), _is_alone(buckets)
    if not replayed or (replayed[0][0].high > _AS_LONG * job.step_time_us and not alone):
        return None
    step, cap = replayed[0]
    if alone:
        # What an all-reduce takes at least is assumed: of sizes that are nearly as good the largest needs that least.
        nearly = [
            each for each in replayed if each[0].mid <= NEARLY * step.mid and 2 * each[1] * MIB <= buckets.largest
        ]
        step, cap = max(nearly, key=lambda each: each[1], default=replayed[0])
    return _BucketSize(cap, job.step_time_us - step.mid, _problem(buckets, cap))


def _is_alone(buckets: CollectiveTraffic) -> bool:
    """Are all gradients in one bucket that is far over what DDP makes by itself?"""
    return buckets.count <= 1 and buckets.largest >= _FAR_OVER * DEFAULT_CAP * MIB


def _replayed(caps: Iterable[int], predict: Predict) -> list[tuple[Prediction, int]]:
    """(step with it, size in MiB), the shortest step first."""
    steps = [(step, cap) for cap in caps if (step := predict({"ddp.bucket_cap_mb": str(cap)})) is not None]
    return sorted(steps, key=lambda each: (each[0].mid, each[1]))
