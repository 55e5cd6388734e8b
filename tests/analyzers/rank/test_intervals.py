"""Sets of intervals: union, algebra and measures, compared with sets of instants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.analyzers.rank.intervals import Intervals, paint

SPAN = 40
pairs = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)), max_size=12)


def intervals(items: list[tuple[int, int]]) -> Intervals:
    start = np.array([start for start, _ in items], dtype=np.int64)
    return Intervals.of(start, np.array([end for _, end in items], dtype=np.int64))


def instants(items: list[tuple[int, int]]) -> set[int]:
    return {instant for start, end in items for instant in range(start, end)}


def instants_of(found: Intervals) -> set[int]:
    return instants(list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)))


def assert_normal(found: Intervals) -> None:
    assert (found.start_ns < found.end_ns).all()
    assert (found.start_ns[1:] > found.end_ns[:-1]).all()


def test_union_merges_overlapping_and_touching_and_drops_empty():
    found = intervals([(5, 9), (0, 2), (2, 3), (7, 12), (20, 20), (30, 25)])
    assert found.start_ns.tolist() == [0, 5]
    assert found.end_ns.tolist() == [3, 12]
    assert found.measure() == 10


@given(pairs, pairs)
def test_algebra_agrees_with_sets_of_instants(left, right):
    a, b = intervals(left), intervals(right)
    assert instants_of(a) == instants(left)
    assert instants_of(a.union(b)) == instants(left) | instants(right)
    assert instants_of(a.intersect(b)) == instants(left) & instants(right)
    assert instants_of(a.subtract(b)) == instants(left) - instants(right)
    assert instants_of(a.complement(3, 30)) == set(range(3, 30)) - instants(left)
    for found in (a, b, a.union(b), a.intersect(b), a.subtract(b), a.complement(3, 30)):
        assert_normal(found)


@given(pairs, st.lists(st.tuples(st.integers(-5, 50), st.integers(0, 20)), min_size=1, max_size=5))
def test_measures_inside_windows(items, windows):
    start = np.array([begin for begin, _ in windows], dtype=np.int64)
    end = np.array([begin + length for begin, length in windows], dtype=np.int64)
    expected = [len(instants(items) & set(range(int(a), int(b)))) for a, b in zip(start, end, strict=True)]
    assert intervals(items).within(start, end).tolist() == expected


@given(st.lists(pairs, max_size=4))
def test_paint_gives_every_instant_to_the_first_layer_that_covers_it(layers):
    starts, labels = paint(0, SPAN, [(index, intervals(items)) for index, items in enumerate(layers)], 9)
    ends = [*starts[1:].tolist(), SPAN]
    painted = {}
    for start, end, label in zip(starts, ends, labels, strict=True):
        painted.update(dict.fromkeys(range(start, end), int(label)))
    covered = [instants(items) for items in layers]
    expected = {
        instant: next((index for index, layer in enumerate(covered) if instant in layer), 9) for instant in range(SPAN)
    }
    assert painted == expected
    assert (labels[1:] != labels[:-1]).all()


def test_paint_example_of_the_docstring():
    starts, labels = paint(0, 10, [(0, intervals([(0, 4)])), (1, intervals([(2, 6)]))], 9)
    assert starts.tolist() == [0, 4, 6]
    assert labels.tolist() == [0, 1, 9]


@pytest.mark.parametrize("operation", ["intersect", "subtract", "union"])
def test_operations_on_nothing(operation):
    some, nothing = intervals([(1, 4)]), Intervals.empty()
    assert getattr(nothing, operation)(nothing).measure() == 0
    assert getattr(some, operation)(nothing).measure() == (0 if operation == "intersect" else 3)
