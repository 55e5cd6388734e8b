"""Changes of the network: bandwidth and latency, by the cost model t(S) = alpha + S / B of each group and kind."""

from __future__ import annotations

from perfscope.analyzers.whatif.change import CannotReplay, Context, Setting, Uncertainty, factor
from perfscope.analyzers.whatif.script import Meeting, Part, Script

_LATENCY_LIKE_NS = 50_000.0
"""Latency assumed of a collective whose group moved one size only: what a small all-reduce takes on one host."""


def transfer_of(context: Context, part: Part, size: int) -> float:
    """Transfer of ``part``'s collective (ns) were it ``size`` bytes: by the fitted model; else from its own time, with
    an assumed latency. Raises CannotReplay where its bytes are not known.
    """
    meeting = part.meeting
    if not meeting.bytes:
        raise CannotReplay("the collectives' sizes are not recorded; record with shapes")
    model = context.model_of(meeting.group, meeting.kind)
    if model is not None:
        return model.alpha_ns + model.slope * size
    latency = min(_LATENCY_LIKE_NS, part.transfer_ns / 2)
    return latency + (part.transfer_ns - latency) * size / meeting.bytes


def _bandwidth(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Every byte moves ``value`` times as fast; start-up costs stay."""
    speed = factor(name, value)
    return _scale(script, context, name, of_latency=1.0, of_bytes=1 / speed)


def _latency(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    """Start-up costs are ``value`` times what they were; bytes move as before."""
    return _scale(script, context, name, of_latency=factor(name, value), of_bytes=1.0)


def _scale(script: Script, context: Context, name: str, of_latency: float, of_bytes: float) -> Uncertainty:
    found = False
    assumed = False
    for meeting, parts in script.meetings().items():
        if meeting.size < 2:
            continue
        found = True
        alpha, known = _alpha_ns(context, meeting)
        assumed |= not known
        for part in parts:
            latency = min(part.transfer_ns, alpha)
            part.transfer_ns = latency * of_latency + (part.transfer_ns - latency) * of_bytes
    if not found:
        raise CannotReplay(f"{name}: the recording holds no collective between ranks")
    return Uncertainty(less=0.30, more=0.30) if assumed else Uncertainty(less=0.10, more=0.10)


def _alpha_ns(context: Context, meeting: Meeting) -> tuple[float, bool]:
    """Latency part of a transfer, ns, and whether it was fitted."""
    model = context.model_of(meeting.group, meeting.kind)
    return (model.alpha_ns, True) if model is not None else (_LATENCY_LIKE_NS, False)


SETTINGS = (
    Setting("network.bandwidth", "FACTORx", "every link that many times as fast", _bandwidth, 2),
    Setting("network.latency", "FACTORx", "start-up cost of collectives times this", _latency, 2),
)
