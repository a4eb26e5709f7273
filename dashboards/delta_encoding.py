"""Delta encoding: compresses columns of integers so that a page can hold a curve at full resolution.

A column is divided by the greatest common divisor of its values (sizes and addresses are multiples of 512 bytes) and
becomes differences (the first value is a difference from 0). The differences are zigzag-coded, so that small negative
numbers are small too, and split into byte planes. All planes together are deflated and written as base64. The browser
decodes them in a worker (``templates/worker.js``).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_VALUE: Final = 2**51 - 1
"""Largest value of a column: the code of a difference of two is below 2**53, so that a browser holds it exactly."""
_MARGIN: Final = 0.95
"""Share of the items that would fit if all took the same space: fewer are compressed less well."""
_LEVEL: Final = 6
"""Level of zlib. Level 9 takes up to three times as long and makes recorded traces 1 to 2 % smaller."""


def encode_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Encode columns of integers.

    Args:
        columns: Columns of one length, with absolute values up to ``MAX_VALUE``.

    Returns:
        A JSON object: ``{"length": n, "columns": [[name, number of byte planes, factor, fits], ...], "data": base64}``.
        Values are multiples of ``factor``; ``fits`` is 1 where they all fit into 32 bits, 0 otherwise.
    """
    length = len(next(iter(columns.values()), ()))
    layout: list[tuple[str, int, int, int]] = []
    planes: list[bytes] = []
    for name, values in columns.items():
        if len(values) != length:
            raise ValueError(f"column {name!r} has {len(values)} values and the first column {length}")
        whole = np.asarray(values, dtype=np.int64)
        fits = int(np.abs(whole).max(initial=0)) < 2**31
        factor = int(np.gcd.reduce(whole)) if length else 1
        if factor > 1:
            whole = whole // factor
        coded = _zigzag(np.ediff1d(whole, to_begin=whole[:1]))
        width = max(1, (int(coded.max(initial=0)).bit_length() + 7) // 8)
        layout.append((name, width, max(1, factor), int(fits)))
        planes.append(coded.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())
    data = base64.b64encode(zlib.compress(b"".join(planes), _LEVEL)).decode("ascii")
    return {"length": length, "columns": layout, "data": data}


def encode_to_fit(
    encode: Callable[[int], dict[str, Any]], max_items: int, max_chars: int
) -> tuple[dict[str, Any], int]:
    """Return columns of as many items as fit into a number of characters, and how many items were allowed.

    Args:
        encode: Encodes at most the given number of items.
        max_items: Number of items to begin with.
        max_chars: Most characters of the packed data.
    """
    while True:
        packed = encode(max_items)
        num_chars = len(packed["data"])
        if num_chars <= max_chars or max_items <= 1:
            return packed, max_items
        max_items = max(1, int(_MARGIN * min(max_items, packed["length"]) * max_chars / num_chars))


def _zigzag(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)
