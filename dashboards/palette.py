"""Colours and themes of every figure and of the page, defined once.

Categories use the eight colours of Okabe and Ito's palette ("Color Universal Design", 2008), which stay apart
under the common colour-vision deficiencies, with a grey in place of its black so that they show on dark paper.
Phases are greys of rising weight: they can never be taken for a category.
"""

from __future__ import annotations

from typing import Any, Final

from memtrace.format.schema import CATEGORIES

CATEGORY_COLORS: Final[dict[str, str]] = {
    "parameter": "#0072b2",
    "gradient": "#d55e00",
    "optimizer_state": "#cc79a7",
    "activation": "#009e73",
    "input": "#56b4e9",
    "temporary": "#e69f00",
    "workspace": "#f0e442",
    "unknown": "#8c9299",
}
CATEGORY_LABELS: Final[dict[str, str]] = {name: name.replace("_", " ") for name in CATEGORIES}
CATEGORY_MEANINGS: Final[dict[str, str]] = {
    "parameter": "weights and buffers of the model",
    "gradient": "what backward leaves in .grad",
    "optimizer_state": "what the optimizer keeps from step to step, such as Adam's two moments",
    "activation": "made in forward and kept because backward reads it",
    "input": "the batch",
    "temporary": "born and dead within one phase",
    "workspace": "born and dead within one operator call",
    "unknown": "nothing in the trace tells what it is",
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
"""Bottom to top: what stays through a step first, so that what comes and goes moves on a calm base."""

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


def plotly_template(theme: str) -> dict[str, Any]:
    """The plotly template (a plain dict) of one of ``THEMES``; the page puts it under every figure."""
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
