"""Formats bytes, durations, shares and counts for every output of memtrace, and parses sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

UNKNOWN: Final = "unknown"
MAX_NAMES: Final = 4
"""Lists of names show at most this many."""

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIME_UNITS: Final = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"))
_BINARY: Final = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
MIN_PLAIN_BYTES: Final = 1 << 20
"""Smallest number of bytes that can be written without a unit: ``20`` is more likely a forgotten unit than 20 bytes."""
_SIZE: Final = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)")


def choose_byte_unit(largest: float) -> tuple[int, str]:
    """Return the binary unit for numbers up to ``largest`` bytes, as ``(bytes per unit, name)``."""
    power = 0
    # 1023.96 KiB would round to 1,024 KiB.
    while power + 1 < len(_BYTE_UNITS) and round(abs(largest) / 1024**power, 1) >= 1024:
        power += 1
    return 1024**power, _BYTE_UNITS[power]


def choose_time_unit(longest_ns: float) -> tuple[int, str]:
    """Return the unit for times up to ``longest_ns`` nanoseconds, as ``(nanoseconds per unit, name)``."""
    for nanoseconds, unit in _TIME_UNITS:
        if abs(longest_ns) >= nanoseconds:
            return nanoseconds, unit
    return 1, "ns"


def format_bytes(num_bytes: float | None, *, unknown: str = UNKNOWN) -> str:
    """Format bytes in binary units with three significant digits, such as ``12.4 MiB``; None and NaN: ``unknown``."""
    if num_bytes is None or num_bytes != num_bytes:
        return unknown
    return _scaled(num_bytes, *choose_byte_unit(num_bytes))


def format_duration(duration_ns: float | None, *, unknown: str = UNKNOWN) -> str:
    """Format nanoseconds with three significant digits, such as ``4.31 ms``; None and NaN: ``unknown``."""
    if duration_ns is None or duration_ns != duration_ns:
        return unknown
    return _scaled(duration_ns, *choose_time_unit(duration_ns))


def format_long_duration(duration_ns: float | None, *, unknown: str = UNKNOWN) -> str:
    """Format nanoseconds, such as ``3 h 20 min``; below a minute like ``format_duration``."""
    if duration_ns is None or duration_ns != duration_ns:
        return unknown
    minutes = round(duration_ns / 60e9)
    if duration_ns < 60e9:
        return format_duration(duration_ns)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    pieces = [(days, "d"), (hours, "h"), (minutes, "min")]
    # The two largest units are exact enough.
    first = next((place for place, (number, _) in enumerate(pieces) if number), 2)
    return " ".join(f"{number:,} {unit}" for number, unit in pieces[first : first + 2] if number)


def format_share(part: float | None, whole: float | None = 1, *, unknown: str = UNKNOWN) -> str:
    """Format ``part`` of ``whole`` as a percentage such as ``81 %``.

    ``< 1 %`` stands for a small part that is not zero, ``> 99 %`` for a part that rounds to 100 % but is not the whole,
    and ``unknown`` for a share of None, of NaN or of zero.
    """
    if part is None or not whole or part != part or whole != whole:
        return unknown
    percent = 100 * part / whole
    if 0 < percent < 1:
        return "< 1 %"
    return "> 99 %" if 99.5 <= percent < 100 else f"{percent:.0f} %"


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a count such as ``1 block`` or ``1,204 blocks``.

    Args:
        number: The count.
        noun: Its noun in the singular.
        plural: Its noun in the plural, where that is not ``noun`` with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_names(names: Sequence[str]) -> str:
    """Format a list of names, of which the first are shown: ``layers.0, layers.1, layers.2 and 9 more``."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: MAX_NAMES - 1])} and {len(names) - MAX_NAMES + 1:,} more"


def parse_bytes(text: str) -> int:
    """Parse a size: ``24GiB``, ``24G`` (the same), ``24GB`` (decimal) or ``25769803776``.

    Raises:
        ValueError: ``text`` is not a size, negative, or a number below ``MIN_PLAIN_BYTES`` without a unit.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match["unit"].upper() if match else ""
    factor = _DECIMAL.get(unit, _BINARY.get(unit.removesuffix("IB")))
    if match is None or factor is None:
        raise ValueError(f"invalid size {text!r}: write 24GiB, 24GB or 25769803776")
    num_bytes = int(float(match["number"]) * factor)
    if not unit and 0 < num_bytes < MIN_PLAIN_BYTES:
        number = match["number"]
        raise ValueError(f"invalid size {text!r}: add a unit, such as {number}GiB, {number}MiB or {number}B")
    return num_bytes


def _scaled(value: float, divisor: int, unit: str) -> str:
    scaled = value / divisor
    digits = 0 if divisor == 1 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:,.{digits}f} {unit}"
