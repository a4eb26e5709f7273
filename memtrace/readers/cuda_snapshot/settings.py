"""Reads the settings of the allocator in a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from memtrace.readers.tables import clean


def plain_settings(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the settings as JSON values; values other than strings, numbers and dicts of numbers are left out."""
    plain: dict[str, Any] = {}
    for key, value in settings.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, str):
            plain[clean(key)] = clean(value)
        elif _is_number(value):
            plain[clean(key)] = value
        elif isinstance(value, dict):
            plain[clean(key)] = {clean(name): number for name, number in value.items() if _is_number(number)}
    return plain


def _is_number(value: object) -> bool:
    return (isinstance(value, int) and value.bit_length() < 64) or (isinstance(value, float) and isfinite(value))
