"""DDP ``bucket_cap_mb``: fires when exposed all-reduce time comes from too many small buckets, or from a late big one.

With t(S) = alpha + S·slope for one all-reduce of S bytes (fitted from this recording), n buckets over G bytes of
gradients cost n·alpha + G·slope in all. Many small buckets pay alpha over and over; a big last bucket starts only when
the backward is over, so all of it is exposed. Defaults: 25 MiB, the first 1 MiB (torch ``nn/parallel/distributed.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.ddp_arguments import written
from perfscope.analyzers.whatif.curves import bucket_cap, bucket_sizes
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary import CollectiveRow, CostRow

RULE: Final = "ddp-bucket-size"
SHARE: Final = 0.05
"""Share of the step of exposed transfer from which the rule looks at buckets, and the least it must recover."""
LATENCY_BOUND: Final = 0.5
"""Share of the all-reduce time that is alpha from which buckets count as too small."""
LATE_SHARE: Final = 1 / 3
"""Share of all gradient bytes in the largest bucket from which it counts as a late big one."""
MIB: Final = 1 << 20


@dataclass(frozen=True)
class _Buckets:
    """The all-reduces of one step of the gradient group."""

    count: float
    bytes: float
    largest: int
    alpha_us: float
    us_per_byte: float
    exposed_us: float
    """Exposed transfer, mean over ranks."""
    group: str

    @property
    def time_us(self) -> float:
        return self.count * self.alpha_us + self.bytes * self.us_per_byte


@dataclass(frozen=True)
class _Change:
    cap_mib: int
    saved_us: float
    why: str


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no DDP, too little exposed, no cost model, or nothing to gain by another size."""
    if not facts.torch_ddp or facts.steps == 0:
        return None
    buckets = _buckets(facts)
    if buckets is None or buckets.exposed_us < SHARE * facts.step_time_us:
        return None
    change = _larger(buckets) or _smaller(buckets)
    if change is not None and facts.predict is not None:
        change = _best(facts, change)
    if change is None or change.saved_us < SHARE * facts.step_time_us:
        return None
    old = bucket_cap(facts)
    return Finding(
        rule=RULE,
        title=f"{change.why}: {buckets.exposed_us / facts.step_time_us:.0%} of the step is exposed all-reduce",
        severity=Severity.of_share(change.saved_us / facts.step_time_us),
        evidence=(
            Evidence(
                what="exposed all-reduce transfer per step", value=buckets.exposed_us, unit="us", ranks=facts.ranks
            ),
            Evidence(what="all-reduces per step", value=buckets.count, unit="", ranks=facts.ranks),
            Evidence(what="gradient bytes per step", value=buckets.bytes, unit="bytes", ranks=facts.ranks),
            Evidence(what="largest bucket", value=buckets.largest, unit="bytes", ranks=facts.ranks),
            Evidence(
                what="fitted cost of starting one all-reduce", value=buckets.alpha_us, unit="us", ranks=facts.ranks
            ),
        ),
        action=Action(
            setting="DistributedDataParallel(bucket_cap_mb=…)",
            old=None if old is None else f"{old:g}",
            new=str(change.cap_mib),
            how=written(facts, bucket_cap_mb=change.cap_mib),
        ),
        confidence=Confidence.LOW if facts.few_steps or facts.missing_ranks else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, change.saved_us),
        whatif={"ddp.bucket_cap_mb": str(change.cap_mib)},
    )


def _buckets(facts: JobFacts) -> _Buckets | None:
    rows = [row for row in facts.collectives if row.kind == "all_reduce" and row.bytes]
    if not rows:
        return None
    # Gradients travel in the group that moves the most; scalars reduced for logging are not buckets.
    group = max({row.group for row in rows}, key=lambda name: _moved(rows, name))
    rows = [row for row in rows if row.group == group and (row.bytes or 0) >= 4096]
    cost = next((row for row in facts.cost_model if row.group == group and row.kind == "all_reduce"), None)
    if not rows or cost is None:
        return None
    return _Buckets(
        count=sum(row.count for row in rows) / facts.steps,
        bytes=_moved(rows, group) / facts.steps,
        largest=max(row.bytes or 0 for row in rows),
        alpha_us=cost.alpha_us,
        us_per_byte=_us_per_byte(rows, cost),
        exposed_us=sum(row.exposed_comm_transfer_us for row in facts.accounting) / len(facts.accounting),
        group=group,
    )


def _moved(rows: list[CollectiveRow], group: str) -> float:
    return float(sum((row.bytes or 0) * row.count for row in rows if row.group == group))


def _us_per_byte(rows: list[CollectiveRow], cost: CostRow) -> float:
    """Slope of the cost model, from the measured totals less what alpha explains."""
    total_us = sum(row.transfer_us * row.count for row in rows)
    count = sum(row.count for row in rows)
    moved = sum((row.bytes or 0) * row.count for row in rows)
    return max(total_us - count * cost.alpha_us, 0.0) / moved


def _larger(buckets: _Buckets) -> _Change | None:
    """Buckets so small that starting them costs more than moving them."""
    if buckets.count * buckets.alpha_us < LATENCY_BOUND * buckets.time_us or buckets.count <= 2:
        return None
    # Four times the size at which starting and moving cost the same: alpha is then a fifth of the time.
    size = 4 * buckets.alpha_us / buckets.us_per_byte if buckets.us_per_byte > 0 else buckets.bytes
    cap = max(ceil(min(size, buckets.bytes / 2) / MIB), 1)
    count = max(ceil(buckets.bytes / (cap * MIB)), 1)
    saved = min((buckets.count - count) * buckets.alpha_us, buckets.exposed_us)
    return _Change(cap, saved, "DDP's gradient buckets are too small")


def _smaller(buckets: _Buckets) -> _Change | None:
    """One bucket holds so much of the gradients that it starts late and cannot hide."""
    if buckets.largest < LATE_SHARE * buckets.bytes or buckets.us_per_byte == 0:
        return None
    # The tail costs alpha + S·slope, more buckets cost alpha each: least in sum at S = sqrt(alpha·G / slope).
    size = sqrt(buckets.alpha_us * buckets.bytes / buckets.us_per_byte)
    cap = max(round(size / MIB), 1)
    if cap * MIB >= buckets.largest / 2:
        return None
    tail = buckets.alpha_us + cap * MIB * buckets.us_per_byte
    added = (buckets.bytes / (cap * MIB) - buckets.count) * buckets.alpha_us
    now = buckets.alpha_us + buckets.largest * buckets.us_per_byte
    saved = min(now, buckets.exposed_us) - tail - max(added, 0.0)
    return _Change(cap, saved, "DDP's last gradient bucket is too big to hide behind the backward")


def _best(facts: JobFacts, change: _Change) -> _Change:
    """The size that replays best, from 1 MiB up to all gradients in one bucket, with what that saves.

    On many ranks only the size that the cost model gives. ``change`` as it is where sizes cannot be replayed.
    """
    assert facts.predict is not None
    found = []
    for size in sorted({change.cap_mib, *bucket_sizes(facts)}):
        prediction = facts.predict({"ddp.bucket_cap_mb": str(size)})
        if prediction is not None:
            found.append((prediction.mid / 1e3, size))
    if not found:
        return change
    step_us, cap = min(found)
    return _Change(cap, facts.step_time_us - step_us, change.why)
