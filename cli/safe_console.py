"""A rich console that passes no control character of a text to the terminal, wherever the text comes from."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from memtrace.text import to_printable


class SafeConsole(Console):
    """Replaces unprintable characters in every string that is printed, in tables as well.

    ``escape`` of ``memtrace.cli.output`` does so for names, newlines included; this class is for strings that reach the
    console without it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)  # ":a:" in a name is not an emoji

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text; newlines stay."""
        return super().render_str("\n".join(map(to_printable, text.split("\n"))), **options)
