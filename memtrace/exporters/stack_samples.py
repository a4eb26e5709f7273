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
    stack: Array
    """Index into ``stacks``."""
    stacks: list[list[Frame]]
    """Distinct call stacks, innermost frame first; a single frame that names the reason where there is none."""
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
    keys = [table.device[chosen], table.category[chosen], module, table.op_name[chosen], stack]
    first, group = _group_rows(keys)
    num_groups = len(first)
    num_bytes, num_blocks = {}, {}
    for measure, is_member in members.items():
        inside = is_member[chosen]
        total = np.zeros(num_groups, np.int64)
        np.add.at(total, group[inside], table.size[chosen[inside]])
        num_bytes[measure] = total
        num_blocks[measure] = np.bincount(group[inside], minlength=num_groups)
    operators = {number: trace.name(number) for number in np.unique(table.op_name[chosen]).tolist()}
    stacks, stack_index = np.unique(stack[first], return_inverse=True)
    return StackSamples(
        device=[trace.devices[code] for code in keys[0][first].tolist()],
        category=[CATEGORIES[code] for code in keys[1][first].tolist()],
        module=[modules[index] for index in module[first].tolist()],
        operator=[operators[index] for index in keys[3][first].tolist()],
        stack=stack_index,
        stacks=[_frames(trace, number, reasons) for number in stacks.tolist()],
        num_bytes=num_bytes,
        num_blocks=num_blocks,
    )


def _group_rows(keys: list[Array]) -> tuple[Array, Array]:
    """Return the first row of each group of rows that agree in all keys, and the group of each row."""
    group = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        values, index = np.unique(key, return_inverse=True)
        # Numbered anew for every key: the product of many numbers of values would not fit into 64 bits.
        _, group = np.unique(group * len(values) + index, return_inverse=True)
    _, first = np.unique(group, return_index=True)
    return first, group


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
