"""Puts the page together: one HTML file, no network, bounded in size whatever the trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from memtrace.dashboards import (
    access,
    allocator,
    allocator_state,
    findings,
    growth,
    lifetimes,
    overview,
    peak_breakdown,
    pipeline,
    stability,
    steps,
    timeline,
)
from memtrace.dashboards.palette import (
    CATEGORY_COLORS,
    CATEGORY_LABELS,
    CATEGORY_MEANINGS,
    THEMES,
    plotly_template,
)
from memtrace.dashboards.sections import Section, Table
from memtrace.dashboards.text import name_text

from memtrace import __version__
from memtrace.units import format_share

if TYPE_CHECKING:
    from memtrace.pipeline.prediction import PipelinePrediction
    from memtrace.trace import Trace

MAX_VIEWS: Final = 4
"""Most pairs of rank and device on one page: each carries figures of its own."""

# Plotly draws with inline styles and makes images in blobs; nothing is ever fetched.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
GLOSSARY: Final = (
    ("block", "one lifetime of one allocation"),
    ("requested", "bytes the program asked for"),
    ("allocated", "bytes the allocator counts for them, rounding included; on a CPU the same"),
    ("reserved", "bytes the CUDA allocator took from the device, used or not"),
    ("step", "one training iteration"),
    ("site", "your own innermost line on the stack of an allocation"),
)

SECTIONS: Final = (
    Section(
        "failures",
        "Out of memory",
        "Allocations that failed, what held the memory then, and what would have helped.",
        allocator_state.failures_table,
    ),
    Section(
        "timeline",
        "Memory over time",
        "Bytes in use, stacked by what they are for. The two lanes below the curve are the steps and their phases. "
        "Drag to zoom, double-click to go back.",
        timeline.timeline_figure,
        "Nothing was allocated on this device.",
        height=460,
    ),
    Section(
        "modules",
        "What holds the peak, by module",
        "The blocks live at the peak under the module that allocated them; parameters, gradients and optimizer state "
        "under the module that owns them. Taller is more.",
        peak_breakdown.modules_figure,
        "No modules were recorded.",
        columns=2,
        height=470,
    ),
    Section(
        "categories",
        "By category",
        "What the blocks live at the peak are for.",
        peak_breakdown.categories_table,
        "Nothing was live at the peak.",
        columns=1,
    ),
    Section(
        "sites",
        "By line of your code",
        "The innermost line of your own that allocated what is live at the peak; for memory made in backward, the line "
        "of its forward operator.",
        peak_breakdown.sites_table,
        "No stacks were recorded.",
    ),
    Section(
        "blocks",
        "Largest blocks at the peak",
        "Each with the stack that allocated it.",
        peak_breakdown.blocks_table,
        "Nothing was live at the peak.",
    ),
    Section(
        "needless",
        "Memory without need",
        "What was made too early, freed too late, never used or left behind, and the peak that would result if it were "
        "mended: the recorded timeline, replayed without it.",
        findings.findings_table,
        "Nothing was found.",
    ),
    Section(
        "fragmentation",
        "Reserved without use",
        "Memory that the allocator took from the device and no block uses. A segment goes back whole or not at all: "
        "one live block in it keeps the rest.",
        allocator_state.fragmentation_table,
    ),
    Section(
        "segments",
        "Segments over time",
        "A bar is a segment, from when the allocator took it from the device to when it gave it back, as high as it is "
        "large.",
        allocator.segments_section,
        height=420,
    ),
    Section(
        "holes",
        "Blocks and holes when most was reserved",
        "A row is a segment, with its live blocks and the free holes between them.",
        allocator.state_section,
        height=460,
    ),
    Section(
        "settings",
        "What other settings of the allocator would reserve",
        "The recorded requests, replayed by a model of the allocator under each setting.",
        allocator.sweep_section,
        height=540,
    ),
    Section(
        "steps",
        "Steps",
        "Peak memory, memory live at the end of each step, and duration. In a stable run all steps look alike; a "
        "rising line is memory that is never freed.",
        steps.steps_figure,
        "No steps were marked or detected. Mark them with rec.step() or rec.steps(loader).",
        height=440,
    ),
    Section(
        "stability",
        "Step-to-step stability",
        "Share of each step that matches the usual step: the same blocks from the same lines, with the same size and "
        "number of accesses. Blue matches, orange differs; memtrace steps lists the blocks that differ.",
        stability.stability_figure,
        height=260,
    ),
    Section(
        "growth",
        "Memory growth",
        "Bytes that each allocation site retains at the end of each step. A solid line that rises to the end is a "
        "leak; a dotted line levels off or stays flat.",
        growth.growth_figure,
        height=360,
    ),
    Section(
        "intervals",
        "Access intervals",
        "Access time intervals (ATI): the time between consecutive accesses of a block by different operators. Memory "
        "of long intervals is idle and a candidate for swapping or recomputation.",
        access.intervals_figure,
        height=380,
    ),
    Section(
        "swap",
        "Swap candidates",
        "Below the line, a block can be copied to the host and back within its access interval. memtrace access "
        "computes the candidates with the bandwidths of your machine.",
        access.swap_figure,
        height=440,
    ),
    Section(
        "lifetimes",
        "Lifetimes of blocks",
        "A rectangle is a block: from its allocation to its free, at its address, as high as it is large.",
        lifetimes.lifetimes_figure,
        "The addresses of blocks are not known.",
        height=520,
    ),
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
    table: Table | None
    note: str

    @property
    def has_content(self) -> bool:
        """Whether there is more to show than why there is nothing."""
        return self.figure is not None or self.table is not None


def report(trace: Trace, path: str | Path, *, prediction: PipelinePrediction | None = None) -> Path:
    """Write the page of a trace to ``path`` and return the path.

    Args:
        trace: the trace, with all its ranks.
        path: the HTML file.
        prediction: prediction of the recorded pipeline, shown on the page.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(render(trace, prediction=prediction), encoding="utf-8")
    temporary.replace(target)
    return target


