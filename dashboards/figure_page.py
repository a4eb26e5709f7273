"""Assembles a page of figures and tables about something other than one trace: several runs, or a planned pipeline.

Like the page of a trace it is one HTML file that needs no network. Each figure and table bounds its own size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from memtrace.dashboards.assets import CONTENT_SECURITY_POLICY, inline_sources, script_safe
from memtrace.dashboards.palette import THEMES, plotly_template
from memtrace.dashboards.sections import Section, Table
from memtrace.dashboards.text import name_text

from memtrace import __version__
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.storage import AnyPath, to_path
from memtrace.format.storage_writer import local_output
from memtrace.units import format_share

SCRIPTS: Final = ("format.js", "figures.js", "figure_page.js")
MAX_SENTENCE_CHARS: Final = 600
"""Longest sentence at the head of a page."""


@dataclass(frozen=True)
class FigurePage:
    """What the page shows."""

    title: str
    heading: str
    """Heading of the paragraph at the top."""
    sentences: tuple[str, ...]
    """The result in sentences, the most important one first."""
    sections: Sequence[tuple[Section, Any]]
    """Sections in order, each with the argument of its build function."""
    warnings: tuple[str, ...] = ()
    """What limits the results."""


@dataclass(frozen=True)
class _Panel:
    """A section with its content rendered; ``templates/macros.html`` prints it."""

    anchor: str
    title: str
    explanation: str
    absent: str
    columns: int
    height: int
    min_width: int
    """Width below which the figure scrolls, in pixels; 0: the figure fits any width."""
    figure: Markup | None
    table: Table | None
    note: str


def write_figure_page(page: FigurePage, output: str | AnyPath) -> AnyPath:
    """Write a page and return its path; an existing file is replaced whole.

    Raises:
        OSError: The file cannot be written.
    """
    with local_output(output) as target:
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(render_figure_page(page), encoding="utf-8")
        temporary.replace(target)
    return to_path(output)


def render_figure_page(page: FigurePage) -> str:
    """Return a page as HTML. Sections without content are left out unless they say why it is absent."""
    environment = Environment(loader=PackageLoader("memtrace.dashboards"), autoescape=True, trim_blocks=True)
    environment.globals.update(zip=zip, format_share=format_share, category_labels=CATEGORY_LABELS)
    panels = [_render_panel(section, argument) for section, argument in page.sections]
    return environment.get_template("figure_page.html").render(
        page=FigurePage(
            name_text(page.title),
            page.heading,
            tuple(name_text(sentence, MAX_SENTENCE_CHARS) for sentence in page.sentences),
            (),
            tuple(name_text(warning, MAX_SENTENCE_CHARS) for warning in page.warnings),
        ),
        panels=[panel for panel in panels if panel.figure or panel.table or panel.absent],
        version=__version__,
        content_security_policy=CONTENT_SECURITY_POLICY,
        themes=script_safe(json.dumps({name: {"template": plotly_template(name)} for name in THEMES}, sort_keys=True)),
        inline=inline_sources(environment, SCRIPTS),
    )


def _render_panel(section: Section, argument: Any) -> _Panel:
    assert callable(section.build)
    content = section.build(argument)
    table = content if isinstance(content, Table) else None
    figure, note, height, min_width = None, "", section.height, 0
    if content is not None and table is None:
        meta = content.layout.meta or {}
        note, min_width = meta.get("note", ""), meta.get("min_width", 0)
        height = int(content.layout.height or height)
        content.layout.template = None
        figure = script_safe(content.to_json())
    return _Panel(
        section.anchor,
        section.title,
        section.explanation,
        section.absent,
        section.columns,
        height,
        min_width,
        figure,
        table,
        note,
    )
