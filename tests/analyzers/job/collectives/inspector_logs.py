"""Logs of NCCL Inspector made by hand: what each rank's kernel took, in the form of ``inspector.cc`` (v4.0)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def line(
    rank: int, sequence: int, us: float, *, operation: str = "AllReduce", size: int = 1 << 20, ranks: int = 2,
    communicator: str = "0x7f8c496ae9f661", process: int | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """One operation of one rank."""
    header = {"id": communicator, "rank": rank, "n_ranks": ranks, "nnodes": 1, **more.pop("header", {})}
    prefix = "p2p" if operation in ("Send", "Recv") else "coll"
    return {
        "header": header,
        "metadata": {
            "inspector_output_format_version": "v4.0", "git_rev": "", "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1748030377748202 + sequence, "hostname": "node-a",
            "pid": 100 + (rank if process is None else process),
        },
        f"{prefix}_perf": {
            prefix: operation, f"{prefix}_sn": sequence, f"{prefix}_msg_size_bytes": size,
            f"{prefix}_exec_time_us": us, f"{prefix}_timing_source": "kernel_gpu", **more,
        },
    }  # fmt: skip


def write(folder: Path, by_process: Mapping[int, Sequence[dict[str, Any]]]) -> None:
    """A file for each process, named as the plugin names it."""
    folder.mkdir(parents=True, exist_ok=True)
    for process, records in by_process.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"node-a-pid{100 + process}.log").write_text(text)
