"""The benchmarks run, on inputs far too small to tell anything; what they find is in docs/benchmarks.md."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.readers import chrome
from perfscope.trace import Category
from tests.benchmarks import floor, generate, growth, measure


def test_a_generated_set_reads_whole_and_is_what_it_claims(tmp_path: Path) -> None:
    written = generate.write_set(tmp_path, 2, 500_000, packed=True, python=True)

    unpacked = [gzip.decompress(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert written == sum(map(len, unpacked)) > 1_000_000
    trace = chrome.read(tmp_path / "rank1.json.gz")
    assert (trace.rank, trace.world_size, trace.losses.dropped_events, trace.losses.notes) == (1, 2, 0, ())
    for category in (Category.CPU_OP, Category.KERNEL, Category.RUNTIME, Category.PYTHON):
        assert len(trace.rows(category)) > 100
    assert len(trace.collectives.row) > 4
    assert trace.has_shapes
    assert analyze(tmp_path).job.ranks == (0, 1)


def test_cost_of_a_command_and_its_children() -> None:
    burn = "import time; data = bytearray(80 << 20); data[::4096] = b'x' * 20480; end = time.process_time() + 0.3\n"
    burn += "while time.process_time() < end: pass"
    cost = measure.run(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"]
    )

    assert cost.cpu_s >= 0.3
    assert cost.wall_s >= 0.3
    assert cost.peak_bytes > 80 << 20
    with pytest.raises(RuntimeError, match="ended with 3"):
        measure.run([sys.executable, "-c", "raise SystemExit(3)"])


def test_contenders_take_turns() -> None:
    turns: list[str] = []

    def contender(name: str, seconds: float) -> measure.Cost:
        turns.append(name)
        return measure.Cost(seconds * len(turns), 1.0, 7)

    costs = measure.interleaved({"a": lambda: contender("a", 1), "b": lambda: contender("b", 2)}, 3)
    assert turns == ["a", "b"] * 3
    assert measure.median(costs["a"]) == measure.Cost(3, 1.0, 7)


def test_growth_has_a_row_for_each_size_and_number_of_ranks(tmp_path: Path) -> None:
    rows = [*growth.by_size(tmp_path, [0.3], 1), *growth.by_ranks(tmp_path, [2], 0.3, 1)]

    assert [len(row.split("|")) for row in rows] == [6, 7]


def test_floor_compares_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("simdjson")
    path = tmp_path / "trace.json.gz"
    written = generate.write_rank(path, 0, 1, 300_000)

    assert floor.unpacked_size(path) == written
    assert floor.compare(path, 1).startswith("| trace.json.gz | 1 | ")
