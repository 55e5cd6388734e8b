"""Many small all-reduces whose latency cannot be fitted, because they have one size, or none that is recorded: a bound.

Example: 160 all-reduces of 2 KiB that take 60 µs each move 0.03 GB/s. No link of a device is so slow, so they are
nearly all latency, and one bucket of 320 KiB takes little longer than one of them. Of 1 MiB in 60 µs, or of sizes that
are not recorded, it may be less: the finding says what larger buckets save at most. So it does of 1 MiB in 400 µs,
which a slow network takes to start, or a slow link for the bytes: the recording does not show which.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from perfscope.analyzers.replay.latency import SLOW_START_NS, TINY
from perfscope.analyzers.rules.communication.ddp_arguments import written
from perfscope.analyzers.rules.communication.gradients_by_hand import FLAT, OVERLAPPED
from perfscope.analyzers.rules.communication.reductions import GradientReductions, reductions
from perfscope.analyzers.rules.context import RuleContext, known
from perfscope.analyzers.whatif.bucketing import DEFAULT_CAP, FIRST_BUCKET, MIB, bucket_cap
from perfscope.analyzers.whatif.by_hand import MANY
from perfscope.results.findings import Action, Confidence, Evidence, Finding

SHARE: Final = 0.05
"""Least share of the step that fewer all-reduces save."""
LATENCY_US: Final = 100.0
"""What an all-reduce between devices takes to start, at most: over NVLink 20 µs, over a network up to this."""
LATENCY_BOUND: Final = 0.5
"""Share of their time that this must be, or they may be bandwidth."""
SHORT_US: Final = 70.0
"""Mean transfer up to which all-reduces of sizes that are not recorded are no buckets of DDP's default size: two H100
take as long for its 25 MiB."""

_LINK: Final = (
    "That is a bound: they have one size, so the recording does not show whether they take long to start, or the link "
    "is slow for their bytes, and little is gained. all_reduce_perf of nccl-tests shows which (8 bytes, 64 MiB)."
)


def bounded(job: RuleContext, rule: str) -> Finding | None:
    """The finding of ``rule``, or None: another wrapper reduces gradients, their latency is known, or is not all."""
    # Without the other ranks a wait for them looks like a transfer.
    reduced = reductions(job) if job.on_devices and not job.info.missing_ranks else None
    if reduced is None or not _may_be_ddp(job) or not _are_small(reduced) or reduced.alpha_us is not None:
        return None
    cap = _cap(reduced)
    old, change = bucket_cap(job.runs), {"ddp.bucket_cap_mb": str(cap)}
    fewer = 2.0 if reduced.bytes is None else max(ceil(reduced.bytes / (cap * MIB)), 1)
    saved_us = min((reduced.count - fewer) * _latency_us(reduced), job.exposed_transfer_us)
    replayed = job.predict(change) if job.predict is not None else None
    if saved_us < SHARE * job.step_time_us or replayed is not None or (old is not None and cap <= old):
        return None
    be = "may be" if _may_be_link(reduced) else "is"
    return job.finding(
        rule,
        f"Gradients are reduced in {reduced.count:.0f} all-reduces per step, so small that each {be} mostly latency: "
        f"{job.share(job.exposed_of_us(reduced.count * reduced.transfer_us)):.0%} of the step is exposed transfer",
        saved_us,
        evidence=(
            job.exposed_transfer(),
            Evidence("all-reduces per step", reduced.count, ranks=reduced.ranks),
            Evidence("transfer time of one (mean)", reduced.transfer_us, "us", reduced.ranks),
            *known("largest of them", reduced.largest, "bytes", reduced.ranks),
        ),
        action=Action(
            setting="DistributedDataParallel(bucket_cap_mb=…)" if job.torch_ddp else "bytes of a gradient all-reduce",
            old=None if old is None else f"{old:g}",
            new=str(cap) if job.torch_ddp else f"{cap} MiB",
            how="\n".join((_how(job, cap), *([_LINK] if _may_be_link(reduced) else []))),
        ),
        confidence=Confidence.LOW,
    )  # fmt: skip


def _may_be_ddp(job: RuleContext) -> bool:
    """Is DDP at work, or may it be: of all-reduces that nothing overlaps a loop is likelier."""
    return job.torch_ddp or (job.reduced_by_unknown and job.hidden_share > OVERLAPPED)


def _are_small(reduced: GradientReductions) -> bool:
    """Are they many, and can latency be half of their time? Of unknown sizes only the time tells."""
    if reduced.count <= MANY:
        return False
    if reduced.largest is None:
        return reduced.transfer_us <= SHORT_US
    return reduced.largest <= FIRST_BUCKET and (_is_tiny(reduced) or reduced.transfer_us <= SLOW_START_NS / 1e3)


def _is_tiny(reduced: GradientReductions) -> bool:
    return reduced.largest is not None and reduced.largest <= TINY


def _may_be_link(reduced: GradientReductions) -> bool:
    """Do they take so long that a slow link may be why, as well as a network that takes long to start?"""
    return not _is_tiny(reduced) and LATENCY_BOUND * reduced.transfer_us > LATENCY_US


def _latency_us(reduced: GradientReductions) -> float:
    """Latency of one, at most: all of its time where that is of a few bytes, or longer than is usual for a start."""
    whole = _is_tiny(reduced) or _may_be_link(reduced)
    return reduced.transfer_us if whole else min(reduced.transfer_us, LATENCY_US)


def _cap(reduced: GradientReductions) -> int:
    """MiB of a bucket: torch's default, or half of all gradients, so that one overlaps the backward."""
    if reduced.bytes is None:
        return round(DEFAULT_CAP)
    return max(ceil(min(DEFAULT_CAP, reduced.bytes / 2 / MIB)), 1)


def _how(job: RuleContext, cap: int) -> str:
    typed = written(job.framework, bucket_cap_mb=cap)
    if job.torch_ddp:
        return typed
    return (
        f"Reduce gradients in buckets of {cap} MiB: with a larger bucket_cap_mb of DistributedDataParallel, or several "
        f"gradients in one all-reduce.\nWith DistributedDataParallel:\n{typed}\nIn a loop of your own:\n{FLAT}"
    )
