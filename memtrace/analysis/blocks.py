"""Blocks: one lifetime of one allocation each, with what was done to it and what it was for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column, phase_rows, step_rows
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES, PHASES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

CATEGORY = {name: np.int8(code) for code, name in enumerate(CATEGORIES)}
# A block can carry several labels (a parameter that is also an input): the first of these that it has wins.
LABEL_PRIORITY = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "temporary",
    "workspace",
    "unknown",
)


@dataclass(frozen=True)
class Blocks:
    """Columns indexed by block; -1 stands for none or unknown. Bytes, ns, and rows of the table events.

    ``alloc_event`` is -1 for a baseline block: it is live from the start. ``free_event`` is -1 for one that is live at
    the end. ``category`` and ``phase`` are codes into the tuples of ``schema``, ``device`` into ``Trace.devices``,
    ``name``, ``module``, ``stack`` and ``op_name`` are ids of the table names; ``step`` is that of the allocation.
    ``size`` is what was requested; where only the allocator's own size is told (a Chrome trace of a GPU) it is that,
    and ``size_is_requested`` is False.
    """

    device: Array
    size: Array
    size_is_requested: Array
    allocated_size: Array
    address: Array
    stream: Array
    alloc_ns: Array
    free_ns: Array
    alloc_event: Array
    free_event: Array
    first_access_ns: Array
    last_access_ns: Array
    num_reads: Array
    num_writes: Array
    category: Array
    name: Array
    module: Array
    stack: Array
    op_name: Array
    phase: Array
    step: Array

    def __len__(self) -> int:
        return len(self.size)


def blocks(trace: Trace) -> Blocks:
    """The blocks of a single-rank trace, worked out once.

    Categories: labels of the program win, in the order of LABEL_PRIORITY. The rest is told by use. A *workspace* is
    born and dead within one operator call. An *activation* is made in forward (or by a recomputed forward operator)
    and read in backward; where accesses were not recorded, freed in backward or later. An *input* is made outside of
    the phases and read in forward. A *temporary* dies in the phase and step that made it. What fits none is *unknown*.
    """
    return trace.cached(_compute)


def _compute(trace: Trace) -> Blocks:
    events = trace.columns(
        "events", "time_ns", "kind", "device", "block_id", "size", "allocated_size", "address", "op_id", "stream"
    )
    kind, block, time = events["kind"], events["block_id"], events["time_ns"]
    count = int(block.max(initial=-1)) + 1
    begin = np.flatnonzero(((kind == KIND["alloc"]) | (kind == KIND["baseline"])) & (block >= 0))
    end = np.flatnonzero((kind == KIND["free"]) & (block >= 0))
    reads = np.flatnonzero(kind == KIND["read"])
    writes = np.flatnonzero(kind == KIND["write"])

    def scatter(rows: Array, values: Array, dtype: type[np.signedinteger] = np.int64) -> Array:
        column = np.full(count, -1, dtype)
        column[block[rows]] = values
        return column

    is_alloc = kind[begin] == KIND["alloc"]
    op = scatter(begin, events["op_id"][begin])
    accesses = np.flatnonzero((kind == KIND["read"]) | (kind == KIND["write"]))
    alloc_event = scatter(begin, np.where(is_alloc, begin, -1))
    free_event = scatter(end, end)
    phase = _phases(trace, op, alloc_event)
    step = np.where(alloc_event >= 0, step_rows(trace).of_rows(alloc_event), -1)
    label_category, label_name = _labels(trace, count)
    category = label_category
    unlabelled = category < 0
    category[unlabelled] = _by_use(trace, op, phase, alloc_event, free_event, step, reads, block, count)[unlabelled]
    requested = scatter(begin, events["size"][begin])
    allocated_size = scatter(begin, events["allocated_size"][begin])
    return Blocks(
        device=scatter(begin, events["device"][begin], np.int8),
        size=np.where(requested >= 0, requested, np.maximum(allocated_size, 0)),
        size_is_requested=requested >= 0,
        allocated_size=allocated_size,
        address=scatter(begin, events["address"][begin]),
        stream=scatter(begin, events["stream"][begin]),
        alloc_ns=scatter(begin, np.where(is_alloc, time[begin], -1)),
        free_ns=scatter(end, time[end]),
        alloc_event=alloc_event,
        free_event=free_event,
        # Fancy assignment keeps the last value: backwards for the first access.
        first_access_ns=scatter(accesses[::-1], time[accesses[::-1]]),
        last_access_ns=scatter(accesses, time[accesses]),
        num_reads=np.bincount(block[reads], minlength=count).astype(np.int32),
        num_writes=np.bincount(block[writes], minlength=count).astype(np.int32),
        category=category,
        name=label_name,
        module=op_column(trace, op, "module"),
        stack=op_column(trace, op, "stack"),
        op_name=op_column(trace, op, "name"),
        phase=phase,
        step=step,
    )


def _labels(trace: Trace, count: int) -> tuple[Array, Array]:
    labels = trace.columns("labels", "block_id", "category", "name")
    category, name = np.full(count, -1, np.int8), np.full(count, -1, np.int32)
    order = {CATEGORY[text]: place for place, text in enumerate(LABEL_PRIORITY)}
    rank = np.array([order.get(np.int8(code), len(order)) for code in range(-1, len(CATEGORIES))])
    known = (labels["block_id"] >= 0) & (labels["block_id"] < count)
    rows = np.flatnonzero(known)
    # The strongest label is written last, and stays.
    rows = rows[np.argsort(-rank[labels["category"][rows] + 1], kind="stable")]
    category[labels["block_id"][rows]] = labels["category"][rows]
    named = rows[labels["name"][rows] >= 0]
    name[labels["block_id"][named]] = labels["name"][named]
    return category, name


def _phases(trace: Trace, op: Array, alloc_event: Array) -> Array:
    phase = op_column(trace, op, "phase")
    spans = phase_rows(trace)
    missing = (phase < 0) & (alloc_event >= 0)
    if spans is not None and missing.any():
        phase = phase.copy()
        phase[missing] = spans.phase[spans.pieces(alloc_event[missing])]
    return phase


def _by_use(
    trace: Trace, op: Array, phase: Array, alloc_event: Array, free_event: Array, step: Array, reads: Array,
    block: Array, count: int,
) -> Array:  # fmt: skip
    events_op = trace.columns("events", "op_id")["op_id"]
    made_in_forward = (phase == PHASE["forward"]) | op_column(trace, op, "recompute")
    free_op = np.where(free_event >= 0, events_op[free_event], -1)
    freed_phase = _event_phase(trace, free_event)
    if len(reads):
        read_phase = op_column(trace, events_op[reads], "phase")
        recompute = op_column(trace, events_op[reads], "recompute")
        in_backward = np.zeros(count, bool)
        in_backward[block[reads[(read_phase == PHASE["backward"]) & ~recompute]]] = True
        in_forward = np.zeros(count, bool)
        in_forward[block[reads[read_phase == PHASE["forward"]]]] = True
    else:
        in_backward = freed_phase == PHASE["backward"]
        in_forward = np.zeros(count, bool)
    freed_step = np.where(free_event >= 0, step_rows(trace).of_rows(np.maximum(free_event, 0)), -2)
    category = np.full(count, CATEGORY["unknown"])
    allocated = alloc_event >= 0
    same_phase = (freed_phase == phase) & (phase >= 0) & (freed_step == step)
    category[allocated & same_phase] = CATEGORY["temporary"]
    category[allocated & (phase == PHASE["other"]) & in_forward] = CATEGORY["input"]
    category[allocated & (op < 0) & in_forward & ~same_phase] = CATEGORY["input"]
    category[allocated & made_in_forward & in_backward] = CATEGORY["activation"]
    category[allocated & (op >= 0) & (free_op == op)] = CATEGORY["workspace"]
    return category


def _event_phase(trace: Trace, rows: Array) -> Array:
    """The phase in which each row of events lies, by its operator, else by the spans; -1 for row -1."""
    op = np.where(rows >= 0, trace.columns("events", "op_id")["op_id"][rows], -1)
    return np.where(rows >= 0, _phases(trace, op, rows), np.int8(-1))


def blocks_table(trace: Trace) -> pd.DataFrame:
    """One row a block: the columns of ``Blocks``, codes and ids as text, unknown as NA. Bytes and ns."""
    import pandas as pd

    found = blocks(trace)
    table: dict[str, object] = {}
    for field in fields(found):
        values = getattr(found, field.name)
        if field.name in ("category", "phase", "device"):
            words = {"category": CATEGORIES, "phase": PHASES, "device": trace.devices}[field.name]
            table[field.name] = pd.Categorical.from_codes(values.tolist(), pd.Index(words))
        elif field.name in ("name", "module", "op_name"):
            used = [int(number) for number in np.unique(values) if number >= 0]
            texts = {number: trace.name(number) for number in used}
            table[field.name] = pd.Series([texts.get(int(number)) for number in values], dtype="string")
        elif values.dtype == bool:
            table[field.name] = values
        else:
            table[field.name] = pd.arrays.IntegerArray(values.astype(np.int64), values < 0)
    frame: pd.DataFrame = pd.DataFrame(table).rename_axis("block_id")
    return frame
