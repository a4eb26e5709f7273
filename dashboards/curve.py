"""The curve of live bytes and the spans of steps and phases, packed for the page (``templates/tracks.js``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memtrace.dashboards.delta_encoding import encode_columns

from memtrace.analysis import steps_table
from memtrace.analysis.timeline import compute_timeline
from memtrace.format.schema import CATEGORIES, PHASES, SPAN_KINDS

if TYPE_CHECKING:
    import pandas as pd

    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_POINTS: Final = 200_000
"""Most instants of the curve."""
MAX_BYTES: Final = 2_500_000
"""Most characters of base64 of the curve; it has fewer instants where they do not fit."""
MAX_SPANS: Final = 30_000
"""Most steps, and most phases, in their lanes."""
DRAWN_PHASES: Final = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class EncodedCurve:
    """The finest curve that fits ``MAX_BYTES``."""

    packed: dict[str, Any]
    """Result of ``encode_columns``: time_us, event and a column of bytes per category and line."""
    num_points: int
    is_complete: bool
    """Whether the curve has every change of the recording."""

    @property
    def note(self) -> str:
        """What the curve leaves out."""
        if self.is_complete:
            return f"Zoom in to see each of the {self.num_points:,} changes."
        return (
            f"The curve has {self.num_points:,} instants of a longer recording: it shows the highest value between two "
            "instants, but not every change."
        )


def encode_curve(trace: Trace, device: str) -> EncodedCurve | None:
    """Return the curve of a device; None where it has no allocations."""
    max_points = MAX_POINTS
    while True:
        table = compute_timeline(trace, device, max_points=max_points)
        if table.empty:
            return None
        columns = {"time_us": _integers(table["time_ns"]) // 1000, "event": _integers(table["event"])}
        for name in (*CATEGORIES, "allocated", "reserved"):
            if not table[name].isna().any():
                columns[name] = _integers(table[name])
        packed = encode_columns(columns)
        if len(packed["data"]) <= MAX_BYTES:
            return EncodedCurve(packed, len(table), is_complete=len(table) < max_points)
        max_points //= 2


def encode_spans(trace: Trace) -> dict[str, Any]:
    """Return ``steps`` and ``phases`` as packed columns start_us, end_us, index.

    ``index`` is the number of a step, and for a phase its index in ``schema.PHASES``.
    """
    steps = steps_table(trace)
    step_start = _integers(steps["start_ns"])
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    names = {name: trace.name(name) for name in np.unique(spans["name"]).tolist()}
    codes = {name: PHASES.index(text) for name, text in names.items() if text in DRAWN_PHASES}
    is_phase = (spans["kind"] == SPAN_KINDS.index("phase")) & np.isin(spans["name"], list(codes))
    phase = np.array([codes[name] for name in spans["name"][is_phase].tolist()], dtype=np.int64)
    start, duration = spans["start_ns"][is_phase], spans["duration_ns"][is_phase]
    return {
        "steps": _encode_span_rows(step_start, step_start + _integers(steps["duration_ns"]), _integers(steps["step"])),
        "phases": _encode_span_rows(start, start + np.maximum(duration, 0), phase),
    }


def _encode_span_rows(start_ns: Array, end_ns: Array, index: Array) -> dict[str, Any]:
    """Encode spans in the order of their starts; of more than ``MAX_SPANS``, the longest."""
    longest = np.argsort(start_ns - end_ns, kind="stable")[:MAX_SPANS]
    order = longest[np.argsort(start_ns[longest], kind="stable")]
    return encode_columns({"start_us": start_ns[order] // 1000, "end_us": end_ns[order] // 1000, "index": index[order]})


def _integers(column: pd.Series[Any]) -> Array:
    """Return a column without NA as int64."""
    return column.to_numpy(dtype=np.int64)
