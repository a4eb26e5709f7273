"""Figures and tables of any number of runs side by side, and the page of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from memtrace.dashboards.compared_runs import (
    GROUPING_TITLES,
    MAX_BARS,
    ComparedRuns,
    note_left_out,
    signed_bytes,
    signed_share,
)
from memtrace.dashboards.figure_page import FigurePage, write_figure_page
from memtrace.dashboards.run_curves import memory_by_step_figure, memory_by_time_figure, step_peaks_figure
from memtrace.dashboards.run_differences import differences_figure, differences_table
from memtrace.dashboards.run_distributions import (
    breakdown_figure,
    interval_cdf_figure,
    interval_violin_figure,
    swap_figure,
)
from memtrace.dashboards.sections import Column, Row, Section, Table
from memtrace.dashboards.text import NO_VALUE, name_text

from memtrace.analysis.compare import Run, RunComparison, RunSummary, compare_runs
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.storage import AnyPath
from memtrace.units import (
    format_bytes,
    format_duration,
    format_names,
)


def write_comparison(runs: Sequence[Run], output: str | AnyPath, comparison: RunComparison | None = None) -> AnyPath:
    """Write the page that compares runs, and return its path.

    Args:
        runs: the runs, as ``memtrace.analysis.match_runs`` returns them.
        output: path of the HTML file.
        comparison: result of ``compare_runs`` for these runs; default: it is computed.

    Raises:
        OSError: The file cannot be written.
    """
    compared = ComparedRuns(tuple(runs), comparison or compare_runs(runs))
    page = FigurePage(
        title=f"Comparison of {format_names([run.label for run in runs])}",
        heading="Comparison",
        sentences=tuple(_describe(compared.comparison)),
        sections=[(section, compared) for section in SECTIONS],
        warnings=compared.comparison.notes,
    )
    return write_figure_page(page, output)


def _describe(comparison: RunComparison) -> Iterator[str]:
    """Return the comparison in sentences: first and last run, then the largest differences."""
    first, last = comparison.runs[0], comparison.runs[-1]
    change = last.peak_bytes - first.peak_bytes
    if change:
        yield (
            f"The peak of {last.label} is {format_bytes(last.peak_bytes)}, {signed_bytes(change)} "
            f"({signed_share(change, first.peak_bytes)}) compared with {format_bytes(first.peak_bytes)} of "
            f"{first.label}."
        )
    else:
        yield f"{first.label} and {last.label} have the same peak, {format_bytes(first.peak_bytes)}."
    if len(comparison.runs) > 2:
        ranked = sorted(comparison.runs, key=lambda run: run.peak_bytes)
        yield (
            f"Of {len(ranked)} runs, {ranked[0].label} has the lowest peak ({format_bytes(ranked[0].peak_bytes)}) and "
            f"{ranked[-1].label} the highest ({format_bytes(ranked[-1].peak_bytes)})."
        )
    for grouping in ("category", "module", "site"):
        largest = max(
            (group for group in comparison.groups if group.grouping == grouping),
            key=lambda group: abs(group.change_bytes),
            default=None,
        )
        if largest is not None and largest.change_bytes:
            name = CATEGORY_LABELS.get(largest.name or "", largest.name) or "unknown"
            title, change_text = GROUPING_TITLES[largest.grouping], signed_bytes(largest.change_bytes)
            yield f"Largest difference by {title}: {name}, {change_text} at the peak of {last.label}."


def runs_table(compared: ComparedRuns) -> Table:
    """Return one row per run with its key figures."""
    runs = compared.comparison.runs
    has_ranks = any(run.num_ranks > 1 for run in runs)
    columns = [Column("run", "code"), *([Column("rank", "number")] if has_ranks else []), Column("device"),
               Column("peak", "number"), Column("against first", "number"), Column("reached in"),
               Column("steps", "number"), Column("step peak", "number"), Column("step time", "number"),
               Column("intervals", "number"), Column("median interval", "number"),
               Column("swappable at peak", "number")]  # fmt: skip
    rows = [
        Row(
            (
                name_text(run.label),
                *([str(run.rank)] if has_ranks else []),
                run.device,
                format_bytes(run.peak_bytes),
                NO_VALUE if run is runs[0] else signed_share(run.peak_bytes - runs[0].peak_bytes, runs[0].peak_bytes),
                _moment(run),
                _count(run.num_steps),
                format_bytes(run.median_step_peak_bytes, unknown=NO_VALUE),
                format_duration(run.median_step_duration_ns, unknown=NO_VALUE),
                _count(run.num_intervals),
                format_duration(run.median_interval_ns, unknown=NO_VALUE),
                format_bytes(run.swappable_at_peak_bytes, unknown=NO_VALUE),
            )
        )
        for run in runs[:MAX_BARS]
    ]
    note = "Step peaks and step times are medians over the steps after warm-up. Intervals are access intervals."
    return Table(tuple(columns), tuple(rows), f"{note} {note_left_out(len(runs), MAX_BARS, 'listed')}".strip())


def _moment(run: RunSummary) -> str:
    step = "outside the steps" if run.peak_step is None else f"step {run.peak_step}"
    return f"{step}, {run.peak_phase}" if run.peak_phase else step


def _count(number: int | None) -> str:
    return NO_VALUE if number is None else f"{number:,}"


SECTIONS: Final = (
    Section(
        "runs",
        "Runs",
        "The key figures of each run.",
        runs_table,
    ),
    Section(
        "breakdown",
        "Peak memory by category",
        "What each run holds at its peak. With runs of one model and growing batches, activations grow with the batch "
        "and parameters do not.",
        breakdown_figure,
        height=440,
    ),
    Section(
        "by-step",
        "Live memory by step",
        "Live bytes of each run. Step n of one run is at the same place as step n of the others, however long the "
        "steps take.",
        memory_by_step_figure,
        "None of the runs has steps.",
    ),
    Section(
        "by-time",
        "Live memory over time",
        "The same memory over the time since the start of the first step after warm-up. Zoom out (double-click) to see "
        "what comes before.",
        memory_by_time_figure,
    ),
    Section(
        "step-peaks",
        "Peak memory by step",
        "The highest live memory of each step.",
        step_peaks_figure,
        height=360,
    ),
    *(
        Section(
            f"differences-{grouping}",
            f"Differences by {title}",
            f"Bytes that each {title} holds at the peak, compared with the first run; only what differs.",
            partial(differences_figure, grouping=grouping),
        )
        for grouping, title in GROUPING_TITLES.items()
    ),
    Section(
        "differences",
        "Differences at the peak",
        "What is new, gone, grown or smaller in the last run compared with the first one.",
        differences_table,
        "The runs hold the same memory at their peaks.",
    ),
    Section(
        "interval-cdf",
        "Access intervals",
        "The share of access intervals up to a length. An interval is the time between two consecutive accesses of a "
        "block, in which nothing reads or writes it.",
        interval_cdf_figure,
        "Accesses were not recorded.",
        height=400,
    ),
    Section(
        "interval-violins",
        "Distribution of access intervals",
        "The width of a violin shows how many intervals have that length; its box, the middle half of them.",
        interval_violin_figure,
        height=400,
    ),
    Section(
        "swap",
        "Swap candidates",
        "Blocks that can all be in host memory at the peak, because their access interval spans it and leaves time to "
        "copy them to the host and back, one copy at a time in each direction.",
        swap_figure,
        height=400,
    ),
)
"""Sections of the page; each ``build`` gets ``ComparedRuns``."""
