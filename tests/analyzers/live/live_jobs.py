"""Recordings as they grow, written by hand: each step's time and stages are what the test says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfscope.analyzers.live.source import Entry, LocalSource, Piece
from perfscope.recording.history import DISTURBED, STAGES, Block, pack
from perfscope.recording.metadata import DeviceMetadata, LaunchMetadata, RunMetadata, StepsMetadata, save
from perfscope.recording.paths import LAUNCH_FILE, run_file, samples_file, steps_file
from perfscope.recording.samples import SCHEMA

S = 1_000_000_000
NOW = 1_800_000_000 * S
"""When these jobs begin."""

MS = {"dataloader": 2.0, "forward": 10.0, "backward": 20.0, "optimizer": 3.0}
"""Stages of a usual step of 40 ms: 5 ms are other time."""


def block(
    first: int,
    count: int,
    *,
    step_ms: float = 40.0,
    began_ns: int = NOW,
    attempt: int = 0,
    disturbed: bool = False,
    stages: dict[str, float] | None = None,
    waits: dict[str, float] | None = None,
) -> bytes:
    """Equal steps of a rank; ``stages`` in ms, and ``waits``, None where waiting is not measured."""
    each = MS if stages is None else stages
    return pack(
        Block(
            attempt,
            first,
            began_ns,
            [round(step_ms * 1000)] * count,
            {name: [round(each[name] * 1000)] * count for name in STAGES if name in each},
            bytes([DISTURBED if disturbed else 0] * count),
            waits_us=None if waits is None else {name: [round(ms * 1000)] * count for name, ms in waits.items()},
        )
    )


@dataclass
class Recorded:
    """A recording's folder."""

    folder: Path
    world: int = 2
    run: dict[str, Any] = field(default_factory=dict)
    """What every rank says of itself, besides the usual."""

    def launch(
        self, exit_code: int | None = None, started_at: str = "2027-01-15T08:00:00+00:00", *, ended: bool = False
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        launch = LaunchMetadata(
            command=("torchrun", "train.py"), started_at=started_at, exit_code=exit_code, ended=ended
        )
        save(launch, self.folder / LAUNCH_FILE)

    def ranks(self, **more: Any) -> None:
        for rank in range(self.world):
            self.rank(rank, **more)

    def rank(self, rank: int, **more: Any) -> None:
        values: dict[str, Any] = {
            "rank": rank,
            "world_size": self.world,
            "host": "node0",
            "pid": 100 + rank,
            "backend": "nccl",
            "strategies": ("ddp",),
            "batch_shape": (8, 128),
            "steps": StepsMetadata(batches_per_step=1.0),
            "device": DeviceMetadata(type="cuda", index=rank, uuid=f"uuid-{rank}"),
        }
        save(RunMetadata(**{**values, **self.run, **more}), run_file(self.folder, rank))

    def steps(self, rank: int, first: int, count: int, **how: Any) -> int:
        """Append a block; its bytes."""
        data = block(first, count, **how)
        with steps_file(self.folder, rank).open("ab") as file:
            file.write(data)
        return len(data)

    def all_step(self, first: int, count: int, slow: dict[int, dict[str, float]] | None = None, **how: Any) -> None:
        """All ranks make steps; ranks in ``slow`` have stages of their own."""
        how = {"began_ns": NOW + first * 40_000_000, **how}
        for rank in range(self.world):
            stages = {**MS, **(slow or {}).get(rank, {})}
            self.steps(rank, first, count, stages=stages, **how)

    def header(self, host: str = "node0", devices: int = 0) -> None:
        self.lines(
            {
                "schema": SCHEMA,
                "host": host,
                "cores": 8,
                "memory_bytes": 64 << 30,
                "devices": [
                    {"index": index, "name": "H100", "uuid": f"GPU-uuid-{index}", "memory_bytes": 80 << 30}
                    for index in range(devices)
                ],
                "host_columns": ["user_ms", "idle_ms", "memory_used_bytes"],
                "device_columns": ["utilisation", "memory_used_bytes", "power_mw"],
                "process_columns": ["cpu_ms"],
            },
            *({"process": 100 + rank, "rank": rank, "kind": "rank"} for rank in range(self.world)),
            host=host,
        )

    def sample(self, second: float, pids: Iterable[int], *, busy: float = 0.5, gpus: Iterable[float] = ()) -> None:
        """A sample in which ``busy`` of the 8 cores were so since the beginning, and each process used one core."""
        ms = second * 1000
        self.lines(
            [
                NOW + round(second * S),
                [round(8 * busy * ms), round(8 * (1 - busy) * ms), 16 << 30],
                [[each, 40 << 30, 300_000] for each in gpus],
                [[pid, round(ms)] for pid in pids],
            ]
        )

    def lines(self, *values: object, host: str = "node0") -> None:
        with samples_file(self.folder, host).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)


class CountedSource(LocalSource):
    """Counts what is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read_bytes = 0
        self.reads = 0

    def read(self, piece: Piece) -> bytes:
        data = super().read(piece)
        self.read_bytes += len(data)
        self.reads += 1
        return data


class MemorySource:
    """Files that are nowhere but here."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def entries(self) -> dict[str, Entry]:
        return {name: Entry(len(data), "") for name, data in self.files.items()}

    def read(self, piece: Piece) -> bytes:
        return self.files[piece.name][piece.start : piece.end]
