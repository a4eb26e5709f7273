"""Block signatures: the same block recognised in every step, by where and in which order it is allocated.

The signature of a block is its device, stack, operator, module and size, and its position among the blocks of its step
that share these. Sizes that differ between steps (sequences of varying length) are left out of the signature.

    signatures = assign_signatures(trace)
    signatures.of_block[block]      # the block's signature, -1 for a block that no step allocated
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.attribution import StepRows, detected_step_rows, step_rows, steps_are_marked
from memtrace.analysis.blocks import blocks
from memtrace.analysis.thresholds import MIN_USUAL_SHARE
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

_MAX_KEY = 1 << 62


@dataclass(frozen=True)
class BlockSignatures:
    """The signature of every block. All arrays but ``of_block`` and ``step_index`` are indexed by signature."""

    of_block: Array
    """Signature of each block; -1 for a block that no step allocated."""
    step_index: Array
    """For each block the position of its step among the steps, in order of time; -1 outside all steps."""
    device: Array
    """Code of the device, as in ``Blocks``."""
    stack: Array
    """Identifier of the stack, as in ``Blocks``."""
    op_name: Array
    """Identifier of the operator's name, as in ``Blocks``."""
    module: Array
    """Identifier of the module's name, as in ``Blocks``."""
    size: Array
    """Requested bytes; -1 where the size differs between steps."""
    order: Array
    """Position among the blocks of a step that share all of these, from 0."""
    num_steps: Array
    """Number of steps that allocate the block."""

    def __len__(self) -> int:
        return len(self.size)


def select_steps(trace: Trace, *, from_events: bool) -> StepRows:
    """Return the marked steps of a trace, or the detected ones if ``from_events`` is set or no steps are marked."""
    return trace.cached(detected_step_rows) if from_events and steps_are_marked(trace) else step_rows(trace)


def assign_signatures(trace: Trace, *, from_events: bool = False) -> BlockSignatures:
    """Return the signatures of the blocks that the steps of a single-rank trace allocate. Takes O(n log n) time.

    Args:
        trace: a single-rank trace.
        from_events: use the detected steps even if steps are marked.
    """
    return trace.cached(_assign_signatures, from_events and steps_are_marked(trace))


def row_codes(*columns: Array) -> Array:
    """Return a number for each distinct row of some columns of integers from -1; numbers are dense from 0."""
    code, width = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        span = int(column.max(initial=-1)) + 2
        if width * span >= _MAX_KEY:  # compress only what would overflow: sorting is expensive
            values, code = np.unique(code, return_inverse=True)
            width = len(values)
        code, width = code * span + column + 1, width * span
    return np.unique(code, return_inverse=True)[1]


def _assign_signatures(trace: Trace, from_events: bool) -> BlockSignatures:
    table, steps = blocks(trace), select_steps(trace, from_events=from_events)
    step_index = _step_index(steps, table.alloc_event)
    allocated = np.flatnonzero(step_index >= 0)
    allocated = allocated[np.argsort(table.alloc_event[allocated], kind="stable")]
    step, size = step_index[allocated], table.size[allocated]
    origin = row_codes(*(column[allocated] for column in (table.device, table.stack, table.op_name, table.module)))
    origin_and_size = row_codes(origin, size)
    min_steps = MIN_USUAL_SHARE * len(steps.number)
    same_size = _num_distinct_steps(origin_and_size, step)[origin_and_size] >= min_steps
    signature_size = np.where(same_size, size, -1)
    group = row_codes(origin, signature_size)
    order = _order_within_step(group, step)
    signature = row_codes(group, order)
    num_signatures = int(signature.max(initial=-1)) + 1
    example = np.zeros(num_signatures, np.int64)
    example[signature] = np.arange(len(signature))
    of_block = np.full(len(table), -1, np.int64)
    of_block[allocated] = signature
    return BlockSignatures(
        of_block=of_block,
        step_index=step_index,
        device=table.device[allocated][example],
        stack=table.stack[allocated][example],
        op_name=table.op_name[allocated][example],
        module=table.module[allocated][example],
        size=signature_size[example],
        order=order[example],
        num_steps=np.bincount(signature, minlength=num_signatures),
    )


def _step_index(steps: StepRows, rows: Array) -> Array:
    """Return the position of the step that holds each row of events; -1 outside all steps and for row -1."""
    if not len(steps.number):
        return np.full(len(rows), -1, np.int64)
    index = np.searchsorted(steps.first_row, rows, side="right") - 1
    return np.where((rows >= 0) & (index >= 0) & (rows < steps.end_row[index]), index, -1)


