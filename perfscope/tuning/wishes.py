"""Values that the user wants tried (``--try``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perfscope.collectors.overrides_ddp import ARGUMENTS
from perfscope.collectors.overrides_loader import NAMES
from perfscope.tuning.candidates import Candidate, Value
from perfscope.tuning.evidence import Evidence

KNOWN: Final = {"dataloader": NAMES, "ddp": (*ARGUMENTS, "no_sync", "comm_dtype")}
"""What can be set of each; DeepSpeed's JSON and the environment hold what they hold."""


def parse(text: str) -> tuple[str, tuple[Value, ...]]:
    """``ddp.bucket_cap_mb=10,50`` as a name and its values. Raises ValueError, saying how to write it."""
    name, equals, values = text.partition("=")
    kind, dot, key = name.strip().partition(".")
    if not equals or not dot or not key or not values.strip() or kind not in ("dataloader", "ddp", "deepspeed", "env"):
        raise ValueError(
            f"{text!r}: write NAME=VALUE or NAME=VALUE,VALUE with a name that begins with dataloader., ddp., "
            "deepspeed. or env., such as ddp.bucket_cap_mb=10,50 or env.NCCL_ALGO=Ring,Tree"
        )
    known = KNOWN.get(kind)
    if known is not None and key not in known:
        raise ValueError(f"{text!r}: of {kind}. there are {', '.join(known)}")
    found = tuple(_value(value.strip(), kind) for value in values.split(","))
    if key == "comm_dtype" and kind == "ddp" and found != ("bf16",):
        raise ValueError(f"{text!r}: gradients can be sent as bf16 only; write ddp.comm_dtype=bf16")
    return name.strip(), found


def _value(text: str, kind: str) -> Value:
    if kind == "env":
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def asked_for(evidence: Evidence, settings: Mapping[str, tuple[Value, ...]]) -> list[Candidate]:
    """The user's own, in the order in which they were given."""
    return [
        Candidate(
            name=name,
            new=value,
            old=_old(evidence, name),
            why="asked for",
            predicted=evidence.predict({name: value}),
            found=True,
            numerics=name == "ddp.comm_dtype",
        )
        for name, values in settings.items()
        for value in values
    ]


def _old(evidence: Evidence, name: str) -> Value:
    """The value that a run has of a setting that the user names; None where it is not known."""
    kind, _, key = name.partition(".")
    if kind == "env":
        return evidence.run.environment.get(key)
    if kind == "dataloader":
        return getattr(evidence.loader, key, None)
    if kind == "ddp":
        return evidence.setting("ddp").get(key)
    place: object = evidence.setting("deepspeed")
    for part in key.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place if isinstance(place, (bool, int, float, str)) else None
