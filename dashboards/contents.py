"""The contents of the page: its sections in order, and its glossary."""

from __future__ import annotations

from typing import Final

from memtrace.dashboards import (
    access,
    allocator,
    allocator_state,
    findings,
    growth,
    peak_breakdown,
    stability,
    steps,
)
from memtrace.dashboards.sections import Section

GLOSSARY: Final = (
    ("block", "one lifetime of one allocation, from allocation to free"),
    ("live", "allocated and not yet freed"),
    ("requested", "bytes that the program asked for"),
    ("allocated", "bytes that the allocator counts for the requests, rounding included"),
    ("reserved", "bytes that the CUDA allocator took from the device, in segments, whether used or not"),
    ("segment", "a range of device memory that the allocator splits into blocks"),
    ("step", "one training iteration"),
    ("allocation site", "the innermost frame of your own code on the call stack of an allocation"),
    ("access interval", "the time between two accesses of a block by different operators"),
)

DEVICE_SECTIONS: Final = (
    Section(
        "failures",
        "Out-of-memory errors",
        "Allocations that failed, the allocation sites that held memory at that moment, and possible fixes.",
        allocator_state.failures_table,
    ),
    Section(
        "timeline",
        "Memory over time",
        "Live bytes as stacked areas, with lines for what the allocator and the device count; below, on the same axis, "
        "steps, phases, modules and operators, and the blocks by address in their segments.",
        "tracks",
        "The trace has no allocations on this device.",
    ),
    Section(
        "live",
        "Blocks at any instant",
        "Blocks that are live at one instant: click the figure above to choose it. Or blocks that are allocated, "
        "freed or kept in a range of time. Group them by module or call stack, filter them, and click one to see its "
        "call stack, source lines, accesses and free.",
        "explorer",
    ),
    Section(
        "categories",
        "Peak memory by category",
        "Blocks that are live at the peak, by what the program uses them for.",
        peak_breakdown.categories_table,
        "No block is live at the peak.",
        columns=1,
    ),
    Section(
        "sites",
        "Peak memory by allocation site",
        "Blocks that are live at the peak, by the innermost frame of your own code that allocated them. Blocks that "
        "backward allocates count for the line of the forward operator.",
        peak_breakdown.sites_table,
        "The trace has no call stacks.",
        columns=2,
    ),
    Section(
        "wasted",
        "Wasted memory",
        "Blocks that are allocated early, freed late, never used or leaked. The peak after each fix comes from "
        "replaying the recorded timeline without the wasted intervals.",
        findings.findings_table,
        "No wasted memory detected.",
        takes_options=True,
    ),
    Section(
        "fragmentation",
        "Reserved but unused",
        "Memory that the allocator reserved and no block uses. The allocator can release only whole segments: one "
        "live block keeps the rest of its segment reserved.",
        allocator_state.fragmentation_table,
    ),
    Section(
        "holes",
        "Allocator state at the reserved peak",
        "Each row is a segment, with its live blocks and the free ranges between them.",
        allocator.state_section,
        height=460,
    ),
    Section(
        "settings",
        "Allocator settings",
        "Reserved memory under other allocator settings, predicted by replaying the recorded requests in a model of "
        "the allocator.",
        allocator.sweep_section,
        height=540,
        takes_options=True,
    ),
    Section(
        "steps",
        "Memory and time per step",
        "The steps of a stable training loop look alike. A rising curve means that memory is not freed.",
        steps.steps_figure,
        "No steps detected. Mark them with rec.step() or rec.steps(loader).",
        height=440,
    ),
    Section(
        "stability",
        "Step-to-step stability",
        "Share of each step that matches the typical step: blocks of the same allocation site, size and number of "
        "accesses. Run memtrace steps to list the blocks that differ.",
        stability.stability_figure,
        height=260,
    ),
    Section(
        "growth",
        "Memory growth",
        "Live bytes at the end of each step, by allocation site. A bold line that rises until the last step is a "
        "leak; a line that levels off is not.",
        growth.growth_figure,
        height=360,
    ),
    Section(
        "intervals",
        "Access intervals",
        "Times between two accesses of a block by different operators. The block is idle during the interval.",
        access.intervals_figure,
        height=380,
    ),
    Section(
        "swap",
        "Swap candidates",
        "Below the line, a block can be copied to the host and back before its next access. A dot is a block that can "
        "be in host memory at the peak together with all other dots, because the copies share the bus. Pass the "
        "measured bandwidths of your machine to memtrace report for exact results.",
        access.swap_figure,
        height=440,
        takes_options=True,
    ),
)
"""Sections of one rank and device; those of a whole job are in ``memtrace.dashboards.pipeline``."""
