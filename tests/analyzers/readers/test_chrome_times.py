"""Exact nanoseconds, against decimal arithmetic."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.analyzers.readers import chrome_times
from tests.analyzers.readers import naive

INT64 = (1 << 63) - 1


@given(st.lists(st.integers(-(1 << 43) * 1000 + 1, (1 << 43) * 1000 - 1), max_size=5))
def test_numbers_with_three_decimals_are_exact(ns: list[int]) -> None:
    us = [float(Decimal(value) / 1000) for value in ns]

    converted = chrome_times.from_numbers(us)
    assert converted is not None
    assert converted.tolist() == ns


@given(st.decimals(-(1 << 41), 1 << 41, places=7))
def test_numbers_with_more_decimals_are_exact_or_refused(us: Decimal) -> None:
    converted = chrome_times.from_numbers([float(us)])

    assert converted is None or converted.tolist() == [naive.ns(us)]


@given(st.lists(st.integers(-(1 << 53) + 1, (1 << 53) - 1), max_size=5))
def test_whole_numbers_are_exact(us: list[int]) -> None:
    converted = chrome_times.from_numbers(us)

    assert converted is not None
    assert converted.tolist() == [value * 1000 for value in us]


@pytest.mark.parametrize(
    "value", [None, "1", float("nan"), float("inf"), 1e300, 10**400, 1661203462598738.0, 1 << 53, [1], 0.0001]
)
def test_numbers_that_need_their_text_are_refused(value: object) -> None:
    assert chrome_times.from_numbers([1.5, value]) is None


@given(st.lists(st.decimals(-(10**14), 10**14, allow_nan=False), max_size=5), st.sampled_from(["{}", '"{}"', " {} "]))
def test_texts_are_exact(values: list[Decimal], form: str) -> None:
    texts = [form.format(value).encode() for value in values]

    assert chrome_times.from_texts(texts) == [naive.ns(value) for value in values]


@given(st.lists(st.decimals(-(10**15), 10**15, places=3), max_size=5))
def test_texts_as_kineto_writes_them_are_exact(values: list[Decimal]) -> None:
    assert chrome_times.from_texts([f"{value:.3f}".encode() for value in values]) == [
        naive.ns(value) for value in values
    ]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"0.0005", 0), (b"0.0015", 2), (b"-0.0015", -2), (b"1.0005000001", 1001), (b"1e3", 1_000_000),
        (b"1E-3", 1), (b"9223372036854775.807", INT64), (b"9223372036854775.808", None), (b"1e400", None),
        (b"", None), (b"null", None), (b"true", None), (b"soon", None), (b"NaN", None), (b'"Infinity"', None),
        (b"\xff", None), (b"1.2.345", None), (b"9" * 5000, None), (b"1e9999999999999999999", None),
        (b"1e999999", None), (b"1e-999999999", 0), (b"0" * 5000 + b"1.5", 1500),
    ],
)  # fmt: skip
def test_text(text: bytes, ns: int | None) -> None:
    assert chrome_times.from_text(text) == ns
    assert chrome_times.from_texts([b"1.000", text]) == [1000, ns]
