"""Has DeepSpeed read its configuration with other values in it, wherever it comes from."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfscope.collectors.overrides.log import Log
from perfscope.collectors.patches import Patches


def override_deepspeed(values: Mapping[str, Any], patches: Patches, log: Log) -> None:
    """Every ``DeepSpeedConfig`` made from now on has ``values``, by their path in the JSON, in place of its own."""
    from deepspeed.runtime.config import DeepSpeedConfig  # type: ignore[import-not-found,unused-ignore]

    original = DeepSpeedConfig.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for that method
        try:
            changed, old = with_values(_content(config), values)
            original(self, changed, *args, **kwargs)
        except Exception as error:
            for name in values:
                log.refused(f"deepspeed.{name}", f"{type(error).__name__}: {error}")
        else:
            for name, value in values.items():
                log.replaced(f"deepspeed.{name}", old[name], value)
            return
        original(self, config, *args, **kwargs)

    patches.set(DeepSpeedConfig, "__init__", __init__)


def with_values(content: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration with ``values`` at their paths (``zero_optimization.overlap_comm``), and what was there.

    Raises ValueError where a path leads through something that is no object.
    """
    changed = copy.deepcopy(dict(content))
    old = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        place: Any = changed
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{path}: {parent} is no object in the DeepSpeed configuration")  # noqa: TRY004
        old[path] = place.get(name)
        place[name] = value
    return changed, old


def _content(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    content = json.loads(Path(config).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content
