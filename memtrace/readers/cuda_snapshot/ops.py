"""The operator calls of a snapshot, as far as it tells them: one row for all calls of one stack, phase and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import PHASES
from memtrace.readers.annotations import Range
from memtrace.readers.cuda_snapshot.entries import KIND, SAID, Entries
from memtrace.readers.cuda_snapshot.phases import without_stack
from memtrace.readers.cuda_snapshot.stacks import Stacks
from memtrace.readers.fields import FieldError
from memtrace.readers.frames import BACKWARD, OPTIMIZER
from memtrace.readers.tables import Array, Names

if TYPE_CHECKING:
    import pyarrow as pa

# Who freed a block is not kept: the stacks of frees would double the work and the size, and answer no question.
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
class Ops:
    """The table ``ops``, and the operator call of each entry and of each live block of ``segments``; -1 for none."""

    table: pa.Table
    of_entry: Array
    of_live: Array
    has_stack: Array
    """For each entry whether it has one."""
    phase: Array
    """For each entry its phase, -1 where it is not told."""
    category: Array
    """For each entry what its stack allocates, an index into CATEGORIES, -1 where it does not tell."""
    live_category: Array
    """The same for each live block."""
    num_taken: int
    """Allocations without a stack that were taken for the backward's."""


def read_ops(
    entries: Entries,
    live_frames: Sequence[Any],
    optimizer_steps: Sequence[Range],
    times: Array,
    stacks: Stacks,
    names: Names,
) -> Ops:
    """The operator calls of entries (whose times are ``times``) and live blocks.

    Entries within a range of ``optimizer_steps`` are of that phase where their stack does not tell another.
    """
    chosen = np.isin(entries.kind, _WITH_STACK)
    selectors = chosen.tolist()
    frames, printed, metadata, compiled = (list(compress(entries.said[key], selectors)) for key in SAID)
    place = stacks.intern(frames)
    num_chosen = len(place)
    if any(printed):
        forward = stacks.intern_printed(printed)
        place = np.where(forward > 0, forward, place)
    live_place = stacks.intern(live_frames)
    said = [_texts(metadata, "user_metadata", ("",)), _texts(compiled, "compile_context", _NO_COMPILE_CONTEXT)]
    context = np.full(len(place) + len(live_frames), -1, np.int64)
    context[:num_chosen] = _contexts([texts for texts in said if texts is not None], num_chosen, names)
    place = np.concatenate([place, live_place])
    phase = np.array([stack.phase for stack in stacks.distinct], np.int64)[place]
    within = np.concatenate([_within(times[chosen], optimizer_steps), np.zeros(len(live_frames), bool)])
    phase[within & (phase < 0)] = OPTIMIZER
    allocs = np.flatnonzero(entries.kind[chosen] == KIND["alloc"])
    taken = allocs[without_stack(phase[allocs], place[allocs] > 0)]
    phase[taken] = BACKWARD
    op, table = _distinct(stacks, place, phase, context, names)

    def of_entries(values: Array, otherwise: int) -> Array:
        column = np.full(len(entries), otherwise, values.dtype)
        column[chosen] = values[:num_chosen]
        return column

    category = np.array([stack.category for stack in stacks.distinct], np.int8)[place]
    return Ops(
        table=table,
        of_entry=of_entries(op, -1),
        of_live=op[num_chosen:],
        has_stack=of_entries(place > 0, False),
        phase=of_entries(phase, -1),
        category=of_entries(category, -1),
        live_category=category[num_chosen:],
        num_taken=len(taken),
    )


def _distinct(stacks: Stacks, place: Array, phase: Array, context: Array, names: Names) -> tuple[Array, pa.Table]:
    """Number the distinct (stack, phase, context) in order of first sight; -1 where all three are unknown."""
    key = (place.astype(np.int64) * (len(PHASES) + 1) + phase + 1) * (int(context.max(initial=-1)) + 2) + context + 1
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    told = (place[first] > 0) | (phase[first] >= 0) | (context[first] >= 0)
    order = np.argsort(first[told], kind="stable")
    rows = first[told][order]
    number = np.full(len(first), -1, np.int64)
    number[np.flatnonzero(told)[order]] = np.arange(len(rows))
    chosen = [stacks.distinct[item] for item in place[rows].tolist()]
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


def _with_node(names: Names, context: int, node: str) -> int:
    """The context of an operator call with the FX node of its stack."""
    if not node:
        return context
    told = names.value(context) if context >= 0 else None
    return names.text("range", f"{told}; {node}" if told else node)


def _contexts(columns: Sequence[list[str]], num_rows: int, names: Names) -> Array:
    """What the program (user metadata) and the compiler (the frame it compiled) said, as ids of names; -1: nothing."""
    if not columns:
        return np.full(num_rows, -1, np.int64)
    together = list(zip(*columns, strict=True))
    ids = {texts: names.text("range", "; ".join(filter(None, texts))) if any(texts) else -1 for texts in set(together)}
    return np.fromiter((ids[texts] for texts in together), np.int64, num_rows)


def _texts(values: list[Any], key: str, empty: tuple[str, ...]) -> list[str] | None:
    """The texts among ``values``, "" for none; None where no row says anything."""
    try:
        distinct = set(values)
    except TypeError:
        raise FieldError(f"an entry has a {key!r} that is no text") from None
    if distinct <= {None, *empty}:
        return None
    spelled = {value: value if isinstance(value, str) and value not in empty else "" for value in distinct}
    return [spelled[value] for value in values]


def _within(times: Array, ranges: Sequence[Range]) -> Array:
    """Whether each time lies in one of the ranges; ranges may overlap."""
    starts = np.sort(np.array([item.start_ns for item in ranges], np.int64))
    ends = np.sort(np.array([item.end_ns for item in ranges], np.int64))
    return np.searchsorted(starts, times, side="right") > np.searchsorted(ends, times, side="left")
