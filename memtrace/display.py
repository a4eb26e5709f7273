"""Values that show themselves in a notebook: as tables, and traces with a figure.

This module is the base of results of all layers and imports none of them. What is shown is in
``memtrace.dashboards.notebook``, which is imported when a notebook asks for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

RENDERER: Final = "memtrace.dashboards.notebook"
MAX_PLAIN_CHARS: Final = 4_000
"""Longest plain text of a value."""


class Displayed:
    """A value with a rich display in Jupyter; in a terminal it has its plain ``repr``."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the value as HTML and as plain text; Jupyter calls this. It never raises."""
        text = repr(self)
        bundle = {"text/plain": text if len(text) <= MAX_PLAIN_CHARS else f"{text[:MAX_PLAIN_CHARS]}…"}
        try:
            bundle["text/html"] = import_module(RENDERER).to_html(self)
        except Exception as error:  # a display must not end the user's cell with an error
            bundle["text/plain"] += f"\n({type(error).__name__} while drawing it: {error})"
        return bundle
