"""Delta encoding: compresses columns of integers so that a page can hold a curve at full resolution.

Each column becomes differences (the first value is a difference from 0). The differences are zigzag-coded, so that
small negative numbers are small too, and split into byte planes. All planes together are deflated and written as
base64. The browser decodes them with ``atob``, ``DecompressionStream`` and a running sum (``memtraceDecode`` in
``templates/timeline.js``).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def encode_columns(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Encode columns of integers.

    Args:
        columns: Columns of one length; the absolute values are below 2**53, so that a browser holds them exactly.

    Returns:
        A JSON object: ``{"length": n, "columns": [[name, number of byte planes], ...], "data": base64}``.
    """
    length = len(next(iter(columns.values()), ()))
    layout: list[tuple[str, int]] = []
    planes: list[bytes] = []
    for name, values in columns.items():
        if len(values) != length:
            raise ValueError(f"column {name!r} has {len(values)} values and the first column {length}")
        coded = _zigzag(np.ediff1d(np.asarray(values, dtype=np.int64), to_begin=np.asarray(values[:1], dtype=np.int64)))
        width = max(1, (int(coded.max(initial=0)).bit_length() + 7) // 8)
        layout.append((name, width))
        planes.append(coded.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())
    data = base64.b64encode(zlib.compress(b"".join(planes), 6)).decode("ascii")
    return {"length": length, "columns": layout, "data": data}


def _zigzag(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ..."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)
