"""Access time intervals (ATI): how long blocks lie untouched between two accesses, and which could be swapped out then.

The swap inequality and the cost model are those of "Pinpointing the Memory Behaviors of DNN Training".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import KIND
from memtrace.analysis.block_accesses import tells_accesses
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 100)
SIZE_CLASSES = (
    (0, "< 4 KiB"),
    (4 << 10, "4 KiB to 64 KiB"),
    (64 << 10, "64 KiB to 1 MiB"),
    (1 << 20, "1 MiB to 16 MiB"),
    (16 << 20, ">= 16 MiB"),
)
TOP = 10


@dataclass(frozen=True)
class CopyCost:
    """Time of a copy of S bytes in one direction, in ns: ``start_ns`` + ``ns_per_byte`` * S."""

    start_ns: float
    ns_per_byte: float

    @property
    def gb_per_s(self) -> float:
        """The bandwidth, 10**9 bytes a second, start left out."""
        return 1 / self.ns_per_byte


@dataclass(frozen=True)
class Bandwidths:
    """The costs of copies out to the host and in again; ``source`` says whence."""

    out: CopyCost
    back: CopyCost
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``gb_per_s`` for each direction beside the costs."""
        return {
            "source": self.source,
            "out": asdict(self.out) | {"gb_per_s": self.out.gb_per_s},
            "in": asdict(self.back) | {"gb_per_s": self.back.gb_per_s},
        }


# A TITAN Xp on PCIe 3, as the authors fitted it: 6.40 and 6.35 GB/s, pinned memory.
PUBLISHED = Bandwidths(CopyCost(8242, 0.1563), CopyCost(12352, 0.1574), "the paper's TITAN Xp")


def given(out_gb_per_s: float, in_gb_per_s: float) -> Bandwidths:
    """Bandwidths in 10**9 bytes a second, copies starting at once. MemtraceError unless both are above 0."""
    if not (0 < out_gb_per_s < float("inf") and 0 < in_gb_per_s < float("inf")):
        raise MemtraceError(f"bandwidths of {out_gb_per_s} and {in_gb_per_s} GB/s make no sense: both must be above 0")
    return Bandwidths(CopyCost(0, 1 / out_gb_per_s), CopyCost(0, 1 / in_gb_per_s), "given")


