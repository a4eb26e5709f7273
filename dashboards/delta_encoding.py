"""Columns of integers packed small enough to travel inside a page, for zooming to full resolution.

Every column becomes differences (the first value counts from 0), zigzag-coded so that small steps down are small
numbers too, and split into byte planes; all planes together are deflated and written as base64. A browser undoes
this with ``atob``, ``DecompressionStream`` and a running sum (``unpack`` in ``templates/report.js``).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def pack(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Pack integer ``columns`` of one length, each within 2**53 of 0, in the order given.

    Returns ``{"length": n, "columns": [[name, number of byte planes], ...], "data": base64}``; plain JSON.
    """
    length = len(next(iter(columns.values()), ()))
    layout: list[tuple[str, int]] = []
    planes: list[bytes] = []
    for name, values in columns.items():
        if len(values) != length:
            raise ValueError(f"column {name!r} has {len(values)} values, the first column {length}")
        coded = _zigzag(np.ediff1d(np.asarray(values, dtype=np.int64), to_begin=np.asarray(values[:1], dtype=np.int64)))
        width = max(1, (int(coded.max(initial=0)).bit_length() + 7) // 8)
        layout.append((name, width))
        planes.append(coded.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())
    data = base64.b64encode(zlib.compress(b"".join(planes), 6)).decode("ascii")
    return {"length": length, "columns": layout, "data": data}


def _zigzag(values: NDArray[Any]) -> NDArray[np.uint64]:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)
