"""Figures outside a page: with the colors of a theme, and margins for titles and legends."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from memtrace.dashboards.palette import THEMES, plotly_template


def apply_theme(figure: go.Figure, theme: str) -> go.Figure:
    """Apply the template of a theme to a figure and return the figure.

    Args:
        figure: a figure of a build function of this package.
        theme: one of ``palette.THEMES``.

    Raises:
        ValueError: the theme is unknown.
    """
    if theme not in THEMES:
        raise ValueError(f"unknown theme {theme!r}; choose one of {', '.join(THEMES)}")
    colors = THEMES[theme]
    template: dict[str, Any] = plotly_template(theme)
    template["layout"] |= {"paper_bgcolor": colors["panel"], "plot_bgcolor": colors["panel"]}
    for trace in figure.data:
        if trace.meta and trace.meta.get("ink"):
            trace.line.color = colors["ink"]
    figure.update_layout(template=template, meta=None)
    if figure.layout.margin.t is None:
        figure.update_layout(margin={"t": 60})
    return figure
