"""Builds the operator calls of a snapshot.

A snapshot does not identify operator calls, so one row of the table ``ops`` stands for all calls with the same call
stack, phase and context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import PHASES
from memtrace.frames import BACKWARD, OPTIMIZER
from memtrace.readers.annotations import Range
from memtrace.readers.cuda_snapshot.entries import KIND, RAW_KEYS, SnapshotEntries
from memtrace.readers.cuda_snapshot.phases import infer_backward
from memtrace.readers.cuda_snapshot.stacks import StackTable
from memtrace.readers.lifetimes import is_one_of
from memtrace.readers.rows import Coded, FieldError
from memtrace.readers.tables import Array, Names

if TYPE_CHECKING:
    import pyarrow as pa

# Frees keep no call stacks: they would double the work and the size, and no analysis uses them.
_WITH_STACK: Final = [
    KIND[kind]
    for kind in (
        "alloc",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
    )
]
_NO_COMPILE_CONTEXT: Final = ("", "N/A")


@dataclass(frozen=True)
class SnapshotOps:
    """The operator calls of a snapshot."""

    table: pa.Table
    """The table ``ops``."""
    of_entry: Array
    """For each entry its ``op_id``, -1 for none."""
    of_live: Array
    """For each live block of ``segments`` its ``op_id``, -1 for none."""
    has_stack: Array
    """For each entry whether it has a call stack."""
    phase: Array
    """For each entry its phase as an index into PHASES, -1 where it is unknown."""
    category: Array
    """For each entry the category that its call stack reveals as an index into CATEGORIES, -1 for none."""
    live_category: Array
    """The same for each live block."""
    num_inferred_backward: int
    """Number of allocations without a call stack that are assigned to the backward pass."""


def read_ops(
    entries: SnapshotEntries,
    live_frames: Coded,
    optimizer_steps: Sequence[Range],
    times: Array,
    stacks: StackTable,
    names: Names,
) -> SnapshotOps:
    """Build the operator calls of the entries and of the live blocks.

    Args:
        entries: the history.
        live_frames: the call stacks of the live blocks in ``segments``.
        optimizer_steps: ranges of optimizer steps; an entry in one of them has the phase optimizer unless its call
            stack shows another phase.
        times: time of each entry in nanoseconds.
        stacks: the call stacks of the snapshot.
        names: the table that receives the names.
    """
    chosen = np.flatnonzero(is_one_of(entries.kind, _WITH_STACK))
    frames, printed, metadata, compiled = (entries.raw[key].take(chosen) for key in RAW_KEYS)
    stack_index = stacks.intern(frames)
    num_chosen = len(stack_index)
    if any(printed.values):
        forward = stacks.intern_printed(printed)
        stack_index = np.where(forward > 0, forward, stack_index)
    live_stack_index = stacks.intern(live_frames)
    descriptions = [_texts(metadata, "user_metadata", ("",)), _texts(compiled, "compile_context", _NO_COMPILE_CONTEXT)]
    context = np.full(len(stack_index) + len(live_frames), -1, np.int64)
    context[:num_chosen] = _contexts([texts for texts in descriptions if texts is not None], num_chosen, names)
    stack_index = np.concatenate([stack_index, live_stack_index])
    phase = np.array([stack.phase for stack in stacks.distinct], np.int8)[stack_index]
    within = np.concatenate([_within(times[chosen], optimizer_steps), np.zeros(len(live_frames), bool)])
    phase[within & (phase < 0)] = OPTIMIZER
    allocs = np.flatnonzero(entries.kind[chosen] == KIND["alloc"])
    inferred = allocs[infer_backward(phase[allocs], stack_index[allocs] > 0)]
    phase[inferred] = BACKWARD
    op, table = _number_calls(stacks, stack_index, phase, context, names)

    def of_entries(values: Array, default: int) -> Array:
        column = np.full(len(entries), default, values.dtype)
        column[chosen] = values[:num_chosen]
        return column

    category = np.array([stack.category for stack in stacks.distinct], np.int8)[stack_index]
    return SnapshotOps(
        table=table,
        of_entry=of_entries(op, -1),
        of_live=op[num_chosen:],
        has_stack=of_entries(stack_index > 0, False),
        phase=of_entries(phase, -1),
        category=of_entries(category, -1),
        live_category=category[num_chosen:],
        num_inferred_backward=len(inferred),
    )


def _number_calls(
    stacks: StackTable, stack_index: Array, phase: Array, context: Array, names: Names
) -> tuple[Array, pa.Table]:
    """Number the distinct combinations of call stack, phase and context in order of first appearance.

    Returns:
        The number of each combination, -1 where all three are unknown; and the table ``ops``.
    """
    num_contexts = int(context.max(initial=-1)) + 2
    key = (stack_index.astype(np.int64) * (len(PHASES) + 1) + phase + 1) * num_contexts + context + 1
    first, inverse = _first_rows(key, len(stacks.distinct) * (len(PHASES) + 1) * num_contexts)
    is_known = (stack_index[first] > 0) | (phase[first] >= 0) | (context[first] >= 0)
    rows = first[is_known]
    number = np.full(len(first), -1, np.int64)
    number[is_known] = np.arange(len(rows))
    chosen = [stacks.distinct[index] for index in stack_index[rows].tolist()]
    nodes = [_with_node(names, code, stack.node) for code, stack in zip(context[rows].tolist(), chosen, strict=True)]
    stack_ids = np.array([stack.stack for stack in chosen], np.int64)
    contexts = np.array(nodes, np.int64)
    operators = np.array([stack.operator for stack in chosen], np.int64)
    table = make_table(
        "ops",
        len(rows),
        {
            "op_id": np.arange(len(rows)),
            "name": Known(operators, operators >= 0),
            "phase": Text(phase[rows].astype(np.int8), PHASES),
            "stack": Known(stack_ids, stack_ids >= 0),
            "recompute": np.array([stack.recompute for stack in chosen], bool),
            "context": Known(contexts, contexts >= 0),
        },
    )
    return number[inverse], table


def _first_rows(key: Array, num_keys: int) -> tuple[Array, Array]:
    """Return the first row of each distinct key, in ascending order, and for each row the index of its key there.

    Args:
        key: numbers from 0 up to ``num_keys``.
        num_keys: as above.
    """
    if num_keys > 4 * len(key) + 1024:
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return first[order], rank[inverse]
    first_of_key = np.full(num_keys, len(key), np.int64)
    first_of_key[key[::-1]] = np.arange(len(key) - 1, -1, -1)  # of the rows of a key, the first one is written last
    first = np.sort(first_of_key[first_of_key < len(key)])
    index_of_row = np.zeros(len(key), np.int64)
    index_of_row[first] = np.arange(len(first))
    return first, index_of_row[first_of_key[key]]


def _with_node(names: Names, context: int, node: str) -> int:
    """Return the context of an operator call extended by the FX node of its call stack."""
    if not node:
        return context
    text = names.value(context) if context >= 0 else None
    return names.text("range", f"{text}; {node}" if text else node)


def _contexts(columns: Sequence[Coded], num_rows: int, names: Names) -> Array:
    """Return the context of each row as an id in the table ``names``; -1 for none.

    The context is what the program (user metadata) and the compiler (compiled frame) recorded with the allocation.
    """
    if not columns:
        return np.full(num_rows, -1, np.int64)
    combined = np.zeros(num_rows, np.int64)
    for column in columns:
        numbered = column.numbered()
        combined = combined * len(numbered.values) + numbered.spread(np.arange(len(numbered.values)))
    _, first, inverse = np.unique(combined, return_index=True, return_inverse=True)
    ids = np.full(len(first), -1, np.int64)
    for index in np.argsort(first, kind="stable").tolist():
        texts = [text for column in columns if (text := column.value(int(first[index])))]
        if texts:
            ids[index] = names.text("range", "; ".join(texts))
    return ids[inverse]


def _texts(values: Coded, key: str, empty: tuple[str, ...]) -> Coded | None:
    """Return the strings among ``values``, "" for other values; None if no row has a string."""
    try:
        distinct = set(values.values)
    except TypeError:
        raise FieldError(f"an entry has a {key!r} that is not a string") from None
    if distinct <= {None, *empty}:
        return None
    texts = [value if isinstance(value, str) and value not in empty else "" for value in values.values]
    return Coded(texts, values.codes)


def _within(times: Array, ranges: Sequence[Range]) -> Array:
    """Return whether each time is in one of the ranges, which may overlap."""
    starts = np.sort(np.array([item.start_ns for item in ranges], np.int64))
    ends = np.sort(np.array([item.end_ns for item in ranges], np.int64))
    return np.searchsorted(starts, times, side="right") > np.searchsorted(ends, times, side="left")
