"""Numbers as a reader sees them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.reports import format as fmt


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.0, "0 µs"),
        (0.412, "0.412 µs"),
        (412.0, "412 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (83_210.0, "83.2 ms"),
        (1_350_000.0, "1.35 s"),
        (9_996.0, "10.0 ms"),
        (3.6e9, "3,600 s"),
        (-11.5, "-11.5 µs"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_duration(us: float | None, text: str) -> None:
    assert fmt.duration(us) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.0, "0%"),
        (0.0004, "<0.1%"),
        (0.034, "3.4%"),
        (0.0996, "10%"),
        (0.254, "25%"),
        (1.0, "100%"),
        (12.5, "1,250%"),
    ],
)
def test_share(fraction: float, text: str) -> None:
    assert fmt.share(fraction) == text


@given(st.floats(min_value=1e-9, max_value=1e15))
def test_a_duration_is_true_to_half_a_percent(us: float) -> None:
    number, unit = fmt.duration(us).split(" ")
    size = {"µs": 1.0, "ms": 1e3, "s": 1e6}[unit]
    assert float(number.replace(",", "")) * size == pytest.approx(us, rel=0.0051)


@given(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(["us", "share", "bytes", "x", "", "GB/s"]))
def test_no_number_reads_nan_or_inf(value: float, unit: str) -> None:
    text = fmt.measure(value, unit)
    assert "nan" not in text
    assert "inf" not in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (42_500.0, "us", "42.5 ms"),
        (42.5, "ms", "42.5 ms"),
        (0.412, "share", "41%"),
        (26_214_400, "bytes", "25.0 MiB"),
        (1.14, "x", "1.14×"),
        (4, "", "4"),
        (12, "steps", "12 steps"),
        (244.7, "GB/s", "245 GB/s"),
    ],
)
def test_measure(value: float, unit: str, text: str) -> None:
    assert fmt.measure(value, unit) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0, 1"),
        ((0, 1, 2, 3, 7), "0–3, 7"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_rank_list(ranks: tuple[int, ...], text: str) -> None:
    assert fmt.rank_list(ranks) == text


def test_a_columns_numbers_share_their_decimals() -> None:
    unit = fmt.unit_for(126_400.0)
    assert [fmt.in_unit(us, unit, 126_400.0) for us in (126_400.0, 300.0, 4.0, 0.0)] == ["126.4", "0.3", "<0.1", "0"]


def test_printable_keeps_a_name_from_driving_the_terminal() -> None:
    assert fmt.printable("a\x1b[31mb\nc\u202ed") == "a [31mb c d"
