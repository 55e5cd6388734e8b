"""What an event costs in memory, so that traces of many millions can be read."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

from perfscope.analyzers import readers
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.trace.columns import TYPES, GrowingColumns, by_start_longer_first, put_in_order
from tests.benchmarks import generate

READING, ANALYZING = 105, 110
"""Bytes for each event at the peak; 91 and 95 where this was written, 121 and 133 before."""


def test_bytes_for_each_event_while_it_is_read_and_analyzed(tmp_path: Path) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    for path, size in ((small, 3_000_000), (large, 40_000_000)):
        generate.write_rank(path, 0, 8, size)
    analyze_rank(readers.read(small))  # what is made once is there
    tracemalloc.start()
    try:
        trace = readers.read(large)
        held, read = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        analyze_rank(trace)
        analyzed = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    assert len(trace) > 50_000
    assert read / len(trace) < READING
    assert analyzed / len(trace) < ANALYZING


def test_columns_grow_by_batches_and_become_ordered_arrays() -> None:
    growing = GrowingColumns()
    for start in ([30, 10], [], [20, 10]):
        batch = [np.array(start) if name in ("start_ns", "correlation") else np.zeros(len(start)) for name in TYPES]
        batch[list(TYPES).index("duration_ns")] = np.array(start) // 10 + len(growing)
        growing.append(batch)
    columns = growing.finish()
    assert columns["start_ns"].tolist() == [30, 10, 20, 10]
    assert columns["duration_ns"].tolist() == [3, 1, 4, 3]
    wide = {**TYPES, "correlation": np.int32, "external_id": np.int32}
    assert {name: column.dtype for name, column in columns.items()} == wide
    order = by_start_longer_first(columns["start_ns"], columns["duration_ns"])
    assert order.tolist() == [3, 1, 2, 0]
    put_in_order(columns, order)
    assert columns["start_ns"].tolist() == columns["correlation"].tolist() == [10, 10, 20, 30]
    assert list(columns) == list(TYPES)


def test_ids_keep_64_bits_where_one_needs_them() -> None:
    for large in (2**31, -(2**31) - 1, 2**62):
        growing = GrowingColumns()
        ids = np.array([0, large])
        growing.append([ids if name == "external_id" else np.zeros(2, kind) for name, kind in TYPES.items()])
        columns = growing.finish()
        assert columns["external_id"].tolist() == [0, large]
        assert columns["correlation"].dtype == np.int32
