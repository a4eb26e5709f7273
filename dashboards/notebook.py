"""Traces, recordings and results as HTML for notebooks: tables without scripts, readable on light and dark pages.

Colors of text and lines are those of the notebook. A trace is shown by its key figures and its curve; every result of
an analysis or a planner, by its fields. Text of a trace is escaped, and everything is bounded in size and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from markupsafe import Markup, escape
from memtrace.dashboards.inline_svg import stacked_curve
from memtrace.dashboards.text import name_text

from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.rank_summary import fullest_device_peak
from memtrace.analysis.summary import summarize_peak
from memtrace.categories import CATEGORY_LABELS
from memtrace.errors import MemtraceError
from memtrace.trace import Trace, load
from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.analysis.summary import PeakSummary

MAX_EVENTS: Final = 3_000_000
"""Largest number of events of a trace that is analyzed for its display."""
MAX_RANKS: Final = 8
"""Largest number of ranks whose key figures are shown."""
MAX_ROWS: Final = 12
"""Largest number of rows of a nested table."""
MAX_DEPTH: Final = 3
"""Depth to which results within results are shown."""
MAX_TEXT_CHARS: Final = 300
_CELL: Final = "text-align:left;padding:0.15em 0.9em 0.15em 0;vertical-align:top"


def to_html(value: object) -> str:
    """Return a value as a piece of HTML: a trace, a recording, or a result."""
    if isinstance(value, Trace):
        body = _trace_html(value)
    elif hasattr(value, "is_recording"):
        body = _recording_html(value)
    else:
        body = _result_html(value)
    return Markup('<div class="memtrace">{}</div>').format(body)


def _trace_html(trace: Trace) -> Markup:
    title = Markup("<b>memtrace trace</b> <code>{}</code>").format(name_text(trace.path or "in memory"))
    try:
        return Markup("<div>{}</div>{}").format(title, Markup("").join(_describe_trace(trace)))
    except MemtraceError as error:
        return Markup("<div>{}: {}</div>").format(title, name_text(error, MAX_TEXT_CHARS))


def _describe_trace(trace: Trace) -> Iterator[Markup]:
    unfinished = [rank for rank in trace.ranks if _manifest_says_unfinished(trace, rank)]
    if unfinished:
        yield Markup(
            "<div>The recording is still running, or ended without closing the trace: this is what was written so "
            "far.</div>"
        )
    if len(trace.ranks) > 1:
        yield from _describe_ranks(trace)
        return
    (number,) = trace.ranks
    rank = trace.rank(number)
    num_events = rank.num_rows("events")
    if num_events == 0:
        yield Markup("<div>No events have been written yet.</div>") if unfinished else Markup("<div>No events.</div>")
    elif num_events > MAX_EVENTS:
        yield Markup("<div>{}. Open a window of steps, such as trace.window(10, 12), or draw a page: memtrace "
                     "report.</div>").format(format_count(num_events, "event"))  # fmt: skip
    else:
        yield from _describe_rank(rank)


def _manifest_says_unfinished(trace: Trace, rank: int) -> bool:
    coverage = trace.rank(rank).manifest
    return coverage.source.kind == "recording" and not coverage.finished


def _describe_rank(trace: Trace) -> Iterator[Markup]:
    """Yield the key figures of a single-rank trace and the curve of its fullest device."""
    coverage = compute_coverage(trace)
    top = fullest_device_peak(trace)
    facts = [("events", f"{coverage.num_events:,}"), ("steps", f"{coverage.num_steps:,}")]
    if coverage.first_event_ns is not None and coverage.last_event_ns is not None:
        facts.append(("recorded time", format_duration(coverage.last_event_ns - coverage.first_event_ns)))
    if top is None:
        yield _fact_table(facts)
        return
    peak = summarize_peak(trace, top.device)
    facts += _peak_facts(top.device, peak)
    yield _fact_table(facts)
    yield stacked_curve(trace, top.device)


def _peak_facts(device: str, peak: PeakSummary) -> Iterator[tuple[str, str]]:
    where = "" if peak.step is None else f" (step {peak.step}{f', {peak.phase}' if peak.phase else ''})"
    yield f"peak on {device}", f"{format_bytes(peak.bytes)}{where}"
    if peak.by_category:
        category = max(peak.by_category, key=lambda name: peak.by_category[name])
        size = peak.by_category[category]
        yield (
            "largest category",
            (f"{CATEGORY_LABELS[category]}, {format_bytes(size)} ({format_share(size, peak.bytes)} of the peak)"),
        )


def _describe_ranks(trace: Trace) -> Iterator[Markup]:
    yield Markup("<div>{}</div>").format(format_count(len(trace.ranks), "rank"))
    num_events = sum(rank.num_rows("events") for rank in trace.each_rank()) if len(trace.ranks) <= MAX_RANKS else None
    if num_events is None or num_events > MAX_EVENTS:
        yield Markup(
            "<div>memtrace.plots.ranks(trace) draws all of them; trace.rank({}) is the first one.</div>"
        ).format(trace.ranks[0])
        return
    tops = {rank.ranks[0]: fullest_device_peak(rank) for rank in trace.each_rank()}
    yield _fact_table(
        [
            (f"rank {number}", UNKNOWN if top is None else f"peak {format_bytes(top.requested.bytes)} on {top.device}")
            for number, top in tops.items()
        ]
    )
    highest = max(tops, key=lambda number: -1 if tops[number] is None else tops[number].requested.bytes)  # type: ignore[union-attr]
    top = tops[highest]
    if top is not None:
        yield Markup("<div>rank {}, {}</div>").format(highest, top.device)
        yield stacked_curve(trace.rank(highest), top.device)


def _recording_html(recording: Any) -> Markup:
    path = name_text(recording.path)
    if recording.is_recording:
        return Markup("<b>memtrace recording</b> is running; it writes to <code>{}</code>.").format(path)
    if not recording.has_ended:
        return Markup("<b>memtrace recording</b> has not started; it will write to <code>{}</code>.").format(path)
    try:
        return _trace_html(load(recording.path))
    except MemtraceError as error:
        return Markup("<b>memtrace recording</b>: {}").format(name_text(error, MAX_TEXT_CHARS))


def _result_html(value: object) -> Markup:
    title = Markup("<b>{}</b>").format(type(value).__name__)
    return Markup("<div>{}</div>{}").format(title, _value_html("", value, 0))


def _value_html(name: str, value: object, depth: int) -> Markup:
    """Return a field of a result; its name tells the unit of a number."""
    if is_dataclass(value) and not isinstance(value, type):
        if depth >= MAX_DEPTH:
            return escape(type(value).__name__)
        return _fact_table([(field.name, _field_html(value, field, depth)) for field in fields(value) if field.repr])
    if isinstance(value, Mapping):
        shown = list(value.items())[:MAX_ROWS]
        facts = [(name_text(key), _value_html(f"{key} {name}", item, depth + 1)) for key, item in shown]
        return _fact_table(facts) + _left_out(len(value))
    if isinstance(value, np.ndarray):
        return escape(f"{len(value):,} values") if value.ndim else escape(str(value))
    if isinstance(value, str):
        return escape(name_text(value, MAX_TEXT_CHARS))
    if isinstance(value, Sequence):
        return _sequence_html(name, value, depth)
    return escape(_format_number(name, value))


def _field_html(value: Any, field: Field[Any], depth: int) -> Markup:
    return _value_html(field.name, getattr(value, field.name), depth + 1)


def _sequence_html(name: str, values: Sequence[Any], depth: int) -> Markup:
    if not values:
        return escape("none")
    shown = values[:MAX_ROWS]
    first = shown[0]
    if len(values) == 1:
        return _value_html(name, first, depth)
    if all(is_dataclass(item) and type(item) is type(first) for item in shown):
        if depth >= MAX_DEPTH:
            return escape(f"{len(values):,} x {type(first).__name__}")
        columns = [field.name for field in fields(first) if field.repr]
        rows = [[_value_html(column, getattr(item, column), depth + 1) for column in columns] for item in shown]
        return _table(columns, rows) + _left_out(len(values))
    items = Markup(", ").join(_value_html(name, item, depth + 1) for item in shown)
    return items + _left_out(len(values))


def _left_out(num_values: int) -> Markup:
    hidden = num_values - MAX_ROWS
    return Markup("<div>{} more</div>").format(f"{hidden:,}") if hidden > 0 else Markup("")


def _format_number(name: str, value: object) -> str:
    """Format a number by the unit in the name of its field: ``_bytes``, ``_ns`` or ``_s``."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float | np.number):
        return name_text(value, MAX_TEXT_CHARS)
    words = name.replace("_", " ").split()
    number = float(value)
    if "bytes" in words or words[-2:] == ["by", "category"]:
        return f"{'-' if number < 0 else ''}{format_bytes(abs(number))}"
    if words[-1:] == ["ns"]:
        return format_duration(number)
    if words[-1:] == ["s"]:
        return format_duration(1e9 * number)
    return f"{value:,}" if isinstance(value, int) else f"{number:,.4g}"


def _fact_table(facts: Sequence[tuple[str, str | Markup]]) -> Markup:
    row = Markup(
        f'<tr style="background:none"><td style="{_CELL};opacity:0.75">{{}}</td><td style="{_CELL}">{{}}</td></tr>'
    )
    rows = Markup("").join(row.format(term, value) for term, value in facts)
    return Markup('<table style="margin:0.3em 0;border:none">{}</table>').format(rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Markup]]) -> Markup:
    head = Markup("").join(Markup(f'<th style="{_CELL}">{{}}</th>').format(column) for column in columns)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(Markup(f'<td style="{_CELL}">{{}}</td>').format(cell) for cell in row)
        )
        for row in rows
    )
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, body)
