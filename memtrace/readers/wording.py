"""Wording that the notes of several readers share."""

from __future__ import annotations

from memtrace.units import format_count


def format_clause(number: int, noun: str, singular: str, plural: str) -> str:
    """Format a number of things and what holds for them, such as ``1 block was freed`` or ``3 blocks were freed``.

    Args:
        number: how many things.
        noun: the thing in the singular.
        singular: the rest of the clause for one thing.
        plural: the rest of the clause for several things.
    """
    return f"{format_count(number, noun)} {singular if number == 1 else plural}"
