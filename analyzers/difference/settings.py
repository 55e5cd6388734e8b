"""What about two runs differs: settings, versions, devices, the job itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from perfscope.comparison import SettingChange
from perfscope.summary import Summary

_NAMES_OF_GROUPS: Final = {"group", "replicate_group"}
"""Settings that only number process groups."""

_ALWAYS: Final = ("threads", "precision", "optimizer")
"""Groups that a recording has or was made without by an earlier version: absent is not "not set"."""


FOLLOWS: Final = {
    "ddp.bucket_bytes",
    "ddp.bucket_cap_bytes",
    "ddp.num_buckets_reduced",
    "ddp.total_parameter_size_bytes",
    "ddp.unused_parameter_size",
}
"""Recorded with the settings, but brought about by them and by the model."""


def setting_changes(before: Summary, after: Summary) -> tuple[SettingChange, ...]:
    """Everything that differs, what is set by the user first."""
    changes = []
    for about, described in (
        ("setting", _settings_of(before, after)),
        ("version", _versions),
        ("device", _devices),
        ("job", _job),
    ):
        first, second = described(before), described(after)
        for name in {**first, **second}:
            old, new = first.get(name), second.get(name)
            if old != new:
                kind = "job" if name in FOLLOWS else about
                changes.append(SettingChange(about=kind, name=name, before=old, after=new))
    changes += _command(before.job.command, after.job.command)
    return tuple(changes)


def _settings_of(*both: Summary) -> Callable[[Summary], dict[str, str]]:
    """Settings without the groups that every recording of today has, where one of the two was made without."""
    unknown = {group for group in _ALWAYS for summary in both if group not in summary.job.settings}

    def told(summary: Summary) -> dict[str, str]:
        return {name: value for name, value in settings(summary).items() if name.partition(".")[0] not in unknown}

    return told


def settings(summary: Summary) -> dict[str, str]:
    """Settings by dotted name; the data loader's workers as ``perfscope whatif`` calls them."""
    found = dict(_flat(summary.job.settings))
    workers = sorted({row.num_workers for row in summary.dataloader if row.num_workers is not None})
    if workers:
        found["dataloader.num_workers"] = ", ".join(str(number) for number in workers)
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and name not in _NAMES_OF_GROUPS:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield f"{prefix}{name}", text


def _versions(summary: Summary) -> dict[str, str]:
    return dict(summary.job.versions)


def _devices(summary: Summary) -> dict[str, str]:
    job = summary.job
    return {"devices": ", ".join(job.devices), "hosts": ", ".join(job.hosts)}


def _job(summary: Summary) -> dict[str, str]:
    job = summary.job
    told: dict[str, Any] = {
        "ranks": job.world_size,
        "strategy": job.strategy if isinstance(job.strategy, str) else " + ".join(job.strategy),
        "backend": job.backend,
        "batch of a rank": " × ".join(str(length) for length in job.batch_shape or ()),
    }
    told.update({f"model {name}": value for name, value in (job.model or {}).items()})
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in told.items() if value}


def _command(before: tuple[str, ...], after: tuple[str, ...]) -> Iterator[SettingChange]:
    """The commands' options that differ; the values of one option are compared with each other."""
    first, second = _options(before), _options(after)
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            yield SettingChange(about="command", name=name, before=first.get(name), after=second.get(name))


def _options(command: tuple[str, ...]) -> dict[str, str]:
    """``--batch 4 train.py`` as {"--batch": "4", "train.py": "given"}."""
    found: dict[str, str] = {}
    words = list(command)
    for place, word in enumerate(words):
        follows = words[place + 1] if place + 1 < len(words) else ""
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else follows if follows and not follows.startswith("-") else "given"
        elif place == 0 or not words[place - 1].startswith("-") or "=" in words[place - 1]:
            found[word] = "given"
    return found
