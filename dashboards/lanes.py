"""Spans of time, packed for the page's lanes (``templates/track_lanes.js``): steps, phases, modules, operators, ranges,
waits for data and pipeline actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memtrace.dashboards.delta_encoding import encode_columns, encode_to_fit
from memtrace.dashboards.palette import BLUE, GRAY, ORANGE, PURPLE, VERMILION
from memtrace.dashboards.text import name_text

from memtrace.analysis.attribution import step_rows
from memtrace.format.schema import PHASES, SPAN_KINDS

if TYPE_CHECKING:
    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_SPANS: Final = 60_000
"""Most spans of a lane: the longest."""
MAX_ROWS: Final = 8
"""Most rows of a lane of nested spans; deeper ones are left out."""
DRAWN_PHASES: Final = ("forward", "backward", "optimizer")
_LANES: Final = (
    ("action", "pipeline"),
    ("gap", "not recorded"),
    ("data_wait", "data waits"),
    ("range", "ranges"),
    ("module", "modules"),
)
_ACTION_COLORS: Final = {"F": BLUE, "B": ORANGE, "I": VERMILION, "W": PURPLE}
"""Colors of forward, backward, input backward and weight backward, as in the figures of pipelines."""
_SHARE_OF_STEPS: Final = 0.1
_NUM_LANES: Final = len(_LANES) + 1


@dataclass(frozen=True)
class _Spans:
    """Spans of one lane; ``name`` is the id of a name, -1: none."""

    start_ns: Array
    end_ns: Array
    name: Array

    def take(self, rows: Array) -> _Spans:
        return _Spans(self.start_ns[rows], self.end_ns[rows], self.name[rows])


@dataclass(frozen=True)
class EncodedLanes:
    """The lanes of a payload."""

    packed: dict[str, Any]
    """``steps`` and ``phase_spans`` with columns start_us, end_us and index (number of a step; index in
    ``schema.PHASES``), and ``lane_<kind>`` with start_us, end_us, text (index of ``texts``) and row, ordered by row and
    start."""
    lanes: list[dict[str, Any]]
    """For every ``lane_<kind>`` that has spans: name, title, texts and note; of actions also the
    ``colors`` of the texts."""


def encode_lanes(trace: Trace, max_chars: int) -> EncodedLanes:
    """Return the spans of a single-rank trace in about ``max_chars`` characters."""
    packed = _encode_steps(trace, int(_SHARE_OF_STEPS * max_chars))
    lanes = []
    share = int((1 - 2 * _SHARE_OF_STEPS) * max_chars / _NUM_LANES)
    for kind, title in (*_LANES, ("operator", "operators")):
        spans = _operator_calls(trace) if kind == "operator" else _recorded_spans(trace, kind)
        if len(spans.start_ns):
            packed[f"lane_{kind}"], described = _encode_lane(trace, spans, share // 2)
            lanes.append({"name": f"lane_{kind}", "title": title, **described})
            if kind == "action":
                texts = described["texts"].items()
                lanes[-1]["colors"] = {name: _ACTION_COLORS.get(text[:1], GRAY) for name, text in texts}
    return EncodedLanes(packed, lanes)


def _recorded_spans(trace: Trace, kind: str) -> _Spans:
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    rows = np.flatnonzero((spans["kind"] == SPAN_KINDS.index(kind)) & (spans["duration_ns"] >= 0))
    start = spans["start_ns"][rows]
    return _Spans(start, start + spans["duration_ns"][rows], spans["name"][rows])


def _operator_calls(trace: Trace) -> _Spans:
    ops = trace.columns("ops", "name", "start_ns", "duration_ns")
    rows = np.flatnonzero((ops["start_ns"] >= 0) & (ops["duration_ns"] >= 0) & (ops["name"] >= 0))
    start = ops["start_ns"][rows]
    return _Spans(start, start + ops["duration_ns"][rows], ops["name"][rows])


def _encode_lane(trace: Trace, spans: _Spans, max_chars: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Encode the longest spans; texts get as many characters as the columns."""
    longest = np.argsort(spans.start_ns - spans.end_ns, kind="stable")

    def encode(max_spans: int) -> dict[str, Any]:
        kept = spans.take(np.sort(longest[:max_spans]))
        row = nesting_rows(kept.start_ns, kept.end_ns)
        shown = np.flatnonzero(row < MAX_ROWS)
        order = shown[np.lexsort((kept.start_ns[shown], row[shown]))]
        start, end = kept.start_ns[order] // 1000, kept.end_ns[order] // 1000
        return encode_columns({"start_us": start, "end_us": end, "text": kept.name[order], "row": row[order]})

    packed, max_spans = encode_to_fit(encode, MAX_SPANS, max_chars)
    texts: dict[int, str] = {}
    num_chars = 0
    ids, counts = np.unique(spans.name[longest[:max_spans]], return_counts=True)
    for identity in ids[np.argsort(-counts, kind="stable")].tolist():
        text = name_text(trace.name(identity) or "") if identity >= 0 else ""
        num_chars += len(text.encode())
        if num_chars > max_chars:
            break
        texts[identity] = text
    left_out = len(spans.start_ns) - packed["length"]
    note = f"the {packed['length']:,} longest of {len(spans.start_ns):,}" if left_out else ""
    return packed, {"texts": texts, "note": note}


