"""Colors and themes of the page and its figures.

The hues are those of Okabe and Ito's palette ("Color Universal Design", 2008), which people with a color
vision deficiency can distinguish, with gray in place of black so that they show on a dark background. Phases have
grays of increasing weight so that nobody confuses them with categories.
"""

from __future__ import annotations

from typing import Any, Final

BLUE: Final = "#0072b2"
VERMILION: Final = "#d55e00"
PURPLE: Final = "#cc79a7"
GREEN: Final = "#009e73"
SKY: Final = "#56b4e9"
ORANGE: Final = "#e69f00"
YELLOW: Final = "#f0e442"
GRAY: Final = "#8c9299"

CATEGORY_COLORS: Final[dict[str, str]] = {
    "parameter": BLUE,
    "gradient": VERMILION,
    "optimizer_state": PURPLE,
    "activation": GREEN,
    "input": SKY,
    "temporary": ORANGE,
    "workspace": YELLOW,
    "unknown": GRAY,
}
STACK_ORDER: Final = (
    "parameter",
    "optimizer_state",
    "gradient",
    "input",
    "activation",
    "temporary",
    "workspace",
    "unknown",
)
"""Categories of a stacked figure, bottom to top: those that stay live across steps are the base of the others."""

SERIES_COLORS: Final = (
    BLUE,
    ORANGE,
    GREEN,
    SKY,
    VERMILION,
    "#7506e5",
    "#734c26",
    "#b26afb",
    "#913071",
    "#cfae6e",
)
"""Colors of texts such as allocation sites, of runs, ranks and workers: hues of Okabe and Ito, and those that differ
most from them, from gray and from each other under normal vision, protanopia, deuteranopia and tritanopia."""
SIZE_COLORS: Final = ("#414487", "#2a788e", "#22a884", "#7ad151", "#bddf26")
"""Colors of classes of sizes, smallest first: viridis, whose lightness rises."""
SERIES_DASHES: Final = ("solid", "dash", "dot", "dashdot")
"""Dashes of lines whose colors repeat."""
GROWTH_COLOR: Final = VERMILION
"""More memory than in the run that it is compared with."""
SHRINKAGE_COLOR: Final = BLUE
"""Less memory than in the run that it is compared with."""
DIFFERENCE_SCALE: Final = ((0.0, SHRINKAGE_COLOR), (0.5, "#c9d0d7"), (1.0, GROWTH_COLOR))
"""Colors from less to more memory; numbers in the cells are readable on each of them."""
AMOUNT_SCALE: Final = ((0.0, "#dbe6ef"), (0.5, "#6fa8cf"), (1.0, "#00457a"))
"""Colors from no memory to the largest amount."""

THEMES: Final[dict[str, dict[str, str]]] = {
    "light": {
        "page": "#f4f6f8",
        "panel": "#ffffff",
        "ink": "#1a2027",
        "muted": "#55606c",
        "rule": "#d5dbe1",
        "band": "#eceff3",
        "accent": "#0a5aa8",
        "warn": "#8a4b00",
        "warn-panel": "#fff4e0",
        "phase-forward": "#d9dee4",
        "phase-backward": "#8e98a3",
        "phase-optimizer": "#3f4954",
        "phase-forward-ink": "#1a2027",
        "phase-backward-ink": "#10151a",
        "phase-optimizer-ink": "#ffffff",
    },
    "dark": {
        "page": "#0e1216",
        "panel": "#171d23",
        "ink": "#e7ecf1",
        "muted": "#a3afbb",
        "rule": "#313b45",
        "band": "#212930",
        "accent": "#74b9f5",
        "warn": "#ffc773",
        "warn-panel": "#33260f",
        "phase-forward": "#34404b",
        "phase-backward": "#74818e",
        "phase-optimizer": "#ccd4dc",
        "phase-forward-ink": "#e7ecf1",
        "phase-backward-ink": "#0e1216",
        "phase-optimizer-ink": "#0e1216",
    },
}


PATH_HUES: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, GRAY)
"""Colors of the paths of a pipeline: directions, or chunks of an interleaved schedule."""
SYNC_COLOR: Final = VERMILION
"""Gradient synchronization."""
BUBBLE_COLOR: Final = f"{GRAY}33"
"""Where a worker is idle."""


def mix_colors(color: str, other: str, share: float) -> str:
    """Return a color that is ``other`` by ``share`` and ``color`` by the rest; all of them as ``#rrggbb``."""
    parts = [(int(color[place : place + 2], 16), int(other[place : place + 2], 16)) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(first + (second - first) * share):02x}" for first, second in parts)


def series_line(number: int) -> dict[str, Any]:
    """Return color and dash of the line of a run, rank or worker; the first 28 differ."""
    cycle, place = divmod(number, len(SERIES_COLORS))
    return {"color": SERIES_COLORS[place], "dash": SERIES_DASHES[cycle % len(SERIES_DASHES)]}


def plotly_template(theme: str) -> dict[str, Any]:
    """Return the plotly template of one of ``THEMES``; the page applies it to every figure."""
    colors = THEMES[theme]
    axis = {
        "gridcolor": colors["rule"],
        "linecolor": colors["rule"],
        "zerolinecolor": colors["rule"],
        "tickcolor": colors["rule"],
        "automargin": True,
        "title": {"standoff": 8},
    }
    return {
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {
                "color": colors["ink"],
                "size": 13,
                "family": "system-ui, 'Segoe UI', Roboto, sans-serif",
            },
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
            "hoverlabel": {
                "bgcolor": colors["panel"],
                "bordercolor": colors["muted"],
                "font": {"color": colors["ink"]},
                "align": "left",
            },
            "annotationdefaults": {"arrowcolor": colors["ink"], "font": {"color": colors["ink"]}},
            "modebar": {
                "color": colors["muted"],
                "activecolor": colors["accent"],
                "bgcolor": "rgba(0,0,0,0)",
            },
        }
    }
