"""What ``perfscope run`` asks of the collectors, handed over in a file beside the bootstrap."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONFIG_FILE: Final = "config.json"

FAILURES_FILE: Final = "failures.txt"
"""In the bootstrap folder: why the collector did not start, a line a process."""


@dataclass(frozen=True)
class RankSelection:
    """Which ranks to record: inclusive ranges, or every rank when there are none."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> RankSelection:
        """Read ``all`` or a list such as ``0,3-7``. Raises ValueError naming what is wrong."""
        if text.strip() == "all":
            return cls()
        ranges = []
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise ValueError(f"{part.strip()!r} is not a rank or a range of ranks; write for example 0,3-7 or all")
            low, high = int(first), int(last) if dash else int(first)
            if high < low:
                raise ValueError(f"{part.strip()!r} ends before it begins; write {high}-{low}")
            ranges.append((low, high))
        return cls(tuple(ranges))

    def __contains__(self, rank: int) -> bool:
        return not self.ranges or any(low <= rank <= high for low, high in self.ranges)


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """Options of one recording."""

    output: str
    """The recording's folder, absolute."""
    package_root: str
    """The folder that contains the ``perfscope`` package, for processes whose ``sys.path`` does not lead to it."""
    ranks: str = "all"
    """As :meth:`RankSelection.parse` reads it."""
    wait: int = 5
    """Steps to let pass before a capture; at least 1, because nothing starts before the first optimizer step."""
    warmup: int = 3
    """Steps during which the profiler runs and that are not kept; the last one is in the trace all the same."""
    active: int = 8
    """Steps recorded per capture."""
    repeat: int = 1
    """Captures; each waits and warms up anew."""
    shapes: bool = True
    stacks: bool = False
    memory: bool = False
    nvtx: bool = True
    count_flops: bool = False
    """Count floating-point operations of one warm-up step; needs ``warmup`` of at least 1."""

    def __post_init__(self) -> None:
        RankSelection.parse(self.ranks)
        for name, least in (("wait", 1), ("warmup", 0), ("active", 1), ("repeat", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.count_flops and self.warmup < 1:
            raise ValueError("count_flops counts during a warm-up step: set warmup to at least 1")

    @property
    def cycle(self) -> int:
        """Steps from the beginning of one capture's wait to its last recorded step."""
        return self.wait + self.warmup + self.active

    @property
    def folder(self) -> Path:
        """The recording's folder."""
        return Path(self.output)

    def save(self, folder: Path) -> None:
        """Write the options into the bootstrap folder. Raises OSError."""
        (folder / CONFIG_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> CollectorConfig:
        """Read the options from the bootstrap folder. Raises OSError or ValueError."""
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        known = {entry.name for entry in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
