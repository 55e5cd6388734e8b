"""The options of ``perfscope run``, handed to the collectors in a file beside the bootstrap."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONFIG_FILE: Final = "config.json"

SHORTEST_PERIOD_S: Final = 0.05
"""Of the system sampler: a sample takes milliseconds, which are the training's."""

HANG_TIMEOUT_S: Final = 300.0
"""Seconds without a step from which a rank stands still, in always-on modes: half of NCCL's own timeout."""

SHORTEST_HANG_S: Final = 1.0

MODES: Final = ("captures", "trigger", "steps", "nvtx", "nsys")
"""What is recorded: captures as planned; captures when a step is slow or somebody asks; none unless somebody asks; only
ranges for a profiler of the user's own; the same for Nsight Systems, which ``perfscope run`` starts itself."""

ENOUGH: Final = 16
"""Steps from which slow ones are found: there is a median to compare with."""

ALWAYS_ON: Final = ("trigger", "steps")
"""Modes that time the phases of every step of the run."""

INSPECTOR: Final = "inspector"
EXECUTION_TRACE: Final = "execution-trace"
BESIDE: Final = (INSPECTOR, EXECUTION_TRACE)
"""What records beside this project's profiler: NCCL Inspector, which NCCL itself loads; PyTorch's execution traces."""

FOR_ANOTHER: Final = ("nvtx", "nsys")
"""Modes in which another profiler records, and this project's is never started."""

SIGNALS: Final = ("USR1", "USR2", "none")
"""Signals that may ask for a capture."""

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
    """Steps during which the profiler runs before the recorded ones; the last one is in the trace all the same."""
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
    sample_every: float = 0.5
    """Seconds between two looks of the system sampler; 0: no sampler."""
    mode: str = "captures"
    """One of :data:`MODES`."""
    trigger: float = 1.5
    """In mode ``trigger``: times the running median from which a step is slow."""
    cooldown: int = 100
    """In mode ``trigger``: steps to let pass after a capture before a slow step may start another."""
    max_captures: int = 5
    """In mode ``trigger``: captures that slow steps may start, in all."""
    budget: float = 5.0
    """In mode ``trigger``: per cent of the run's time that captures may take before slow steps start no more."""
    signal: str = "USR2"
    """One of :data:`SIGNALS`: what asks a rank for a capture where slow steps or nothing else would start one."""
    hang_timeout: float = 0.0
    """Seconds without a step after which a rank writes what it does; 0: never."""
    announce: bool = False
    """Say on standard error when recording starts and stops."""
    inspector: bool = False
    """Let NCCL load its Inspector, and log into the recording's folder."""
    execution_trace: bool = False
    """Record PyTorch's execution trace of the recorded steps, too."""
    stop_after: int = 0
    """Steps after which the training is ended (``perfscope tune``); 0: never."""

    def __post_init__(self) -> None:
        RankSelection.parse(self.ranks)
        for name, least in (("wait", 1), ("warmup", 0), ("active", 1), ("repeat", 1), ("stop_after", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, not {getattr(self, name)}")
        self._check_times()
        for name, choices in (("mode", MODES), ("signal", SIGNALS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if not self.trigger > 1:
            raise ValueError(f"--trigger must be above 1 (1.5: a step of 1.5 times the median), not {self.trigger}")
        if self.cooldown < 0 or self.max_captures < 0:
            raise ValueError("--cooldown and --max-captures must be 0 or more")
        if not 0 < self.budget <= 100:
            raise ValueError(f"--budget must be above 0 and at most 100 (per cent of the time), not {self.budget}")
        if self.count_flops and self.warmup < 1:
            raise ValueError("--count-flops counts during a warm-up step: set --warmup to at least 1")

    def _check_times(self) -> None:
        if self.sample_every and not self.sample_every >= SHORTEST_PERIOD_S:
            raise ValueError(f"--sample-every must be at least {SHORTEST_PERIOD_S} (seconds), not {self.sample_every}")
        if not (self.hang_timeout == 0 or self.hang_timeout >= SHORTEST_HANG_S):
            raise ValueError(f"--hang-timeout must be 0 (off) or at least {SHORTEST_HANG_S}, not {self.hang_timeout}")

    @property
    def cycle(self) -> int:
        """Steps from the beginning of one capture's wait to its last recorded step."""
        return self.wait + self.warmup + self.active

    @property
    def first_rank(self) -> int:
        """The first of the ranks to record, which speaks for all."""
        return min((low for low, _ in RankSelection.parse(self.ranks).ranges), default=0)

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