def from_dict(told: Any) -> Bandwidths:
    """The bandwidths of ``doctor --bandwidth --json`` (or their part of it). MemtraceError where it is none."""
    try:
        told = told.get("bandwidth", told)
        out, back = (CopyCost(float(told[way]["start_ns"]), float(told[way]["ns_per_byte"])) for way in ("out", "in"))
        source = str(told.get("source", "a file"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MemtraceError("no bandwidths in it: give what memtrace doctor --bandwidth --json printed") from error
    if out.ns_per_byte <= 0 or back.ns_per_byte <= 0:
        raise MemtraceError("its bandwidths make no sense: a byte must take some time")
    return Bandwidths(out, back, source)


def largest_free_swap(interval_ns: float, costs: Bandwidths, linear: bool = True) -> float:
    """The most bytes that can go out and come back within an interval: S/B_out + S/B_in <= ATI, or with the starts
    of both copies (``linear``: the sum of a + b*S). 0 where the starts alone take longer."""
    left = interval_ns - (costs.out.start_ns + costs.back.start_ns if linear else 0)
    return max(left, 0.0) / (costs.out.ns_per_byte + costs.back.ns_per_byte)


@dataclass(frozen=True)
class Intervals:
    """Pairs of consecutive accesses, by block and time: the block, the rows of events of both, and ns between them.

    Accesses of one operator call count as one: between them the block is in use.
    """

    block: Array
    first_row: Array
    second_row: Array
    ns: Array


def intervals(trace: Trace) -> Intervals:
    """Every access time interval of a trace, worked out once; n log n. Empty where accesses were not recorded."""
    return trace.cached(_intervals)


def _intervals(trace: Trace) -> Intervals:
    events = trace.columns("events", "time_ns", "kind", "block_id", "op_id")
    rows = np.flatnonzero((events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"]))
    block = events["block_id"][rows]
    order = np.argsort(block, kind="stable")
    rows, block = rows[order], block[order]
    op = events["op_id"][rows]
    pair = (block[1:] == block[:-1]) & ((op[1:] != op[:-1]) | (op[1:] < 0))
    first, second = rows[:-1][pair], rows[1:][pair]
    # Threads may disorder times a little.
    waits = np.maximum(events["time_ns"][second] - events["time_ns"][first], 0)
    return Intervals(block[1:][pair], first, second, waits)


def swappable(trace: Trace, costs: Bandwidths, linear: bool = True, min_bytes: int = 0) -> Array:
    """Which intervals (places in ``Intervals``) are long enough for their block to go out and come back."""
    found = intervals(trace)
    size = blocks(trace).size[found.block]
    per_byte = costs.out.ns_per_byte + costs.back.ns_per_byte
    start = costs.out.start_ns + costs.back.start_ns if linear else 0.0
    fits: Array = np.flatnonzero((size * per_byte + start <= found.ns) & (size >= max(min_bytes, 1)))
    return fits


def covers_peak(trace: Trace, places: Array) -> Array:
    """Whether each interval (a place in ``Intervals``) spans the peak of its block's device."""
    found, device = intervals(trace), blocks(trace).device
    tops = np.array([find_peak(trace, name).requested.event for name in trace.devices], np.int64)
    top = tops[device[found.block[places]]]
    return (found.first_row[places] < top) & (top < found.second_row[places])


def swappable_at_peak(trace: Trace, costs: Bandwidths = PUBLISHED, min_bytes: int = 1 << 20) -> int | None:
    """Bytes of the blocks that lie untouched across the peak for long enough; None without recorded accesses."""
    found = intervals(trace)
    if not len(found.ns):
        return None
    places = swappable(trace, costs, True, min_bytes)
    at_peak = np.unique(found.block[places[covers_peak(trace, places)]])
    return int(blocks(trace).size[at_peak].sum())


def intervals_table(trace: Trace) -> pd.DataFrame:
    """One row an interval: block, bytes, category, site, start_ns, interval_ns, covers_peak."""
    import pandas as pd

    found, told = intervals(trace), blocks(trace)
    sites, place = allocation_sites(trace, told.stack[found.block])
    frame: pd.DataFrame = pd.DataFrame({
        "block_id": found.block,
        "bytes": told.size[found.block],
        "category": pd.Categorical.from_codes(told.category[found.block].tolist(), pd.Index(CATEGORIES)),
        "site": pd.Categorical.from_codes(place.tolist(), pd.Index(range(len(sites)))).map(dict(enumerate(sites))),
        "start_ns": trace.columns("events", "time_ns")["time_ns"][found.first_row],
        "interval_ns": found.ns,
        "covers_peak": covers_peak(trace, np.arange(len(found.ns))),
    })  # fmt: skip
    return frame


def access(trace: Trace, costs: Bandwidths = PUBLISHED, min_bytes: int = 1 << 20) -> dict[str, Any]:
    """What ``memtrace access --json`` prints. Bytes, ns; unknown None.

    ``num_intervals`` (None where no accesses are told), ``percentiles`` ({percent: ns}), ``by_category`` and
    ``by_size`` (name, num_intervals, median_ns, p90_ns), ``bandwidths``, ``min_bytes``, ``swappable`` and
    ``swappable_bandwidth_only`` (num_intervals, bytes of the distinct blocks, bytes_at_peak of those that lie untouched
    across the peak; None where no accesses are told), ``outliers``: the sites whose intervals of at least ``min_bytes``
    pass the linear model, the most bytes first (site, category, bytes of one block, num_intervals, median_ns, swap_ns
    of out and in, bytes_at_peak).
    """
    found, told = intervals(trace), blocks(trace)
    category, size = told.category[found.block], told.size[found.block]
    limits = np.array([limit for limit, _ in SIZE_CLASSES])
    size_class = np.searchsorted(limits, size, side="right") - 1
    return {
        "num_intervals": len(found.ns) if tells_accesses(trace) else None,
        "percentiles": {str(p): v for p, v in zip(PERCENTILES, _percentiles(found.ns, PERCENTILES), strict=True)},
        "by_category": _grouped(found.ns, category, CATEGORIES),
        "by_size": _grouped(found.ns, size_class, [name for _, name in SIZE_CLASSES]),
        "bandwidths": costs.as_dict(),
        "min_bytes": min_bytes,
        "swappable": _total(trace, swappable(trace, costs, True, min_bytes)),
        "swappable_bandwidth_only": _total(trace, swappable(trace, costs, False, min_bytes)),
        "outliers": _outliers(trace, costs, swappable(trace, costs, True, min_bytes)),
    }


def _percentiles(values: Array, wanted: tuple[int, ...]) -> list[int | None]:
    if not len(values):
        return [None] * len(wanted)
    return [int(value) for value in np.percentile(values, wanted, method="inverted_cdf")]


def _grouped(ns: Array, code: Array, names: tuple[str, ...] | list[str]) -> list[dict[str, Any]]:
    rows = []
    for number, name in enumerate(names):
        mine = ns[code == number]
        if len(mine):
            median, p90 = _percentiles(mine, (50, 90))
            rows.append({"name": name, "num_intervals": len(mine), "median_ns": median, "p90_ns": p90})
    return rows


def _total(trace: Trace, places: Array) -> dict[str, int | None]:
    found, size = intervals(trace), blocks(trace).size
    if not tells_accesses(trace):
        return dict.fromkeys(("num_intervals", "bytes", "bytes_at_peak"))
    at_peak = places[covers_peak(trace, places)]
    return {
        "num_intervals": len(places),
        "bytes": int(size[np.unique(found.block[places])].sum()),
        "bytes_at_peak": int(size[np.unique(found.block[at_peak])].sum()),
    }


def _outliers(trace: Trace, costs: Bandwidths, places: Array) -> list[dict[str, Any]]:
    from memtrace.analysis.block_signatures import combined

    if not len(places):
        return []
    found, told = intervals(trace), blocks(trace)
    block = found.block[places]
    spans_peak = covers_peak(trace, places)
    sites, line = allocation_sites(trace, told.stack[block])
    group = combined(line, told.category[block], told.size[block])
    _, sample, number = np.unique(group, return_index=True, return_counts=True)
    held = np.zeros(len(number), np.int64)
    np.add.at(held, group[spans_peak], told.size[block[spans_peak]])
    order = np.lexsort((-told.size[block[sample]] * number, -held))[:TOP]
    rows = []
    for one in order.tolist():
        first = int(block[sample[one]])
        size = int(told.size[first])
        swap = costs.out.start_ns + costs.back.start_ns + size * (costs.out.ns_per_byte + costs.back.ns_per_byte)
        rows.append({
            "site": sites[line[sample[one]]],
            "category": CATEGORIES[told.category[first]],
            "bytes": size,
            "num_intervals": int(number[one]),
            "median_ns": _percentiles(found.ns[places[group == one]], (50,))[0],
            "swap_ns": round(swap),
            "bytes_at_peak": int(held[one]),
        })  # fmt: skip
    return rows
