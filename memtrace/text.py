"""Text from a trace or from a file of another tool as it is shown: on one line, without invisible characters."""

from __future__ import annotations


def to_printable(text: str, replacement: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Return text in which every unprintable character is replaced.

    Unprintable are control characters (escape sequences for the terminal, newlines), marks of direction that reorder a
    line, invisible characters and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else replacement for character in text)
