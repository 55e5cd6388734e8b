"""Groups of collectives that no trace states: hand-made kernels of a mesh of 2 x 2, tensor beside data parallel."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.analyzers.measured import measured

TENSOR, DATA = ((0, 1), (2, 3)), ((0, 2), (1, 3))
STEPS, LAYERS = 6, 8
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Mesh:
    """Each layer computes for about 500 µs and reduces in its row for 60, on stream 20; each step reduces in its column
    for 400, on stream 24. ``slow``: times as long computes rank 3. ``rows``: ranks that share a row.
    """

    slow: float = 1.0
    rows: tuple[tuple[int, ...], ...] = TENSOR
    columns: tuple[tuple[int, ...], ...] = DATA
    noise: float = 0.02
    """Share by which a layer may take longer or shorter."""
    clock_us: float = 700.0
    """Clocks of ranks 2 and 3 are so far ahead."""


def simulate(mesh: Mesh) -> tuple[float, dict[int, list[dict[str, Any]]]]:
    """(mean step in µs, each rank's events)."""
    draw = random.Random(7)
    now = dict.fromkeys(range(4), 0.0)
    events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in now}

    def add(rank: int, name: str, tid: int, start: float, end: float) -> None:
        cat = "kernel" if tid > 1 else "user_annotation"
        ts = start + mesh.clock_us * (rank > 1)
        events[rank].append({"ph": "X", "cat": cat, "name": name, "pid": tid, "tid": tid, "ts": ts, "dur": end - start})

    def reduce(groups: tuple[tuple[int, ...], ...], stream: int, length: float) -> None:
        for group in groups:
            end = max(now[rank] for rank in group) + length * draw.uniform(0.9, 1.1)
            for rank in group:
                add(rank, REDUCE, stream, now[rank] + 2, end)
                now[rank] = end + draw.uniform(0, 1)

    for step in range(STEPS):
        begun = dict(now)
        for _ in range(LAYERS):
            for rank in now:
                length = 500 * draw.uniform(1 - mesh.noise, 1 + mesh.noise) * (mesh.slow if rank == 3 else 1.0)
                add(rank, "ampere_bf16_gemm", 7, now[rank] + 2, now[rank] + 2 + length)
                now[rank] += 2 + length
            reduce(mesh.rows, 20, 60)
        reduce(mesh.columns, 24, 400)
        for rank in now:
            add(rank, f"ProfilerStep#{step + 40}", 1, begun[rank], now[rank])
    return max(now.values()) / STEPS, events


def write(mesh: Mesh, folder: Path, **stated: object) -> None:
    for rank, events in simulate(mesh)[1].items():
        info = {"distributedInfo": {"backend": "nccl", "rank": rank, **stated}} if stated else {}
        (folder / f"rank{rank}.json").write_text(json.dumps({**info, "traceEvents": events}))


@pytest.mark.parametrize("stated", [{}, {"world_size": 4}])
def test_rows_and_columns_of_a_mesh_are_told_apart(stated: dict[str, int], tmp_path: Path) -> None:
    write(Mesh(), tmp_path, **stated)
    summary = measured(tmp_path)
    assert {group.ranks: group.role for group in summary.groups} == {
        **dict.fromkeys(TENSOR, "tensor"), **dict.fromkeys(DATA, "data")
    }  # fmt: skip
    assert [note.values["groups"] for note in summary.notes if note.kind == "groups_assumed"] == [4]
    assert not summary.stragglers


def test_a_straggler_in_a_mesh_is_named_with_its_cost(tmp_path: Path) -> None:
    write(Mesh(slow=1.5), tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.ranks, row.cause) == ((3,), "compute")
    assert row.lost_us == pytest.approx(simulate(Mesh(slow=1.5))[0] - simulate(Mesh())[0], rel=0.03)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (((0, 1, 2, 3),), ((0, 1, 2, 3),)),
    ],
)
def test_what_shows_no_mesh_is_of_all_ranks(
    rows: tuple[tuple[int, ...], ...], columns: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    write(Mesh(rows=rows, columns=columns), tmp_path)
    assert {group.ranks for group in measured(tmp_path).groups} == {(0, 1, 2, 3)}


def test_rows_beside_groups_of_all_ranks_are_told_by_what_they_miss(tmp_path: Path) -> None:
    """A row has often ended before the other one began."""
    write(Mesh(columns=((0, 1, 2, 3),), noise=0.2), tmp_path)
    assert {group.ranks for group in measured(tmp_path).groups} == {*TENSOR, (0, 1, 2, 3)}


def test_groups_that_are_stated_are_left(tmp_path: Path) -> None:
    config = [{"pg_name": "0", "ranks": [0, 1, 2, 3], "pg_desc": "default_pg"}]
    write(Mesh(), tmp_path, world_size=4, pg_config=config)
    assert {group.ranks for group in measured(tmp_path).groups} == {(0, 1, 2, 3)}
