"""Generated jobs as recordings of ``perfscope run``: traces, and what each rank wrote beside its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfscope.recording.metadata import RunMetadata, save
from perfscope.recording.paths import run_file, trace_file
from tests.generator import cpu_job, simulate


def record_on_cpus(folder: Path, **run: Any) -> None:
    """Write the recording of two ranks on CPUs; ``run`` are fields of each rank's metadata."""
    simulate(cpu_job(ranks=2, steps=5)).write(folder / "traces")
    for rank, trace in enumerate(sorted((folder / "traces").iterdir())):
        trace.rename(trace_file(folder, rank, 0, compressed=trace.suffix == ".gz"))
        save(RunMetadata(rank=rank, world_size=2, **run), run_file(folder, rank))
