"""Texts and lists of a payload as deflated JSON, which the page's worker unpacks with the columns."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any


def encode_json(value: Any) -> dict[str, str]:
    """Return a JSON value as ``{"json": base64 of the deflated text}``."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # Lone surrogates of a damaged name have no UTF-8.
    return {"json": base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 6)).decode("ascii")}
