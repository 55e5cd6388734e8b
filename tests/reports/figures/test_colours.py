"""The categories' colours can be distinguished by colour-blind eyes, in light and in dark."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from perfscope.reports.figures.colours import DARK, LIGHT, SERIES
from perfscope.results.categories import CATEGORIES

LEAST_DISTANCE = 20.0
"""CIE76; about ten times what is just noticeable side by side."""

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def _lab(colour: str, eye: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(eye @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (
        np.cbrt(part) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in to_xyz @ seen / np.array([0.9505, 1.0, 1.089])
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_every_category_has_a_colour_that_stands_apart(colours: dict[str, str]) -> None:
    palette = {name: colours[name] for name in CATEGORIES}
    for (one, first), (other, second) in itertools.combinations(palette.items(), 2):
        for eye, matrix in EYES.items():
            distance = float(np.linalg.norm(_lab(first, matrix) - _lab(second, matrix)))
            assert distance >= LEAST_DISTANCE, f"{one} and {other} for {eye} eyes: {distance:.1f}"


def test_each_light_colour_has_one_dark_one() -> None:
    assert list(LIGHT) == list(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT)
    assert not set(SERIES) & set(LIGHT.values())
