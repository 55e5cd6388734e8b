"""What the launch and the ranks say of themselves in their metadata, read anew where it has changed."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from perfscope.analyzers.live.source import Entry
from perfscope.analyzers.samples import samples_per_batch
from perfscope.frozen import dataclass
from perfscope.recording.metadata import LaunchMetadata, RunMetadata, load_launch, load_run
from perfscope.recording.paths import LAUNCH_FILE

BUDGET_S: Final = 0.5
"""Time that one look may take to read metadata: those of thousands of ranks take several looks."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What is shown of one rank's metadata."""

    host: str
    pid: int
    world_size: int
    attempt: int
    outcome: str
    strategies: tuple[str, ...]
    backend: str
    device_uuid: str
    device_index: int | None
    stage: str
    """Of its pipeline; empty without one."""
    samples: float | None
    """Per step; None where not known."""


class Facts:
    """The metadata of a recording."""

    def __init__(self) -> None:
        self.launch: LaunchMetadata | None = None
        self.ranks: dict[int, RankFacts] = {}
        self._versions: dict[str, Entry] = {}

    def read(self, folder: Path, entries: dict[str, Entry], runs: dict[str, int], budget_s: float) -> None:
        """Read what has changed: the launch first, then ``runs`` (name -> rank) until the time is up."""
        until = time.monotonic() + budget_s
        self._read_launch(folder / LAUNCH_FILE, entries.get(LAUNCH_FILE))
        for name, rank in runs.items():
            entry = entries[name]
            if self._versions.get(name) == entry:
                continue
            if time.monotonic() > until:
                break
            self._versions[name] = entry
            with suppress(ValueError, OSError):  # it is written anew at the end
                self.ranks[rank] = _facts(load_run(folder / name))

    def strategies(self) -> set[str]:
        """Of all ranks."""
        return {strategy for facts in self.ranks.values() for strategy in facts.strategies}

    def _read_launch(self, path: Path, entry: Entry | None) -> None:
        if entry is None:
            self.launch = None
        elif self._versions.get(LAUNCH_FILE) != entry:
            self._versions[LAUNCH_FILE] = entry
            with suppress(ValueError, OSError):
                self.launch = load_launch(path)


def _facts(run: RunMetadata) -> RankFacts:
    return RankFacts(
        host=run.host,
        pid=run.pid,
        world_size=run.world_size,
        attempt=run.attempt,
        outcome=run.outcome,
        strategies=run.strategies,
        backend=run.backend,
        device_uuid=run.device.uuid.removeprefix("GPU-"),
        device_index=run.device.index if run.device.type == "cuda" else None,
        stage=_stage(run),
        samples=_samples(run),
    )


def _stage(run: RunMetadata) -> str:
    pipeline = run.settings.get("pipeline")
    return str(pipeline.get("stage")) if isinstance(pipeline, dict) else ""


def _samples(run: RunMetadata) -> float | None:
    """Samples of this rank's step: its batch times the batches that it takes."""
    length = samples_per_batch(run)
    accumulated = run.settings.get("gradient_accumulation", {}).get("backwards_per_step")
    batches = accumulated or run.steps.batches_per_step
    if batches is None and run.steps.backwards_per_step == 1:
        batches = 1
    return None if batches is None or length is None else length * batches
