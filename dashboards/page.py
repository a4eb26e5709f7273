"""Assembles the page: one HTML file that needs no network and whose size is bounded for every trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from memtrace.dashboards import overview, pipeline
from memtrace.dashboards.contents import DEVICE_SECTIONS, GLOSSARY
from memtrace.dashboards.palette import CATEGORY_COLORS, THEMES, plotly_template
from memtrace.dashboards.sections import Explorer, Section, Table
from memtrace.dashboards.text import name_text

from memtrace import __version__
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.categories import CATEGORY_LABELS, CATEGORY_MEANINGS
from memtrace.planning.verdict import choose_rank, order_devices
from memtrace.units import format_count, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.prediction import PipelinePrediction
    from memtrace.trace import Trace

MAX_VIEWS: Final = 4
"""Most pairs of rank and device on one page; each has figures of its own."""

# Plotly draws with inline styles and creates images as blobs. The page fetches nothing.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
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
    explorer: Markup | None
    """JSON of the data of the explorer."""
    note: str

    @property
    def has_content(self) -> bool:
        """Whether the section has a figure, a table or the explorer."""
        return self.figure is not None or self.table is not None or self.explorer is not None


def report(
    trace: Trace,
    output: str | Path,
    *,
    prediction: PipelinePrediction | None = None,
    options: AnalysisOptions = DEFAULT_OPTIONS,
) -> Path:
    """Write the page of a trace.

    Args:
        trace: A trace of one or several ranks.
        output: Path of the HTML file.
        prediction: Predicted pipeline to show next to the recorded one.
        options: What the user states about the machine, and thresholds.

    Returns:
        The path of the HTML file.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(output)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(render(trace, prediction=prediction, options=options), encoding="utf-8")
    temporary.replace(target)
    return target


def render(
    trace: Trace, *, prediction: PipelinePrediction | None = None, options: AnalysisOptions = DEFAULT_OPTIONS
) -> str:
    """Return the page as HTML; the arguments are those of ``report``."""
    first = choose_rank(trace)
    ranks = sorted(trace.ranks, key=lambda rank: rank != first)
    pairs = [(rank, device) for rank in ranks for device in order_devices(trace.rank(rank))]
    num_ranks = len(trace.ranks)
    views = [_render_view(trace.rank(rank), rank, device, num_ranks, options) for rank, device in pairs[:MAX_VIEWS]]
    job_panels = [_render_panel(section, trace) for section in pipeline.SECTIONS]
    if prediction is not None:
        job_panels += [_render_panel(section, prediction) for section in pipeline.PREDICTION_SECTIONS]
    environment = Environment(loader=PackageLoader("memtrace.dashboards"), autoescape=True, trim_blocks=True)
    environment.globals.update(zip=zip, format_share=format_share)
    return environment.get_template("report.html").render(
        title=name_text(trace.path.name if trace.path else "trace"),
        version=__version__,
        views=views,
        views_note=_left_out_note(len(pairs) - len(views)),
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


def _render_view(trace: Trace, rank: int, device: str, num_ranks: int, options: AnalysisOptions) -> dict[str, Any]:
    panels = [
        _render_panel(section, trace, device, *([options] if section.takes_options else []))
        for section in DEVICE_SECTIONS
    ]
    return {
        "id": f"{rank}-{device.replace(':', '-')}",
        "label": f"rank {rank}, {device}" if num_ranks > 1 else device,
        "group": f"rank {rank}",
        "panels": [panel for panel in panels if panel.has_content or panel.absent],
        **vars(overview.build_overview(trace, device, options)),
    }


def _render_panel(section: Section, *arguments: Any) -> Panel:
    """Render a section; the arguments are those of its build function."""
    content = section.build(*arguments)
    table = content if isinstance(content, Table) else None
    explorer = _json(content.data) if isinstance(content, Explorer) else None
    figure, note = None, content.note if isinstance(content, Explorer) else ""
    if content is not None and table is None and explorer is None:
        note = (content.layout.meta or {}).get("note", "")
        content.layout.template = None
        figure = _script_safe(content.to_json())
    return Panel(section.anchor, section.title, section.explanation, section.absent, section.columns, section.height,
                 figure, table, explorer, note)  # fmt: skip


def _json(value: Any) -> Markup:
    return _script_safe(json.dumps(value, sort_keys=True))


def _script_safe(text: str) -> Markup:
    """Escape JSON so that it cannot end the script element that contains it."""
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _inline_sources(environment: Environment) -> dict[str, Markup]:
    """Return the style sheet, our scripts and plotly.js."""
    from plotly.offline import get_plotlyjs

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
        "script": Markup("".join(map(source, ("timeline.js", "explorer.js", "report.js")))),
        "plotly": Markup(get_plotlyjs()),
    }
