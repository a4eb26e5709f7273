"""Numbers and names as the page writes them: binary units, times, shares; names that cannot do harm."""

from __future__ import annotations

from typing import Final

MAX_NAME: Final = 200
"""Longest name, in characters, that goes on the page: a trace may hold names of any length."""


def name_text(text: object, limit: int = MAX_NAME) -> str:
    """A name from a trace, made safe to lay out: one line, no invisible characters, the middle cut when long.

    Markup stays in it as it is: the template and :func:`figure_text` escape, each for its own reader.
    """
    kept = "".join(character if character.isprintable() else "\ufffd" for character in str(text)[: 20 * limit])
    if len(kept) <= limit:
        return kept
    head = (limit - 1) // 2
    return f"{kept[:head]}…{kept[-(limit - 1 - head) :]}"


def figure_text(text: object, limit: int = MAX_NAME) -> str:
    """A name for a label or hover text of a figure, where plotly.js would read ``<b>`` or ``<a>`` as markup."""
    return name_text(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
