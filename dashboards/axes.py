"""Ticks of logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from memtrace.units import format_duration


def duration_ticks(lengths_ns: Iterable[Any]) -> dict[str, Any]:
    """Return ticks of an axis in microseconds at powers of ten, with their texts.

    Args:
        lengths_ns: arrays of durations in nanoseconds, all above 0, which the axis must cover.
    """
    values = np.concatenate(list(lengths_ns))
    lowest, highest = np.floor(np.log10(values.min())), np.ceil(np.log10(values.max()))
    ticks_ns = 10.0 ** np.arange(lowest, highest + 1)
    return {"tickvals": ticks_ns / 1e3, "ticktext": [format_duration(tick) for tick in ticks_ns.tolist()]}