def nesting_rows(start_ns: Array, end_ns: Array) -> Array:
    """Return a row for every span so that spans of one row do not overlap: 0 for the outermost.

    A span that begins while another one lasts is below it, whatever their threads.
    """
    row = np.zeros(len(start_ns), np.int64)
    order = np.lexsort((-end_ns, start_ns))
    ends: list[int] = []  # of the last span of each row
    starts, finishes = start_ns[order].tolist(), end_ns[order].tolist()
    for place, start, end in zip(order.tolist(), starts, finishes, strict=True):
        depth = len(ends)
        while depth and ends[depth - 1] <= start:
            depth -= 1
        if depth == len(ends):
            ends.append(end)
        else:
            ends[depth] = end
            del ends[depth + 1 :]
        row[place] = depth
    return row


def _encode_steps(trace: Trace, max_chars: int) -> dict[str, Any]:
    steps = step_rows(trace)
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    codes = {name: _phase_code(trace, name) for name in np.unique(spans["name"]).tolist()}
    rows = np.flatnonzero(spans["kind"] == SPAN_KINDS.index("phase"))
    phase = np.array([codes[name] for name in spans["name"][rows].tolist()], dtype=np.int64)
    rows, phase = rows[phase >= 0], phase[phase >= 0]
    start = spans["start_ns"][rows]
    end = start + np.maximum(spans["duration_ns"][rows], 0)
    return {
        "steps": encode_to_fit(
            _span_encoder(steps.start_ns, steps.start_ns + steps.duration_ns, steps.number), MAX_SPANS, max_chars
        )[0],
        "phase_spans": encode_to_fit(_span_encoder(start, end, phase), MAX_SPANS, max_chars)[0],
    }


def _phase_code(trace: Trace, name: int) -> int:
    text = trace.name(name) if name >= 0 else None
    return PHASES.index(text) if text in DRAWN_PHASES else -1


def _span_encoder(start_ns: Array, end_ns: Array, index: Array) -> Callable[[int], dict[str, Any]]:
    """Return a function that encodes the longest spans in the order of their starts."""

    def encode(max_spans: int) -> dict[str, Any]:
        longest = np.argsort(start_ns - end_ns, kind="stable")[:max_spans]
        order = longest[np.argsort(start_ns[longest], kind="stable")]
        columns = {"start_us": start_ns[order] // 1000, "end_us": end_ns[order] // 1000, "index": index[order]}
        return encode_columns(columns)

    return encode
