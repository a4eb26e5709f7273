"""Assembles the page: one HTML file that needs no network and whose size is bounded for every trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from memtrace.dashboards import overview, pipeline, ranks
from memtrace.dashboards.assets import CONTENT_SECURITY_POLICY, inline_sources, script_safe
from memtrace.dashboards.contents import DEVICE_SECTIONS, GLOSSARY
from memtrace.dashboards.palette import THEMES, plotly_template
from memtrace.dashboards.payload import Payload, build_payload
from memtrace.dashboards.sections import Section, Table
from memtrace.dashboards.source_lines import SourceOptions
from memtrace.dashboards.text import name_text

from memtrace import __version__
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.analysis.rank_overview import survey_ranks
from memtrace.categories import CATEGORY_LABELS, CATEGORY_MEANINGS
from memtrace.planning.verdict import choose_rank, order_devices
from memtrace.units import format_count, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.prediction import PipelinePrediction
    from memtrace.trace import Trace

MAX_VIEWS: Final = 4
"""Most pairs of rank and device on one page; each has figures of its own."""

MAX_PAGE_BYTES: Final = 12_000_000
"""Size of the largest page; the payloads of its views share what figures and tables leave of it."""
_MARKUP_BYTES: Final = 1_500_000
"""Room for scripts, plotly.js and the markup around tables."""

SCRIPTS: Final = (
    "format.js",
    "figures.js",
    "store.js",
    "axis.js",
    "block_columns.js",
    "source.js",
    "block_fields.js",
    "block_query.js",
    "block_selection.js",
    "colors.js",
    "pixels.js",
    "track_layers.js",
    "track_curve.js",
    "track_lanes.js",
    "track_addresses.js",
    "track_elements.js",
    "navigation.js",
    "tracks.js",
    "block_tree.js",
    "flame.js",
    "block_table.js",
    "block_detail.js",
    "block_filters.js",
    "explorer.js",
    "served.js",
    "report.js",
)
"""Scripts of the page in ``templates/``, in the order in which they use each other; they share one scope."""


@dataclass(frozen=True)
class Panel:
    """A section with its content rendered."""

    anchor: str
    title: str
    explanation: str
    absent: str
    columns: int
    height: int
    figure: Markup | None
    """JSON of the plotly figure."""
    table: Table | None
    widget: str
    """Name of the widget, or empty."""
    note: str

    @property
    def has_content(self) -> bool:
        """Whether the section has a figure, a table or a widget."""
        return self.figure is not None or self.table is not None or bool(self.widget)


def report(
    trace: Trace,
    output: str | Path,
    *,
    prediction: PipelinePrediction | None = None,
    options: AnalysisOptions = DEFAULT_OPTIONS,
    sources: SourceOptions | None = None,
) -> Path:
    """Write the page of a trace.

    Args:
        trace: A trace of one or several ranks.
        output: Path of the HTML file.
        prediction: Predicted pipeline to show next to the recorded one.
        options: What the user states about the machine, and thresholds.
        sources: Which source files the page may contain lines of; None: those that the trace names, if this machine
            recorded it.

    Returns:
        The path of the HTML file.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(output)
    temporary = target.with_name(f".{target.name}.tmp")
    text = render(trace, prediction=prediction, options=options, sources=sources)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(target)
    return target


def render(
    trace: Trace,
    *,
    prediction: PipelinePrediction | None = None,
    options: AnalysisOptions = DEFAULT_OPTIONS,
    sources: SourceOptions | None = None,
) -> str:
    """Return the page as HTML; the arguments are those of ``report``."""
    pairs, num_left_out = _choose_views(trace)
    job_panels = [render_panel(section, trace) for section in (*ranks.sections(pairs), *pipeline.SECTIONS)]
    if prediction is not None:
        job_panels += [render_panel(section, prediction) for section in pipeline.PREDICTION_SECTIONS]
    drawn = [_render_sections(trace.rank(rank), device, options) for rank, device in pairs]
    panels = [*job_panels, *(panel for sections in drawn for panel in sections if panel is not None)]
    num_used = sum(len(repr(panel).encode()) for panel in panels)
    max_chars = max(0, MAX_PAGE_BYTES - _MARKUP_BYTES - num_used) // max(1, len(drawn))
    views = [
        _render_view(
            trace.rank(rank),
            rank,
            device,
            len(trace.ranks),
            sections,
            options=options,
            max_chars=max_chars,
            sources=sources or SourceOptions(),
        )
        for (rank, device), sections in zip(pairs, drawn, strict=True)
    ]
    return fill_template(
        name_text(trace.path.name if trace.path else "trace"),
        views,
        views_note=_left_out_note(num_left_out),
        job_panels=[panel for panel in job_panels if panel.has_content],
    )


