"""Numbers as a person reads them, at every boundary."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope import text


@pytest.mark.parametrize(
    ("us", "written"),
    [
        (0.0, "0 µs"),
        (0.412, "0.412 µs"),
        (38.1, "38.1 µs"),
        (412.0, "412 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (9_996.0, "10.0 ms"),
        (83_210.0, "83.2 ms"),
        (999_400.0, "999 ms"),
        (999_600.0, "1.00 s"),
        (1_350_000.0, "1.35 s"),
        (3.6e9, "3,600 s"),
        (-11.5, "-11.5 µs"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_duration(us: float | None, written: str) -> None:
    assert text.duration(us) == written


@given(st.floats(min_value=1e-9, max_value=1e15))
def test_a_duration_is_true_to_half_a_percent(us: float) -> None:
    number, unit = text.duration(us).split(" ")
    size = {"µs": 1.0, "ms": 1e3, "s": 1e6}[unit]
    assert float(number.replace(",", "")) * size == pytest.approx(us, rel=0.0051)


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (26_214_400, "25.0 MiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (None, "–"),
    ],
)
def test_byte_size(size: float | None, written: str) -> None:
    assert text.byte_size(size) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(512, "512"), (1_000, "1.00 k"), (124e6, "124 M"), (6.74e9, "6.74 B"), (1.8e12, "1.80 T"), (None, "–")],
)
def test_count(value: float | None, written: str) -> None:
    assert text.count(value) == written


@pytest.mark.parametrize(
    ("value", "written"), [(0, "0 FLOP"), (5e6, "5.00 MFLOP"), (1.35e15, "1.35 PFLOP"), (None, "–")]
)
def test_flop(value: float | None, written: str) -> None:
    assert text.flop(value) == written


@pytest.mark.parametrize(
    ("fraction", "written"),
    [
        (0.0, "0%"),
        (0.0004, "<0.1%"),
        (-0.0004, ">-0.1%"),
        (0.001, "0.1%"),
        (0.034, "3.4%"),
        (0.0994, "9.9%"),
        (0.0996, "10%"),
        (0.254, "25%"),
        (0.994, "99%"),
        (0.997, "99.7%"),
        (0.9996, "100%"),
        (1.0, "100%"),
        (12.5, "1,250%"),
        (None, "–"),
        (math.nan, "–"),
        (1e308, "–"),
    ],
)
def test_percent(fraction: float | None, written: str) -> None:
    assert text.percent(fraction) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.043, "0.0430x"),
        (0.85, "0.85x"),
        (1.0, "1x"),
        (1.04, "1.04x"),
        (1.3, "1.3x"),
        (1.994, "1.99x"),
        (1.996, "2x"),
        (2.63, "2.6x"),
        (9.94, "9.9x"),
        (9.96, "10x"),
        (100.0, "100x"),
        (1_234.0, "1,234x"),
        (None, "–"),
        (math.inf, "–"),
    ],
)
def test_factor(value: float | None, written: str) -> None:
    assert text.factor(value) == written


@pytest.mark.parametrize(
    ("number", "written"), [(0, "0 batches"), (1, "1 batch"), (2, "2 batches"), (1024, "1,024 batches")]
)
def test_plural(number: int, written: str) -> None:
    assert text.plural(number, "batch", "batches") == written


@pytest.mark.parametrize(("value", "written"), [(12, "12"), (1234.0, "1,234"), (24.72, "24.7"), (0.5, "0.500")])
def test_count_per_step(value: float, written: str) -> None:
    assert text.count_per_step(value) == written


@pytest.mark.parametrize(
    ("sentence", "written"),
    [
        ("Rank 0 is a straggler.", "rank 0 is a straggler."),
        ("DDP sends buffers.", "DDP sends buffers."),
        ("PyTorch does.", "PyTorch does."),
        ("41% of the step.", "41% of the step."),
        ("", ""),
    ],
)
def test_lower_first_keeps_names(sentence: str, written: str) -> None:
    assert text.lower_first(sentence) == written


def test_plural_adds_an_s_unless_another_form_is_given() -> None:
    assert [text.plural(number, "rank") for number in (1, 8)] == ["1 rank", "8 ranks"]


@pytest.mark.parametrize(
    ("ranks", "written"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0, 1"),
        ((2, 0, 1, 1), "0-2"),
        ((0, 1, 2, 3, 7), "0-3, 7"),
        ((0, 8, 16, 24), "0, 8, 16, 24"),
        (range(0, 64, 8), "0-56 by 8"),
        ((0, 2, 4, 6, 8, 9, 11, 13, 15, 17, 19), "0, 2, 4, 6, 8, 9, 11, 13, 15 and 2 more"),
    ],
)
def test_rank_list(ranks: Iterable[int], written: str) -> None:
    assert text.rank_list(ranks) == written


@pytest.mark.parametrize(("ranks", "written"), [((3,), "rank 3"), ((0, 1, 2, 3, 7), "ranks 0-3, 7")])
def test_ranks_in_words(ranks: Iterable[int], written: str) -> None:
    assert text.ranks_in_words(ranks) == written


def test_printable_keeps_a_name_from_driving_the_terminal() -> None:
    assert text.printable("a\x1b[31mb\nc\u202ed") == "a [31mb c d"


@pytest.mark.parametrize(
    ("of_a_step", "of_the_recording"),
    [
        ("Copies from pageable memory block 8% of the step", "Copies from pageable memory block 8% of the recording"),
        (
            "Rank 1 is a straggler (slower compute): waiting for it costs 62% of each step",
            "Rank 1 is a straggler (slower compute): waiting for it costs 62% of the recording",
        ),
        ("most on rank 0 (5.7% of its step)", "most on rank 0 (5.7% of the recording)"),
        ("Communication takes 12.0 ms per step on average", "Communication takes 12.0 ms on average"),
        ("Operators, per rank and step", "Operators, per rank"),
        ("ms from the step's start", "ms from the start of the recording"),
        ("Per step", "Time"),
        ("Step", "Recording"),
        ("Its parts add up to the step.", "Its parts add up to the recording."),
        ("Only changes on this path can shorten the step.", "Only changes on this path can shorten the recording."),
        ("by replay of the recorded step", "by replay of the recording"),
        ("without its pauses the step takes 9% less", "without its pauses the recording takes 9% less"),
        ("the hosts had launched this step's work", "the hosts had launched this work"),
        ("No steps were found", "No steps were found"),
    ],
)
def test_without_steps_a_text_is_about_the_recording(of_a_step: str, of_the_recording: str) -> None:
    assert text.of_recording(of_a_step) == of_the_recording
