"""t(S) = alpha + slope · S, robustly."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.job.collectives.cost_model import fit
from perfscope.analyzers.job.collectives.table import bus_factor

SIZES = np.array([8.0, 64.0, 4e3, 1e6, 2e6, 4e6, 5e7])


def times(size: np.ndarray) -> np.ndarray:
    """20 us and 2 GB/s."""
    return 20_000 + 0.5 * size


def test_exact_times_are_met_exactly() -> None:
    alpha, slope, residual = fit(SIZES, times(SIZES)) or (0, 0, 1)
    assert (alpha, slope) == (pytest.approx(20_000), pytest.approx(0.5))
    assert residual == pytest.approx(0.0, abs=1e-9)


def test_single_delayed_instances_do_not_count() -> None:
    size = np.repeat(SIZES, 9)
    time = times(size)
    time[::4] *= 7
    alpha, slope, residual = fit(size, time) or (0, 0, 1)
    assert (alpha, slope) == (pytest.approx(20_000), pytest.approx(0.5))
    assert residual == pytest.approx(0.0, abs=1e-9)


def test_like_sizes_do_not_outvote_the_distant_ones() -> None:
    """Twelve tiny sizes, between which there is nothing but noise, and two large ones."""
    tiny = 8.0 * np.arange(1, 13)
    size = np.concatenate((tiny, [5e6, 5e7]))
    time = times(size) + np.concatenate((np.random.default_rng(2).normal(0, 3000, 12), [0, 0]))
    alpha, slope, _ = fit(size, time) or (0, 0, 1)
    assert slope == pytest.approx(0.5, rel=0.01)
    assert alpha == pytest.approx(20_000, rel=0.1)


def test_medians_of_few_delayed_instances_do_not_outvote_those_of_many() -> None:
    """The last gradients of a loop have sizes of their own, and are late in every step."""
    size = np.repeat([40.0, 2e3, 2e4, 1e6], [8, 48, 8, 48])
    time = times(size) + np.where(np.isin(size, (40.0, 2e4)), 1e6, 0.0)
    alpha, slope, _ = fit(size, time) or (0, 0, 1)
    assert (alpha, slope) == (pytest.approx(20_000), pytest.approx(0.5))


def test_the_residual_is_the_usual_relative_error() -> None:
    size = np.repeat([1e6, 2e6], 100)
    noise = np.tile([0.9, 1.1], 100)
    assert (fit(size, times(size) * noise) or (0, 0, 0))[2] == pytest.approx(0.1, abs=0.01)


def test_sizes_that_hardly_differ_do_not_separate_latency_from_bandwidth() -> None:
    size = np.array([1e6, 1.5e6, 1.9e6])
    assert fit(size, times(size)) is None
    assert fit(size[:1], times(size[:1])) is None


def test_neither_is_negative() -> None:
    falling = fit(np.array([1e3, 1e6]), np.array([30_000.0, 20_000.0]))
    assert falling is not None
    assert falling[1] == 0.0
    steep = fit(np.array([1e3, 1e6]), np.array([1.0, 1e6]))
    assert steep is not None
    assert steep[0] == 0.0


def test_thousands_of_sizes_are_fitted_too() -> None:
    """Experts' all-to-alls hardly ever have one size twice."""
    size = np.random.default_rng(0).uniform(1e4, 1e8, 20_000).round()
    alpha, slope, residual = fit(size, times(size)) or (0, 0, 1)
    assert (alpha, slope) == (pytest.approx(20_000, rel=0.05), pytest.approx(0.5, rel=1e-3))
    assert residual < 0.01


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875),
        ("gather", 0.875), ("scatter", 0.875), ("broadcast", 1.0), ("reduce", 1.0), ("send_recv", 1.0),
        ("barrier", None),
    ],
)  # fmt: skip
def test_bus_factors_of_eight_ranks(kind: str, factor: float | None) -> None:
    assert bus_factor(kind, 8) == factor
    assert bus_factor(kind, 1) is None
