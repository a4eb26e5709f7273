"""Names from a trace as the page prints them: bounded in length, on one line, without markup."""

from __future__ import annotations

from typing import Final

from memtrace.text import to_printable

MAX_NAME_CHARS: Final = 200
"""Longest name on the page; the names of a trace can have any length."""
NO_VALUE: Final = "\N{EN DASH}"
"""Text of a table cell without a value."""


def name_text(text: object, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return a name on one line, without invisible characters, with an ellipsis in the middle where it is too long.

    Markup stays as it is: the template escapes it for HTML, and :func:`figure_text` for plotly.
    """
    printable = to_printable(str(text)[: 20 * max_chars])
    if len(printable) <= max_chars:
        return printable
    num_head = (max_chars - 1) // 2
    return f"{printable[:num_head]}…{printable[-(max_chars - 1 - num_head) :]}"


def figure_text(text: object, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return a name for a label or hover text of a figure, where plotly.js would interpret ``<b>`` as markup."""
    return name_text(text, max_chars).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