def fill_template(
    title: str,
    views: Sequence[dict[str, Any]],
    *,
    views_note: str = "",
    job_panels: Sequence[Panel] = (),
    served: str | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        title: Name of the trace.
        views: What the template shows of each rank and device.
        views_note: Which views are left out.
        job_panels: Sections of the whole job.
        served: JSON for the scripts of a page that gets its data from a server; None: the page is a file.
    """
    environment = Environment(loader=PackageLoader("memtrace.dashboards"), autoescape=True, trim_blocks=True)
    environment.globals.update(zip=zip, format_share=format_share)
    return environment.get_template("report.html").render(
        title=title,
        version=__version__,
        views=views,
        views_note=views_note,
        job_panels=job_panels,
        glossary=GLOSSARY,
        category_meanings=CATEGORY_MEANINGS,
        category_labels=CATEGORY_LABELS,
        content_security_policy=CONTENT_SECURITY_POLICY + ("; connect-src 'self'" if served is not None else ""),
        served=None if served is None else script_safe(served),
        themes=_json({name: {"template": plotly_template(name), "colors": THEMES[name]} for name in THEMES}),
        inline=inline_sources(environment, SCRIPTS),
    )


def _choose_views(trace: Trace) -> tuple[list[tuple[int, str]], int]:
    """Return the pairs of rank and device that the page shows, and how many ranks or devices it leaves out."""
    first = choose_rank(trace)
    outliers = {outlier.rank for outlier in survey_ranks(trace).outliers} if len(trace.ranks) > 1 else set()
    numbers = sorted(trace.ranks, key=lambda rank: (rank != first, rank not in outliers))
    # Of many ranks only those that can be shown are opened.
    pairs = [(rank, device) for rank in numbers[:MAX_VIEWS] for device in order_devices(trace.rank(rank))]
    return pairs[:MAX_VIEWS], max(len(pairs) - MAX_VIEWS, 0) + max(len(numbers) - MAX_VIEWS, 0)


def _left_out_note(num_left_out: int) -> str:
    if num_left_out <= 0:
        return ""
    views = format_count(num_left_out, "more rank or device", "more ranks or devices")
    return f"This page leaves out {views}. Write a page for one rank with memtrace report --rank N."


def _render_sections(trace: Trace, device: str, options: AnalysisOptions) -> list[Panel | None]:
    """Render the sections of a view except for its widgets, which are None."""
    return [
        None if isinstance(section.build, str) else render_device_panel(section, trace, device, options)
        for section in DEVICE_SECTIONS
    ]


def _render_view(
    trace: Trace,
    rank: int,
    device: str,
    num_ranks: int,
    sections: list[Panel | None],
    *,
    options: AnalysisOptions,
    max_chars: int,
    sources: SourceOptions,
) -> dict[str, Any]:
    payload = build_payload(trace, device, max_chars, sources=sources)
    panels = [
        _render_widget(section, payload) if panel is None else panel
        for section, panel in zip(DEVICE_SECTIONS, sections, strict=True)
    ]
    return {
        "id": view_id(rank, device),
        "label": f"rank {rank}, {device}" if num_ranks > 1 else device,
        "group": f"rank {rank}",
        "panels": [panel for panel in panels if panel.has_content or panel.absent],
        "payload": payload and _json({"packed": payload.packed, "plain": payload.plain}),
        **vars(overview.build_overview(trace, device, options)),
    }


def view_id(rank: int, device: str) -> str:
    """Return the identifier of a view in the document and in addresses."""
    return f"{rank}-{device.replace(':', '-')}"


def _render_widget(section: Section, payload: Payload | None) -> Panel:
    widget = section.build if isinstance(section.build, str) and payload is not None else ""
    return _make_panel(section, widget=widget, note=payload.notes[widget] if payload is not None else "")


def render_device_panel(
    section: Section, trace: Trace, device: str, options: AnalysisOptions = DEFAULT_OPTIONS
) -> Panel:
    """Render a section of one device."""
    return render_panel(section, trace, device, *([options] if section.takes_options else []))


def render_panel(section: Section, *arguments: Any) -> Panel:
    """Render a section with a build function; the arguments are those of the function."""
    assert callable(section.build)
    content = section.build(*arguments)
    if content is None or isinstance(content, Table):
        return _make_panel(section, table=content)
    note = (content.layout.meta or {}).get("note", "")
    content.layout.template = None
    return _make_panel(section, figure=script_safe(content.to_json()), note=note)


def make_widget_panel(section: Section) -> Panel:
    """Return the panel of a widget whose data come from a server."""
    assert isinstance(section.build, str)
    return _make_panel(section, widget=section.build)


def _make_panel(
    section: Section, *, figure: Markup | None = None, table: Table | None = None, widget: str = "", note: str = ""
) -> Panel:
    return Panel(section.anchor, section.title, section.explanation, section.absent, section.columns, section.height,
                 figure, table, widget, note)  # fmt: skip


def _json(value: Any) -> Markup:
    return script_safe(json.dumps(value, sort_keys=True))
