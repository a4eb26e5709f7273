"""The data of one view: all that the page's own scripts draw of one rank and device, or of a window of it.

A file has the payload of the whole trace; a served page requests those of the windows that it shows. The scripts read
a payload in ``templates/source.js``; all columns are packed (:mod:`memtrace.dashboards.delta_encoding`) and unpacked in
a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memtrace.dashboards.address_space import KINDS, encode_address_space
from memtrace.dashboards.curve import encode_curve, encode_device_used, encode_failures
from memtrace.dashboards.explorer import encode_blocks
from memtrace.dashboards.lanes import encode_lanes
from memtrace.dashboards.palette import CATEGORY_COLORS, SERIES_COLORS, SIZE_COLORS, STACK_ORDER

from memtrace.analysis.peak import find_peak
from memtrace.categories import CATEGORY_LABELS, CATEGORY_MEANINGS
from memtrace.format.schema import CATEGORIES, PHASES

if TYPE_CHECKING:
    from memtrace.dashboards.source_lines import SourceOptions

    from memtrace.trace import Trace


@dataclass(frozen=True)
class Payload:
    """The data of a view; times are microseconds since the recording began, rows are those of the events table."""

    packed: dict[str, Any]
    """Packed columns by name: ``curve`` (time_us, event, bytes by category, allocated, reserved), ``device_used`` and
    ``failures`` (:mod:`memtrace.dashboards.curve`), ``steps``, ``phase_spans`` and ``lane_<kind>``
    (:mod:`memtrace.dashboards.lanes`), ``addresses`` (of the blocks) and ``segments``
    (:mod:`memtrace.dashboards.address_space`), and those of `EncodedBlocks`."""
    plain: dict[str, Any]
    """Everything else, as JSON: texts, call stacks, the peak, lanes, categories and their colors."""
    notes: dict[str, str]
    """Which part of the data the payload leaves out, by the widget that shows the data."""


MAX_CHARS: Final = 8_000_000
"""Size of a payload for which nothing is said of the size."""
_CURVE_SHARE: Final = 0.25
_LANES_SHARE: Final = 0.15
_BLOCKS_SHARE: Final = 0.55


def build_payload(
    trace: Trace, device: str, max_chars: int = MAX_CHARS, *, sources: SourceOptions | None = None
) -> Payload | None:
    """Return the payload of a device; None where the device has no blocks.

    Args:
        trace: A single-rank trace, or a window of one.
        device: One of ``trace.devices``.
        max_chars: Size of the payload in a file, about; it has fewer instants, blocks and spans where they do not fit.
        sources: Which source lines to add; None: none.
    """
    curve = encode_curve(trace, device, int(_CURVE_SHARE * max_chars))
    if curve is None:
        return None
    blocks = encode_blocks(trace, device, int(_BLOCKS_SHARE * max_chars), sources=sources)
    lanes = encode_lanes(trace, int(_LANES_SHARE * max_chars))
    top, info = find_peak(trace, device), trace.manifest.devices.get(device)
    return Payload(
        packed={
            "curve": curve.packed,
            "device_used": encode_device_used(trace, device),
            "failures": encode_failures(trace, device),
            **lanes.packed,
            **blocks.packed,
            **encode_address_space(trace, device, blocks.place),
        },
        plain={
            **blocks.plain,
            "device": device,
            "num_rows": trace.num_rows("events"),
            "has_times": trace.has_times,
            "peak": {"row": top.requested.event, "time_ns": top.time_ns, "bytes": top.requested.bytes},
            "capacity_bytes": info.total_bytes if info is not None else None,
            "categories": [
                {
                    "name": name,
                    "label": CATEGORY_LABELS[name],
                    "color": CATEGORY_COLORS[name],
                    "meaning": CATEGORY_MEANINGS[name],
                }
                for name in CATEGORIES
            ],
            "stack_order": [CATEGORIES.index(name) for name in STACK_ORDER],
            "phases": list(PHASES),
            "lanes": lanes.lanes,
            "segment_kinds": KINDS,
            "series_colors": SERIES_COLORS,
            "size_colors": SIZE_COLORS,
        },
        notes={"tracks": curve.note, "explorer": blocks.note},
    )
