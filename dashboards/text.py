"""Numbers and names as the page writes them: binary units, times, shares; names that cannot do harm."""

from __future__ import annotations

from typing import Final

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_TIME_UNITS: Final = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"))
MAX_NAME: Final = 200
"""Longest name, in characters, that goes on the page: a trace may hold names of any length."""


def byte_unit(largest: float) -> tuple[int, str]:
    """The binary unit in which numbers up to ``largest`` bytes read well, as ``(divisor, name)``."""
    power = 0
    while power + 1 < len(_BYTE_UNITS) and abs(largest) >= 1024 ** (power + 1):
        power += 1
    return 1024**power, _BYTE_UNITS[power]


def bytes_text(num_bytes: float | None) -> str:
    """Bytes in binary units with about three digits, such as ``12.4 MiB``; a dash when unknown."""
    if num_bytes is None or num_bytes != num_bytes:
        return "–"  # noqa: RUF001 (a dash, not a minus)
    divisor, unit = byte_unit(num_bytes)
    value = num_bytes / divisor
    digits = 0 if divisor == 1 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def time_unit(longest_ns: float) -> tuple[int, str]:
    """The unit in which times up to ``longest_ns`` read well, as ``(nanoseconds, name)``."""
    for nanoseconds, unit in _TIME_UNITS:
        if abs(longest_ns) >= nanoseconds:
            return nanoseconds, unit
    return 1, "ns"


def time_text(duration_ns: float | None) -> str:
    """A time with about three digits, such as ``4.31 ms``; a dash when unknown."""
    if duration_ns is None or duration_ns != duration_ns:
        return "–"  # noqa: RUF001
    nanoseconds, unit = time_unit(duration_ns)
    value = duration_ns / nanoseconds
    digits = 0 if nanoseconds == 1 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def share_text(part: float, whole: float) -> str:
    """``part`` of ``whole`` in per cent: ``37 %``, ``< 1 %`` for what is there but little, a dash of nothing."""
    if not whole or part != part or whole != whole:
        return "–"  # noqa: RUF001
    percent = 100 * part / whole
    return "< 1 %" if 0 < percent < 1 else f"{percent:.0f} %"


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


def counted(number: int, what: str) -> str:
    """A number of things, in words that agree with it."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
