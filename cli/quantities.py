"""Option types of the command line for sizes in bytes."""

from __future__ import annotations

from typing import Any, Final

import click

from memtrace.units import parse_bytes


class ByteSize(click.ParamType[int]):
    """A size such as ``24GiB``, ``24G`` (the same), ``24GB`` (decimal) or ``25769803776``.

    Args:
        allow_zero: Whether 0 is a valid size.
    """

    name = "size"

    def __init__(self, *, allow_zero: bool = False) -> None:
        self._min_bytes = 0 if allow_zero else 1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes; fail with a usage error where the text is not a size."""
        if isinstance(value, int):
            return value
        try:
            num_bytes = parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if num_bytes < self._min_bytes:
            self.fail(f"invalid size {value!r}: it must be positive", param, ctx)
        return num_bytes


BYTES: Final = ByteSize()
"""A positive size."""
BYTES_OR_ZERO: Final = ByteSize(allow_zero=True)
"""A size that may be 0."""
