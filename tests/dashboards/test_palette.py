"""The colors of groups differ for readers with every kind of color vision."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from memtrace.dashboards.palette import GRAY, SERIES_COLORS, SIZE_COLORS, THEMES

from memtrace.format.arrays import Array

# Linear RGB as people with a color vision deficiency see it: Machado, Oliveira and Fernandes, "A Physiologically-based
# Model for Simulation of Color Vision Deficiency" (2009), severity 1.0.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
XYZ_OF_RGB = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
MIN_DISTANCE = 14.0
"""Of colors in CIELAB; a just noticeable difference is about 2.3."""


def linear(color: str) -> Array:
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: Array) -> Array:
    xyz = XYZ_OF_RGB @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("colors", [(*SERIES_COLORS, GRAY), SIZE_COLORS], ids=["series", "sizes"])
def test_colors_of_groups_can_be_told_apart(colors: tuple[str, ...], vision: str) -> None:
    seen = {color: lab(VISIONS[vision] @ linear(color)) for color in colors}
    distances = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in combinations(colors, 2)}
    assert min(distances.values()) >= MIN_DISTANCE, min(distances, key=lambda pair: distances[pair])


@pytest.mark.parametrize("theme", THEMES)
def test_colors_of_groups_differ_from_the_background(theme: str) -> None:
    panel = lab(linear(THEMES[theme]["panel"]))
    assert all(np.linalg.norm(lab(linear(color)) - panel) >= MIN_DISTANCE for color in (*SERIES_COLORS, *SIZE_COLORS))