def render(trace: Trace, *, prediction: PipelinePrediction | None = None) -> str:
    """Return the page as text; see ``report``."""
    pairs = [(rank, device) for rank in trace.ranks for device in trace.rank(rank).devices]
    views = [_view(trace.rank(rank), rank, device, len(trace.ranks)) for rank, device in pairs[:MAX_VIEWS]]
    environment = Environment(loader=PackageLoader("memtrace.dashboards"), autoescape=True, trim_blocks=True)
    environment.globals.update(zip=zip, format_share=format_share)
    left_out = len(pairs) - len(views)
    return environment.get_template("report.html").render(
        title=name_text(trace.path.name if trace.path else "trace"),
        version=__version__,
        views=views,
        views_note=f"{left_out} more ranks or devices: memtrace report --rank N." if left_out > 0 else "",
        job_panels=[panel for panel in _job_panels(trace, prediction) if panel.has_content],
        glossary=GLOSSARY,
        category_meanings=CATEGORY_MEANINGS,
        category_labels=CATEGORY_LABELS,
        content_security_policy=CONTENT_SECURITY_POLICY,
        themes=_json({name: {"template": plotly_template(name), "colors": THEMES[name]} for name in THEMES}),
        inline=_inline(environment),
    )


def _job_panels(trace: Trace, prediction: PipelinePrediction | None) -> list[Panel]:
    """The sections of all ranks together, above the rest."""
    panels = [_panel(section, trace) for section in pipeline.SECTIONS]
    if prediction is not None:
        panels += [_panel(section, prediction) for section in pipeline.PREDICTION_SECTIONS]
    return panels


def _view(trace: Trace, rank: int, device: str, num_ranks: int) -> dict[str, Any]:
    panels = [_panel(section, trace, device) for section in SECTIONS]
    return {
        "id": f"{rank}-{device.replace(':', '-')}",
        "label": f"rank {rank}, {device}" if num_ranks > 1 else device,
        "group": f"rank {rank}",
        "panels": [panel for panel in panels if panel.has_content or panel.absent],
        **vars(overview.build_overview(trace, device)),
    }


def _panel(section: Section, *arguments: Any) -> Panel:
    content = section.build(*arguments)
    table = content if isinstance(content, Table) else None
    figure, note = None, ""
    if content is not None and table is None:
        note = (content.layout.meta or {}).get("note", "")
        content.layout.template = None
        figure = _script_safe(content.to_json())
    return Panel(section.anchor, section.title, section.explanation, section.absent, section.columns, section.height,
                 figure, table, note)  # fmt: skip


def _json(value: Any) -> Markup:
    return _script_safe(json.dumps(value, sort_keys=True))


def _script_safe(text: str) -> Markup:
    """JSON that cannot end the script element it stands in."""
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _inline(environment: Environment) -> dict[str, Markup]:
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
        "script": Markup(source("timeline.js") + source("report.js")),
        "plotly": Markup(get_plotlyjs()),
    }
