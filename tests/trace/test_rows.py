"""Rows by category and name, compared with a look at every event."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.trace import trace as trace_module
from perfscope.trace.trace import Category, CollectiveArgs, MemoryCounter, Thread, Trace

NAMES = tuple(f"{kind}{number}" for kind in ("aten::", "cuda", "step ", "(8, 8)") for number in range(12))
QUESTIONS = (
    (Category.CPU_OP,),
    (Category.ANNOTATION, Category.CPU_OP),
    (Category.MEMCPY,),
    (Category.MEMCPY, Category.KERNEL, Category.RUNTIME),
)


def none(*_: object) -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@pytest.fixture(params=[1 << 16, 4], ids=["numbers of 16 bits", "more strings than they count"])
def drawn(request, monkeypatch) -> Trace:
    """Events of four categories with names drawn by chance; the last dozen strings are no names."""
    monkeypatch.setattr(trace_module, "_TWO_16", request.param)
    chance = np.random.default_rng(7)
    count = 500
    kinds = (Category.CPU_OP, Category.ANNOTATION, Category.KERNEL, Category.RUNTIME)
    ids = np.full(count, -1, dtype=np.int32)
    return Trace(
        source="drawn",
        strings=NAMES,
        category=chance.choice(kinds, count).astype(np.int8),
        name=chance.integers(0, 36, count).astype(np.int32),
        start_ns=np.arange(count, dtype=np.int64),
        duration_ns=np.ones(count, dtype=np.int64),
        thread=np.zeros(count, dtype=np.int32),
        device=ids,
        stream=ids.astype(np.int64),
        correlation=ids,
        external_id=ids,
        shapes=ids,
        types=ids,
        inputs=ids,
        threads=(Thread("1", "1", ""),),
        collectives=CollectiveArgs(*[none()] * 9),
        memory=MemoryCounter(*[none()] * 4),
    )


@pytest.mark.parametrize("categories", QUESTIONS)
@pytest.mark.parametrize("wanted", ["aten::", "1", "step 3", "(8", "missing"])
def test_rows_of_categories_by_name(drawn, categories, wanted):
    events = zip(drawn.category.tolist(), drawn.name.tolist(), strict=True)
    expected = [row for row, (category, name) in enumerate(events) if category in categories and wanted in NAMES[name]]
    rows = drawn.rows(*categories, named=lambda name: wanted in name)
    assert rows.tolist() == expected
    assert rows.dtype == np.int64


@pytest.mark.parametrize("rows", [None, np.array([], dtype=np.int64), np.array([7, 3, 3, 499]), np.arange(400)])
def test_rows_whose_name_is_one_of_those(drawn, rows):
    chosen = range(len(drawn)) if rows is None else rows.tolist()
    found = drawn.names_where(lambda name: name.endswith("1"), rows)
    assert found.tolist() == [NAMES[drawn.name[row]].endswith("1") for row in chosen]
