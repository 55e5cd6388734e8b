"""A ring of isend and irecv over gloo, in which one rank pauses: it is named, with what the job loses by it.

A simulator of its own: in each hop every rank sends to the next one and receives from the one before, and waits for its
send, then for its recv. A message begins when both of its ends are posted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.analyzers.measured import measured

RANKS, HOPS, STEPS = 3, 2, 8
SENDS = 800.0
"""µs of a message."""


def ring(folder: Path, pause: float, works: float, slow: int = 1, held: float = 0.0) -> float:
    """Write a trace for each rank; returns µs per step. ``slow`` pauses before the first hop of each step; each hop and
    the end of each step have work of ``works``. In one hop the machine holds all ranks up for ``held`` in ``isend``.
    """
    events: list[list[dict[str, Any]]] = [[] for _ in range(RANKS)]

    def event(rank: int, category: str, name: str, start: float, end: float) -> None:
        events[rank].append(
            {"ph": "X", "cat": category, "name": name, "pid": rank + 1, "tid": rank + 1, "ts": start,
             "dur": end - start, "args": {}}
        )  # fmt: skip

    now = [0.0] * RANKS
    for step in range(STEPS):
        began = [*now]
        for hop in range(HOPS):
            posted = []
            for rank in range(RANKS):
                at = now[rank] + (pause if rank == slow and hop == 0 else 0.0)
                called = []
                for kind, peer in (("send", (rank + 1) % RANKS), ("recv", (rank - 1) % RANKS)):
                    takes = 60 + (held if kind == "send" and (step, hop) == (STEPS // 2, 1) else 0.0)
                    event(rank, "cpu_op", "c10d::recv_" if kind == "recv" else "c10d::send", at, at + takes)
                    described = f"perfscope::collective#{kind}|0|{RANKS}|{step * HOPS + hop}|{peer}|float32|512"
                    event(rank, "user_annotation", described, at + 20, at + takes - 10)
                    called.append((at, at + takes))
                    at += takes + 20
                event(rank, "cpu_op", "aten::mm", at, at + works)
                posted.append((*called, at + works))  # send, recv, waits
            sent = [max(posted[rank][0][0], posted[(rank + 1) % RANKS][1][0]) + SENDS for rank in range(RANKS)]
            for rank, (send, recv, waits) in enumerate(posted):
                first = max(waits, sent[rank])
                second = max(first, sent[(rank - 1) % RANKS]) + 20
                event(rank, "user_annotation", "gloo:send", send[1] - 20, first)
                event(rank, "user_annotation", "gloo:recv", recv[1] - 20, second)
                now[rank] = second
        for rank in range(RANKS):
            event(rank, "cpu_op", "aten::add_", now[rank] + 10, now[rank] + works)
            now[rank] += works + 10
            event(rank, "user_annotation", f"ProfilerStep#{step}", began[rank], now[rank])
            now[rank] += 1
    folder.mkdir(parents=True, exist_ok=True)
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": RANKS, "ranks": [*range(RANKS)]}
    for rank, own in enumerate(events):
        about = {"backend": "gloo", "rank": rank, "world_size": RANKS, "pg_config": [group]}
        trace = {"record_shapes": 1, "distributedInfo": about, "traceEvents": own}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return max(now) / STEPS


@pytest.mark.parametrize(("pause", "works"), [(5_000.0, 300.0), (10_000.0, 300.0), (25_000.0, 3_000.0)])
def test_a_rank_that_pauses_in_a_ring_is_named_with_what_is_lost_by_it(
    pause: float, works: float, tmp_path: Path
) -> None:
    healthy = ring(tmp_path / "healthy", 0.0, works)
    lost = ring(tmp_path / "slow", pause, works) - healthy
    (row,) = measured(tmp_path / "slow").stragglers
    assert (row.rank, row.cause) == (1, "host")
    assert row.lost_us == pytest.approx(lost, rel=0.1)
    assert measured(tmp_path / "healthy").stragglers == ()


def test_a_send_that_takes_long_to_issue_does_not_wait_for_its_own_end(tmp_path: Path) -> None:
    """Its end needs the recv that every rank issues after it: if it were waited for, all would wait forever."""
    healthy = ring(tmp_path / "healthy", 0.0, 300.0, held=12_000.0)
    lost = ring(tmp_path / "slow", 5_000.0, 300.0, held=12_000.0) - healthy
    (row,) = measured(tmp_path / "slow").stragglers
    assert (row.rank, row.cause) == (1, "host")
    assert row.lost_us == pytest.approx(lost, rel=0.1)
