"""Bytes and blocks by call stack: at the peak, of all allocations, and of those that are freed in the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.block_groups import find_owning_modules
from memtrace.analysis.blocks import blocks
from memtrace.analysis.missing_stacks import missing_stack_reasons
from memtrace.analysis.peak import find_peak
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.frames import Frame
from memtrace.trace import Trace

MEASURE_TITLES: Final = {
    "peak": "Peak memory",
    "allocations": "Allocations",
    "churn": "Churn (allocated and freed in one step)",
}


@dataclass(frozen=True)
class StackSamples:
    """Blocks that share call stack, device, category, module and operator; columns with one element per sample.

    A device's ``peak`` is the set of blocks live at its requested peak, ``allocations`` are the blocks allocated in the
    trace, and ``churn`` is the part of them that is freed in the step that allocated it (where there are no steps: that
    is freed in the trace).
    """

    device: list[str]
    category: list[str]
    module: list[str | None]
    operator: list[str | None]
    frames: list[list[Frame]]
    """Call stack, innermost frame first; a single frame that names the reason where there is none."""
    num_bytes: dict[str, Array]
    """Bytes of each sample for each of MEASURES: requested bytes where the trace has them."""
    num_blocks: dict[str, Array]

    def __len__(self) -> int:
        return len(self.device)


def stack_samples(trace: Trace) -> StackSamples:
    """Return the samples of a single-rank trace: a few thousand, however long the trace is."""
    table = blocks(trace)
    members = {"peak": _peak_blocks(trace), "allocations": table.alloc_event >= 0, "churn": _churn_blocks(trace)}
    chosen = np.flatnonzero(np.any(list(members.values()), axis=0))
    modules, module = find_owning_modules(trace, chosen)
    stack = table.stack[chosen].astype(np.int64)
    without = np.flatnonzero(stack < 0)
    reasons, reason = missing_stack_reasons(trace, chosen[without])
    stack[without] = -1 - reason
    keys = np.stack([table.device[chosen], table.category[chosen], module, table.op_name[chosen], stack])
    groups, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    num_groups = groups.shape[1]
    num_bytes, num_blocks = {}, {}
    for measure, is_member in members.items():
        inside = is_member[chosen]
        total = np.zeros(num_groups, np.int64)
        np.add.at(total, group[inside], table.size[chosen[inside]])
        num_bytes[measure] = total
        num_blocks[measure] = np.bincount(group[inside], minlength=num_groups)
    frames = {number: _frames(trace, number, reasons) for number in np.unique(groups[4]).tolist()}
    return StackSamples(
        device=[trace.devices[code] for code in groups[0].tolist()],
        category=[CATEGORIES[code] for code in groups[1].tolist()],
        module=[modules[index] for index in groups[2].tolist()],
        operator=[trace.name(index) for index in groups[3].tolist()],
        frames=[frames[number] for number in groups[4].tolist()],
        num_bytes=num_bytes,
        num_blocks=num_blocks,
    )


def _frames(trace: Trace, stack: int, reasons: list[str]) -> list[Frame]:
    frames = trace.frames(stack) if stack >= 0 else [Frame("", 0, f"[{reasons[-1 - stack]}]")]
    return frames or [Frame("", 0, "[unknown call stack]")]


def _peak_blocks(trace: Trace) -> Array:
    is_live = np.zeros(len(blocks(trace)), bool)
    for device in trace.devices:
        is_live[find_peak(trace, device).live] = True
    return is_live


def _churn_blocks(trace: Trace) -> Array:
    table = blocks(trace)
    is_churn = (table.alloc_event >= 0) & (table.free_event >= 0)
    steps = step_rows(trace)
    if len(steps.number):
        is_churn &= (table.step >= 0) & (steps.of_rows(np.maximum(table.free_event, 0)) == table.step)
    return is_churn
