"""Packed columns in Python, as ``templates/worker.js`` unpacks them."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np


def unpack_columns(packed: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns that ``encode_columns`` encoded."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8)
    length, start, columns = packed["length"], 0, {}
    for name, width, factor, _ in packed["columns"]:
        bytes_of = planes[start : start + width * length].reshape(width, length)
        coded = sum(
            (bytes_of[plane].astype(np.int64) << (8 * plane) for plane in range(width)), np.zeros(length, np.int64)
        )
        columns[name] = np.cumsum((coded >> 1) ^ -(coded & 1)) * factor
        start += width * length
    return columns
