"""Assembles the page: one HTML file that needs no network and whose size is bounded for every trace."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from memtrace.dashboards import overview, pipeline
from memtrace.dashboards.contents import DEVICE_SECTIONS, GLOSSARY
from memtrace.dashboards.palette import CATEGORY_COLORS, THEMES, plotly_template
from memtrace.dashboards.payload import Payload, build_payload
from memtrace.dashboards.sections import Section, Table
from memtrace.dashboards.source_lines import SourceOptions
from memtrace.dashboards.text import name_text

from memtrace import __version__
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
    "report.js",
)
"""Scripts of the page in ``templates/``, in the order in which they use each other; they share one scope."""

PLOTLY: Final = Path(__file__).parent / "vendor" / "plotly-cartesian.min.js"

# Plotly draws with inline styles and creates images as blobs. The page fetches nothing.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; worker-src blob:"
)


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
    sources: SourceOptions | None = None,
) -> Path:
    """Write the page of a trace.

    Args:
        trace: A trace of one or several ranks.
        output: Path of the HTML file.
        prediction: Predicted pipeline to show next to the recorded one.
        sources: Which source files the page may contain lines of; None: those that the trace names, if this machine
            recorded it.

    Returns:
        The path of the HTML file.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(output)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(render(trace, prediction=prediction, sources=sources), encoding="utf-8")
    temporary.replace(target)
    return target


def render(trace: Trace, *, prediction: PipelinePrediction | None = None, sources: SourceOptions | None = None) -> str:
    """Return the page as HTML; the arguments are those of ``report``."""
    first = choose_rank(trace)
    ranks = sorted(trace.ranks, key=lambda rank: rank != first)
    pairs = [(rank, device) for rank in ranks for device in order_devices(trace.rank(rank))]
    job_panels = [_render_panel(section, trace) for section in pipeline.SECTIONS]
    if prediction is not None:
        job_panels += [_render_panel(section, prediction) for section in pipeline.PREDICTION_SECTIONS]
    drawn = [_render_sections(trace.rank(rank), device) for rank, device in pairs[:MAX_VIEWS]]
    panels = [panel for panels in (job_panels, *drawn) for panel in panels if panel is not None]
    num_used = sum(len(repr(panel).encode()) for panel in panels)
    max_chars = max(0, MAX_PAGE_BYTES - _MARKUP_BYTES - num_used) // max(1, len(drawn))
    views = [
        _render_view(
            trace.rank(rank),
            rank,
            device,
            len(trace.ranks),
            sections,
            max_chars=max_chars,
            sources=sources or SourceOptions(),
        )
        for (rank, device), sections in zip(pairs, drawn, strict=False)
    ]
    environment = Environment(loader=PackageLoader("memtrace.dashboards"), autoescape=True, trim_blocks=True)
    environment.globals.update(zip=zip, format_share=format_share)
    return environment.get_template("report.html").render(
        title=name_text(trace.path.name if trace.path else "trace"),
        version=__version__,
        views=views,
        views_note=_left_out_note(len(pairs) - len(drawn)),
        job_panels=[panel for panel in job_panels if panel.has_content],
        glossary=GLOSSARY,
        category_meanings=CATEGORY_MEANINGS,
        category_labels=CATEGORY_LABELS,
        content_security_policy=CONTENT_SECURITY_POLICY,
        themes=_json({name: {"template": plotly_template(name), "colors": THEMES[name]} for name in THEMES}),
        inline=_inline_sources(environment),
    )


def _left_out_note(num_left_out: int) -> str:
    if num_left_out <= 0:
        return ""
    views = format_count(num_left_out, "more pair of rank and device", "more pairs of rank and device")
    return f"This page leaves out {views}. Write a page for one rank with memtrace report --rank N."


def _render_sections(trace: Trace, device: str) -> list[Panel | None]:
    """Render the sections of a view except for its widgets, which are None."""
    return [
        None if isinstance(section.build, str) else _render_panel(section, trace, device) for section in DEVICE_SECTIONS
    ]


def _render_view(
    trace: Trace,
    rank: int,
    device: str,
    num_ranks: int,
    sections: list[Panel | None],
    *,
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
        **vars(overview.build_overview(trace, device)),
    }


def view_id(rank: int, device: str) -> str:
    """Return the identifier of a view in the document and in addresses."""
    return f"{rank}-{device.replace(':', '-')}"


def _render_widget(section: Section, payload: Payload | None) -> Panel:
    widget = section.build if isinstance(section.build, str) and payload is not None else ""
    return _make_panel(section, widget=widget, note=payload.notes[widget] if payload is not None else "")


def _render_panel(section: Section, *arguments: Any) -> Panel:
    """Render a section with a build function; the arguments are those of the function."""
    assert callable(section.build)
    content = section.build(*arguments)
    if content is None or isinstance(content, Table):
        return _make_panel(section, table=content)
    note = (content.layout.meta or {}).get("note", "")
    content.layout.template = None
    return _make_panel(section, figure=_script_safe(content.to_json()), note=note)


def _make_panel(
    section: Section, *, figure: Markup | None = None, table: Table | None = None, widget: str = "", note: str = ""
) -> Panel:
    return Panel(section.anchor, section.title, section.explanation, section.absent, section.columns, section.height,
                 figure, table, widget, note)  # fmt: skip


def _json(value: Any) -> Markup:
    return _script_safe(json.dumps(value, sort_keys=True))


def _script_safe(text: str) -> Markup:
    """Escape JSON so that it cannot end the script element that contains it."""
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _inline_sources(environment: Environment) -> dict[str, Markup]:
    """Return the style sheet, our scripts, and plotly.js packed: most pages are read without a figure that needs it."""

    def source(name: str) -> str:
        assert environment.loader is not None
        return environment.loader.get_source(environment, name)[0]

    variables = "".join(
        f"{selector}{{color-scheme:{name};" + "".join(f"--{key}:{value};" for key, value in THEMES[name].items()) + "}"
        for selector, name in ((":root", "light"), (':root[data-theme="dark"]', "dark"))
    )
    swatches = "".join(
        f'.swatch[data-category="{name}"]{{background:{color}}}' for name, color in CATEGORY_COLORS.items()
    )
    return {
        "style": Markup(variables + swatches + source("report.css")),
        "worker": Markup(source("worker.js")),
        "script": Markup('(() => {\n"use strict";\n' + "".join(map(source, SCRIPTS)) + "})();"),
        "plotly": Markup(base64.b64encode(zlib.compress(PLOTLY.read_bytes(), 9)).decode("ascii")),
    }
