"""Bytes on the command line, as people write them."""

from __future__ import annotations

import re
from typing import Any, Final

import click

_BINARY: Final = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)")


class ByteSize(click.ParamType[int]):
    """A number of bytes such as ``24GiB``, ``24G`` (the same), ``24GB`` (decimal) or ``25769803776``."""

    name = "bytes"

    def __init__(self, *, zero: bool = False) -> None:
        self._least = 0 if zero else 1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes; a usage error where the text is none."""
        if isinstance(value, int):
            return value
        found = _BYTES.fullmatch(str(value).strip())
        unit = found["unit"].upper() if found else ""
        size = _DECIMAL.get(unit, _BINARY.get(unit.removesuffix("IB")))
        if found is None or size is None or float(found["number"]) * size < self._least:
            self.fail(f"{value!r} is no number of bytes: write 24GiB, 24GB or 25769803776", param, ctx)
        return int(float(found["number"]) * size)


BYTES: Final = ByteSize()
BYTES_OR_NONE: Final = ByteSize(zero=True)
