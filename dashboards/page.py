"""Assembles the page: one HTML file that needs no network and whose size is bounded for every trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
from memtrace.analysis.rank_reports import analyze_reports, rank_reports
from memtrace.analysis.rank_results import RankAnalyzer, analyze_here, find_unreadable_ranks
from memtrace.categories import CATEGORY_LABELS, CATEGORY_MEANINGS
from memtrace.errors import MemtraceError
from memtrace.format.storage import AnyPath, to_path
from memtrace.format.storage_writer import local_output
from memtrace.pipeline.measured import analyze_pipeline
from memtrace.planning.verdict import choose_rank, order_devices
from memtrace.units import format_count, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.prediction import PipelinePrediction
    from memtrace.trace import Trace

MAX_VIEWS: Final = 4
"""Most pairs of rank and device on one page; each has figures of its own."""

MAX_NAMED_RANKS: Final = 3
"""Most ranks that cannot be read whose reasons the page states above its views."""
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
    output: str | AnyPath,
    *,
    prediction: PipelinePrediction | None = None,
    options: AnalysisOptions = DEFAULT_OPTIONS,
    sources: SourceOptions | None = None,
    analyze: RankAnalyzer = analyze_here,
) -> AnyPath:
    """Write the page of a trace.

    Args:
        trace: A trace of one or several ranks.
        output: Path of the HTML file, or its URL in a storage.
        prediction: Predicted pipeline to show next to the recorded one.
        options: What the user states about the machine, and thresholds.
        sources: Which source files the page may contain lines of; None: those that the trace names, if this machine
            recorded it.
        analyze: Computes what the page shows of each rank, in this process or in others.

    Returns:
        The path of the HTML file.

    Raises:
        OSError: The file cannot be written.
        MemtraceError: No rank can be read.
    """
    text = render(trace, prediction=prediction, options=options, sources=sources, analyze=analyze)
    with local_output(output) as target:
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    return to_path(output)


def render(
    trace: Trace,
    *,
    prediction: PipelinePrediction | None = None,
    options: AnalysisOptions = DEFAULT_OPTIONS,
    sources: SourceOptions | None = None,
    analyze: RankAnalyzer = analyze_here,
) -> str:
    """Return the page as HTML; the arguments are those of ``report``."""
    trace = analyze_reports(trace, analyze)
    trace = analyze(trace, order_devices, task="finding devices", ranks=_ranks_by_interest(trace)[:MAX_VIEWS])
    pairs, num_left_out = _choose_views(trace)
    job_panels = [render_panel(section, trace) for section in ranks.sections(pairs)]
    job_panels += _render_pipeline(trace, analyze)
    if prediction is not None:
        job_panels += [render_panel(section, prediction) for section in pipeline.PREDICTION_SECTIONS]
    drawing = Drawing(
        devices=pairs,
        num_ranks=len(trace.ranks),
        options=options,
        sources=sources or SourceOptions(),
        max_chars=(MAX_PAGE_BYTES - _MARKUP_BYTES - _count_bytes(job_panels)) // max(1, len(pairs)),
    )
    trace = analyze(trace, draw_rank, drawing, task="drawing", ranks=[rank for rank, _ in pairs])
    shown = [rank for rank in dict.fromkeys(rank for rank, _ in pairs) if rank in trace.ranks]
    return fill_template(
        name_text(trace.path.name if trace.path else "trace"),
        [view for rank in shown for view in trace.rank_result(rank, draw_rank, drawing)],
        views_note=_left_out_note(trace, num_left_out),
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


def _render_pipeline(trace: Trace, analyze: RankAnalyzer) -> list[Panel]:
    """Render the sections of a recorded pipeline; none where its actions cannot be read."""
    try:
        trace = analyze_pipeline(trace, analyze)
    except MemtraceError:
        return []
    return [render_panel(section, trace) for section in pipeline.SECTIONS]


def _ranks_by_interest(trace: Trace) -> list[int]:
    """Return the ranks that can be read: the one to look at first, those that stand out, the others."""
    first = choose_rank(trace)
    outliers = {outlier.rank for outlier in survey_ranks(trace).comparison.outliers} if len(trace.ranks) > 1 else set()
    problems = {report.summary.rank for report in rank_reports(trace) if report.standing is None}
    numbers = [rank for rank in trace.ranks if rank not in problems] or list(trace.ranks)
    return sorted(numbers, key=lambda rank: (rank != first, rank not in outliers))


def _choose_views(trace: Trace) -> tuple[tuple[tuple[int, str], ...], int]:
    """Return the pairs of rank and device that the page shows, and how many ranks or devices it leaves out."""
    numbers = _ranks_by_interest(trace)
    # Of many ranks only those that can be shown are opened.
    pairs = [(rank, device) for rank in numbers[:MAX_VIEWS] for device in trace.rank_result(rank, order_devices)]
    return tuple(pairs[:MAX_VIEWS]), max(len(pairs) - MAX_VIEWS, 0) + max(len(numbers) - MAX_VIEWS, 0)


def _left_out_note(trace: Trace, num_left_out: int) -> str:
    unreadable = find_unreadable_ranks(trace)
    notes = [f"Rank {rank.rank} is left out: {name_text(rank.reason, 400)}" for rank in unreadable[:MAX_NAMED_RANKS]]
    if len(unreadable) > MAX_NAMED_RANKS:
        notes.append(f"{format_count(len(unreadable) - MAX_NAMED_RANKS, 'more rank')} cannot be read.")
    if num_left_out > 0:
        views = format_count(num_left_out, "more rank or device", "more ranks or devices")
        notes.append(f"This page leaves out {views}. Write a page for one rank with memtrace report --rank N.")
    return " ".join(notes)


def _count_bytes(panels: Sequence[Panel | None]) -> int:
    return sum(len(repr(panel).encode()) for panel in panels if panel is not None)


@dataclass(frozen=True)
class Drawing:
    """How the views of a page are drawn, the same for all its ranks."""

    devices: tuple[tuple[int, str], ...]
    """The views: pairs of rank and device."""
    num_ranks: int
    options: AnalysisOptions
    sources: SourceOptions
    max_chars: int
    """Size of each view."""


def draw_rank(trace: Trace, drawing: Drawing) -> list[dict[str, Any]]:
    """Return what the template shows of the devices of one rank."""
    (rank,) = trace.ranks
    return [_render_view(trace, device, drawing) for number, device in drawing.devices if number == rank]


def _render_view(trace: Trace, device: str, drawing: Drawing) -> dict[str, Any]:
    (rank,), options = trace.ranks, drawing.options
    drawn = [
        None if isinstance(section.build, str) else render_device_panel(section, trace, device, options)
        for section in DEVICE_SECTIONS
    ]
    max_chars = max(0, drawing.max_chars - _count_bytes(drawn))
    payload = build_payload(trace, device, max_chars, sources=drawing.sources)
    panels = [
        _render_widget(section, payload) if panel is None else panel
        for section, panel in zip(DEVICE_SECTIONS, drawn, strict=True)
    ]
    return {
        "id": view_id(rank, device),
        "label": f"rank {rank}, {device}" if drawing.num_ranks > 1 else device,
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
