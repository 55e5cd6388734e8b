"""A running job as one line of text an interval, or as one object of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import datetime, timezone
from typing import Any, Final

from perfscope._version import __version__
from perfscope.analyzers.live.state import RUNNING, LiveState
from perfscope.redact import redact_texts
from perfscope.reports.live.words import OTHERS_UNKNOWN, safe, stage_word
from perfscope.text import duration, percent, ranks_in_words, significant

SCHEMA: Final = "perfscope.live/1"


def plain(state: LiveState) -> str:
    """One line: when, in which state, what steps take, who is late, what the machines do."""
    moment = datetime.fromtimestamp(state.time_ns / 1e9, tz=timezone.utc).astimezone().strftime("%H:%M:%S")
    if state.state != RUNNING or state.last_step < 0:
        parts = [safe(state.reason)]
    else:
        parts = [state.reason] if state.reason != RUNNING else []
    if state.problem:
        parts.append(safe(state.problem))
    if state.last_step >= 0:
        parts.append(f"step {state.last_step:,}")
        parts.append(f"{duration(state.step_us)} ({duration(state.run_step_us)} over the run)")
        if state.samples_per_s is not None:
            parts.append(f"{significant(state.samples_per_s)} samples/s")
    total = sum(state.stages_us.values())
    if total > 0 and state.times_stages:
        parts.append(", ".join(f"{stage_word(name)} {percent(us / total)}" for name, us in state.stages_us.items()))
    for row in state.stragglers[:1]:
        where = f"{stage_word(row.stage)}{'' if state.times_stages else f' ({OTHERS_UNKNOWN})'}"
        parts.append(f"{ranks_in_words(row.ranks)} {duration(row.delay_us)} later in {where}")
    parts += _load(state)
    return f"{moment}  " + " | ".join(parts)


def as_json(state: LiveState) -> str:
    """One line of JSON: every field of the state, without secrets; what is not a number is null."""
    values = {"schema": SCHEMA, "perfscope_version": __version__, **dataclasses.asdict(state)}
    return json.dumps(redact_texts(_finite(values)), separators=(",", ":"))


def _load(state: LiveState) -> list[str]:
    shares = [host.cpu_share for host in state.hosts if host.cpu_share is not None]
    devices = [each.utilisation for host in state.hosts for each in host.devices if each.utilisation is not None]
    parts = [f"CPU {percent(sum(shares) / len(shares))}"] if shares else []
    return parts + ([f"GPU {percent(sum(devices) / len(devices))}"] if devices else [])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
