"""Changes of the network: bandwidth and latency, by the cost model t(S) = alpha + S / B of each group and kind."""

from __future__ import annotations

from perfscope.analyzers.whatif.change import CannotReplay, Context, Setting, Uncertainty, factor
from perfscope.analyzers.whatif.host_pace import keep_host_pace
from perfscope.analyzers.whatif.script import Meeting, Part, Script


def transfer_of(context: Context, part: Part, size: int) -> float:
    """Transfer of ``part``'s collective (ns) were it ``size`` bytes: by the fitted model; else from its own time and
    what is known or assumed of its latency. Raises CannotReplay where its bytes are not known.
    """
    meeting = part.meeting
    if not meeting.bytes:
        raise CannotReplay("the collectives' sizes are not recorded; record with shapes")
    model = context.model_of(meeting.group, meeting.kind)
    if model is not None:
        return model.alpha_ns + model.slope * size
    latency = context.latency_ns(meeting.group, meeting.kind, part.transfer_ns)
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
    for meeting, parts in script.meetings().items():
        if meeting.size < 2:
            continue
        found = True
        for part in parts:
            latency = _latency_ns(context, meeting, part.transfer_ns)
            part.transfer_ns = latency * of_latency + (part.transfer_ns - latency) * of_bytes
    if not found:
        raise CannotReplay(f"{name}: the recording holds no collective between ranks")
    keep_host_pace(script, context)
    return Uncertainty(less=0.10, more=0.10)


def _latency_ns(context: Context, meeting: Meeting, transfer_ns: float) -> float:
    """Latency part of a transfer, ns."""
    model = context.model_of(meeting.group, meeting.kind)
    if model is not None:
        return min(transfer_ns, model.alpha_ns)
    if meeting.kind == "barrier":
        return transfer_ns
    return context.latency_ns(meeting.group, meeting.kind, transfer_ns)


SETTINGS = (
    Setting("network.bandwidth", "FACTORx", "every link that many times as fast", _bandwidth, 2),
    Setting("network.latency", "FACTORx", "start-up cost of collectives times this", _latency, 2),
)