def _num_distinct_steps(group: Array, step: Array) -> Array:
    """Return the number of steps in which each group occurs."""
    width = int(step.max(initial=0)) + 1
    pairs = np.unique(group * width + step)
    return np.bincount(pairs // width, minlength=int(group.max(initial=-1)) + 1)


def _order_within_step(group: Array, step: Array) -> Array:
    """Return the position of each row among the rows of its group and step."""
    key = row_codes(group, step)
    order = np.argsort(key, kind="stable")
    first = np.searchsorted(key[order], np.arange(int(key.max(initial=-1)) + 1))
    position = np.empty(len(key), np.int64)
    position[order] = np.arange(len(key)) - first[key[order]]
    return position


def median_by_group(group: Array, values: Array, num_groups: int) -> Array:
    """Return the lower median of the values of each group; -1 for a group without values.

    Args:
        group: the group of each value, from 0.
        values: integers.
        num_groups: number of groups.
    """
    order = np.lexsort((values, group))
    bounds = np.searchsorted(group[order], np.arange(num_groups + 1))
    count = np.diff(bounds)
    middle = bounds[:-1] + np.maximum(count - 1, 0) // 2
    padded = np.append(values[order], -1)
    median: Array = np.where(count > 0, padded[np.minimum(middle, len(values))], -1)
    return median


def describe_signature(trace: Trace, signatures: BlockSignatures, signature: int) -> str:
    """Return ``file:line function, operator`` of a signature; the module where the line is unknown."""
    where = allocation_site(trace, int(signatures.stack[signature])) or trace.name(int(signatures.module[signature]))
    parts = [part for part in (where, trace.name(int(signatures.op_name[signature]))) if part]
    return ", ".join(parts) or "unknown site"


def signatures_table(trace: Trace) -> pd.DataFrame:
    """Return one row per signature, with the lifetimes and accesses of its blocks.

    Columns: site, operator, module (NA: unknown), size (bytes, NA: varies), order, num_steps, and mean and standard
    deviation over the steps of the lifetime (lifetime_mean_ns, lifetime_std_ns; freed blocks only), of the number of
    accesses (accesses_mean, accesses_std) and of a block's mean access interval (interval_mean_ns, interval_std_ns).
    """
    import pandas as pd

    signatures, table = assign_signatures(trace), blocks(trace)
    members = np.flatnonzero(signatures.of_block >= 0)
    signature = signatures.of_block[members]
    num_accesses = (table.num_reads + table.num_writes)[members].astype(np.float64)
    lifetime = np.where(table.free_ns[members] >= 0, table.free_ns[members] - table.alloc_ns[members], np.nan)
    interval = (table.last_access_ns - table.first_access_ns)[members] / np.maximum(num_accesses - 1, 1)
    columns: dict[str, object] = {
        "site": [allocation_site(trace, int(stack)) for stack in signatures.stack],
        "operator": [trace.name(int(name)) for name in signatures.op_name],
        "module": [trace.name(int(name)) for name in signatures.module],
        "size": pd.arrays.IntegerArray(signatures.size.astype(np.int64), signatures.size < 0),
        "order": signatures.order,
        "num_steps": signatures.num_steps,
    }
    for name, values in (
        ("lifetime_{}_ns", lifetime),
        ("accesses_{}", num_accesses),
        ("interval_{}_ns", np.where(num_accesses > 1, interval, np.nan)),
    ):
        mean, deviation = _mean_and_deviation(signature, values, len(signatures))
        columns[name.format("mean")], columns[name.format("std")] = mean, deviation
    frame: pd.DataFrame = pd.DataFrame(columns).rename_axis("signature")
    return frame


def _mean_and_deviation(group: Array, values: Array, num_groups: int) -> tuple[Array, Array]:
    """Return mean and standard deviation of the known values of each group; NaN where there are none."""
    known = ~np.isnan(values)
    count = np.bincount(group[known], minlength=num_groups).astype(np.float64)
    count[count == 0] = np.nan
    mean = np.bincount(group[known], values[known], minlength=num_groups) / count
    variance = np.bincount(group[known], (values[known] - mean[group[known]]) ** 2, minlength=num_groups) / count
    return mean, np.sqrt(variance)
