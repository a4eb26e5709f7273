"""The data of one view: all that the page's own scripts draw of one rank and device, or of a window of it.

A file has the payload of the whole trace; a served page requests those of the windows that it shows. The scripts read
a payload in ``templates/source.js``; all columns are packed (:mod:`memtrace.dashboards.delta_encoding`) and unpacked in
a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memtrace.dashboards.curve import encode_curve, encode_spans
from memtrace.dashboards.explorer import encode_blocks
from memtrace.dashboards.palette import CATEGORY_COLORS, STACK_ORDER

from memtrace.analysis.peak import find_peak
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.schema import CATEGORIES, PHASES

if TYPE_CHECKING:
    from memtrace.trace import Trace


@dataclass(frozen=True)
class Payload:
    """The data of a view; times are microseconds since the recording began, rows are those of the events table."""

    packed: dict[str, Any]
    """Packed columns by name: ``curve`` (time_us, event, bytes by category, allocated, reserved), ``steps`` and
    ``phases`` (start_us, end_us, index) and ``blocks``."""
    plain: dict[str, Any]
    """Everything else, as JSON: texts, call stacks, the peak, categories and their colors."""
    note: str
    """Which part of the data the payload leaves out."""


def build_payload(trace: Trace, device: str) -> Payload | None:
    """Return the payload of a device of a single-rank trace; None where the device has no blocks."""
    curve = encode_curve(trace, device)
    if curve is None:
        return None
    blocks = encode_blocks(trace, device)
    top = find_peak(trace, device)
    return Payload(
        packed={"curve": curve.packed, "blocks": blocks.packed, **encode_spans(trace)},
        plain={
            **blocks.texts,
            "device": device,
            "num_rows": trace.num_rows("events"),
            "is_complete": curve.is_complete,
            "peak": {"row": top.requested.event, "time_ns": top.time_ns, "bytes": top.requested.bytes},
            "categories": [
                {"name": name, "label": CATEGORY_LABELS[name], "color": CATEGORY_COLORS[name]} for name in CATEGORIES
            ],
            "stack_order": [CATEGORIES.index(name) for name in STACK_ORDER],
            "phases": list(PHASES),
        },
        note=" ".join(filter(None, (curve.note, blocks.note))),
    )
