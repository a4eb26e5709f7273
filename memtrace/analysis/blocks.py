"""Blocks: one lifetime of one allocation each, with its accesses, its origin and its category."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column, phase_rows, step_rows
from memtrace.analysis.interrupted import optimizer_state_in_creation, waits_for_backward
from memtrace.format.arrays import Array
from memtrace.format.keyframes import find_sorted, strongest_labels
from memtrace.format.schema import CATEGORIES, PHASES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

CATEGORY = {name: np.int8(code) for code, name in enumerate(CATEGORIES)}
PERSISTENT = (CATEGORY["parameter"], CATEGORY["optimizer_state"])
"""Categories of memory that stays allocated throughout training."""


@dataclass(frozen=True)
class Blocks:
    """Columns indexed by block; -1 is none or unknown. Bytes, ns, and rows of the table events.

    ``category`` and ``phase`` are codes into the tuples of ``schema``, ``device`` into ``Trace.devices``; ``name``,
    ``module``, ``stack`` and ``op_name`` are ids of the table names.
    """

    device: Array
    size: Array
    """Requested bytes; the allocator's size where only that is known (a Chrome trace of a GPU)."""
    size_is_requested: Array
    """Whether ``size`` is requested bytes."""
    allocated_size: Array
    """Bytes that the allocator counts, where the file has them; see ``allocated_sizes``."""
    address: Array
    stream: Array
    alloc_ns: Array
    """Time of the allocation; -1 for a block older than the recording."""
    free_ns: Array
    alloc_event: Array
    """Row of the allocation; -1 for a block that is live from the start: older than the recording or the window."""
    free_event: Array
    """Row of the free; -1 for a block that is live at the end."""
    first_access_ns: Array
    last_access_ns: Array
    num_reads: Array
    num_writes: Array
    category: Array
    category_is_labeled: Array
    """Whether the category is a label of the program; otherwise it is inferred."""
    name: Array
    """Name that the program gives the tensor."""
    module: Array
    """Module whose forward call allocated the block (of a backward operator: that of its forward operator)."""
    stack: Array
    op_name: Array
    phase: Array
    """Phase of the allocation."""
    step: Array
    """Step of the allocation; -1 outside all steps and for a block that is live from the start."""
    waits_for_backward: Array
    """Whether memory ran out before backward could read the block (``analysis.interrupted``)."""

    def __len__(self) -> int:
        return len(self.size)


def blocks(trace: Trace) -> Blocks:
    """Return the blocks of a single-rank trace, computed once.

    A block's category is its strongest label, if the program gave it one. Otherwise it follows from the accesses, by
    the first rule that fits: *workspace*: allocated and freed within one operator call. *activation*: allocated in
    forward (or by a recomputed forward operator) and read in backward; without recorded accesses, freed in backward; of
    a step in which an allocation fails, live then and not read yet (``waits_for_backward``).
    *optimizer_state*: filled by an optimizer in a call in which an allocation fails, and live then.
    *input*: allocated outside the phases and read in forward. *temporary*: freed in the phase and step that allocated
    it. Everything else is *unknown*.

    The blocks of a window are judged by the parts around it (``Trace.surroundings``), so a window and the whole trace
    agree unless a block is first read, labeled or freed after the part in which the window ends.
    """
    return trace.cached(_compute_blocks)


def _compute_blocks(trace: Trace) -> Blocks:
    events = trace.columns(
        "events", "time_ns", "kind", "device", "block_id", "size", "allocated_size", "address", "stream"
    )
    kind, block, time = events["kind"], events["block_id"], events["time_ns"]
    rows, origins = trace.cached(_find_rows), _find_origins(trace)
    count = len(rows.begin)
    reads = np.flatnonzero(kind == KIND["read"])
    writes = np.flatnonzero(kind == KIND["write"])
    accesses = np.flatnonzero((kind == KIND["read"]) | (kind == KIND["write"]))

    def at(event_rows: Array, column: str) -> Array:
        return np.where(event_rows >= 0, events[column][event_rows], events[column].dtype.type(-1))

    def scatter(event_rows: Array, values: Array) -> Array:
        column = np.full(count, -1, np.int64)
        column[block[event_rows]] = values
        return column

    requested, allocated_size = at(rows.begin, "size"), at(rows.begin, "allocated_size")
    return Blocks(
        device=at(rows.begin, "device"),
        size=np.where(requested >= 0, requested, np.maximum(allocated_size, 0)),
        size_is_requested=requested >= 0,
        allocated_size=allocated_size,
        address=at(rows.begin, "address"),
        stream=at(rows.begin, "stream"),
        alloc_ns=np.where(at(rows.begin, "kind") != KIND["baseline"], at(rows.begin, "time_ns"), -1),
        free_ns=at(rows.free, "time_ns"),
        alloc_event=rows.alloc,
        free_event=rows.free,
        # Fancy assignment keeps the last value: backwards for the first access.
        first_access_ns=scatter(accesses[::-1], time[accesses[::-1]]),
        last_access_ns=scatter(accesses, time[accesses]),
        num_reads=np.bincount(block[reads], minlength=count).astype(np.int32),
        num_writes=np.bincount(block[writes], minlength=count).astype(np.int32),
        category=origins.category,
        category_is_labeled=origins.category_is_labeled,
        name=origins.name,
        module=origins.module,
        stack=origins.stack,
        op_name=origins.op_name,
        phase=origins.phase,
        step=np.where(rows.alloc >= 0, origins.step, -1),
        waits_for_backward=origins.waits_for_backward,
    )


def allocated_sizes(trace: Trace) -> Array:
    """Return the bytes that the allocator counts for each block, rounding included; -1: unknown (cached).

    Where the file lacks some of a device, an exact replay of the device's allocator supplies them.
    """
    return trace.cached(_allocated_sizes)


def _allocated_sizes(trace: Trace) -> Array:
    table = blocks(trace)
    sizes = table.allocated_size.astype(np.int64)
    for code in np.unique(table.device[(sizes < 0) & (table.device >= 0)]).tolist():
        missing = np.flatnonzero((table.device == code) & (sizes < 0))
        replayed = _replayed_sizes(trace, trace.devices[code])
        if replayed is not None:
            sizes[missing] = replayed[missing]
    return sizes


def _replayed_sizes(trace: Trace, device: str) -> Array | None:
    """Return the sizes of blocks by a replay; a window has no history of its own and asks its surroundings."""
    around = trace.surroundings
    if around is None:
        # Takes a twelfth of a second to import, and few traces need it.
        from memtrace.allocator.exact_replay import replayed_block_sizes

        return replayed_block_sizes(trace, device)
    sizes = _replayed_sizes(around, device) if device in around.devices else None
    return None if sizes is None else sizes[_places_around(trace, around)]


@dataclass(frozen=True)
class _Rows:
    """Rows of events, indexed by block; -1 for none."""

    begin: Array
    alloc: Array
    """``begin`` where that is an allocation within the trace."""
    free: Array


def _find_rows(trace: Trace) -> _Rows:
    events = trace.columns("events", "kind", "block_id")
    kind, block = events["kind"], events["block_id"]
    begins = (kind == KIND["alloc"]) | (kind == KIND["baseline"]) | (kind == KIND["live"])
    columns = []
    for of_kind in (begins, kind == KIND["alloc"], kind == KIND["free"]):
        rows = np.flatnonzero(of_kind & (block >= 0))
        column = np.full(int(block.max(initial=-1)) + 1, -1, np.int64)
        column[block[rows]] = rows
        columns.append(column)
    return _Rows(*columns)


@dataclass(frozen=True)
class _Origins:
    """What blocks are for and where they come from, indexed by block; see ``Blocks``."""

    category: Array
    category_is_labeled: Array
    name: Array
    module: Array
    stack: Array
    op_name: Array
    phase: Array
    step: Array
    waits_for_backward: Array


def _find_origins(trace: Trace) -> _Origins:
    """Return the origins of the blocks; those of a window as its surroundings know them."""
    return trace.cached(_compute_origins)


def _compute_origins(trace: Trace) -> _Origins:
    around = trace.surroundings
    if around is None:
        return _origins_by_use(trace)
    origins = _find_origins(around)
    places = _places_around(trace, around)
    return _Origins(**{field.name: getattr(origins, field.name)[places] for field in fields(origins)})


def _places_around(trace: Trace, around: Trace) -> Array:
    """Return the number that each block of a window has in its surroundings."""
    block = trace.columns("events", "block_id")["block_id"]
    ids = trace.block_ids if trace.block_ids is not None else np.arange(int(block.max(initial=-1)) + 1)
    return ids if around.block_ids is None else find_sorted(around.block_ids, ids)[0]


@dataclass(frozen=True)
class _Keyframe:
    """What the keyframe at the start of a trace says of its blocks, indexed by block."""

    is_live: Array
    """Whether the block was allocated before the trace begins, within the recording."""
    order_ns: Array
    step: Array
    span_phase: Array
    read_in_forward: Array
    read_in_backward: Array


def _read_keyframe(trace: Trace, count: int) -> _Keyframe:
    is_live = np.zeros(count, bool)
    if trace.num_rows("live"):
        events = trace.columns("events", "kind", "block_id")
        is_live[events["block_id"][(events["kind"] == KIND["live"]) & (events["block_id"] >= 0)]] = True
    names = ("order_ns", "step", "span_phase", "read_in_forward", "read_in_backward")
    live = trace.columns("live", "block_id", *names)
    rows = np.flatnonzero(live["block_id"] >= 0)
    columns = {}
    for name in names:
        columns[name] = np.full(count, False if live[name].dtype == bool else -1, live[name].dtype)
        columns[name][live["block_id"][rows]] = live[name][rows]
    return _Keyframe(is_live, **columns)


def _origins_by_use(trace: Trace) -> _Origins:
    """Return the origins of the blocks by operators, labels and accesses."""
    rows = trace.cached(_find_rows)
    op = np.where(rows.begin >= 0, trace.columns("events", "op_id")["op_id"][rows.begin], -1)
    keyframe = _read_keyframe(trace, len(op))
    category, name = _labels(trace, len(op))
    phase = _alloc_phases(trace, op, rows.alloc, keyframe)
    step = _alloc_steps(trace, rows.alloc, keyframe)
    waits = waits_for_backward(trace, op, phase, rows.alloc, rows.free)
    by_use = _categories_by_use(trace, rows, op, phase, step, waits, keyframe)
    by_use[optimizer_state_in_creation(trace, op, phase, rows.alloc, rows.free)] = CATEGORY["optimizer_state"]
    return _Origins(
        category=np.where(category >= 0, category, by_use),
        category_is_labeled=category >= 0,
        name=name,
        module=op_column(trace, op, "module"),
        stack=op_column(trace, op, "stack"),
        op_name=op_column(trace, op, "name"),
        phase=phase,
        step=step,
        waits_for_backward=waits,
    )


def _labels(trace: Trace, count: int) -> tuple[Array, Array]:
    """Return the category and the name of each block by its labels."""
    labels = trace.columns("labels", "block_id", "category", "name")
    rows = np.flatnonzero((labels["block_id"] >= 0) & (labels["block_id"] < count))
    category, name, _ = strongest_labels(
        labels["block_id"][rows], labels["category"][rows], labels["name"][rows], count
    )
    return category, name


def _alloc_steps(trace: Trace, alloc_event: Array, keyframe: _Keyframe) -> Array:
    """Return the step of each allocation, also of those before the trace begins."""
    steps = step_rows(trace)
    step = np.where(alloc_event >= 0, steps.of_rows(alloc_event), keyframe.step)
    is_open = keyframe.is_live & (step < 0)
    if len(steps.number) and is_open.any():
        step[is_open] = steps.of_times(keyframe.order_ns[is_open])
    return step


def _alloc_phases(trace: Trace, op: Array, alloc_event: Array, keyframe: _Keyframe) -> Array:
    """Return the phase of each allocation by its operator, else by the spans of kind phase."""
    phase = phases_at(trace, op, alloc_event)
    phase = np.where((phase < 0) & keyframe.is_live, keyframe.span_phase, phase)
    is_open = keyframe.is_live & (phase < 0)
    spans = phase_rows(trace)
    if spans is not None and is_open.any():
        phase[is_open] = spans.of_times(keyframe.order_ns[is_open])
    return phase


def phases_at(trace: Trace, op: Array, rows: Array) -> Array:
    """Return the phase of each operator call, else of its row of events by the spans; -1 where neither is known.

    Args:
        trace: a single-rank trace.
        op: ids of operator calls; -1: none.
        rows: rows of events; -1: none.
    """
    phase = op_column(trace, op, "phase")
    spans = phase_rows(trace)
    missing = (phase < 0) & (rows >= 0)
    if spans is not None and missing.any():
        phase = phase.copy()
        phase[missing] = spans.phase[spans.pieces(rows[missing])]
    return phase


def _categories_by_use(
    trace: Trace, rows: _Rows, op: Array, phase: Array, step: Array, waits: Array, keyframe: _Keyframe
) -> Array:
    free_op = np.where(rows.free >= 0, trace.columns("events", "op_id")["op_id"][rows.free], -1)
    freed_phase = phases_at(trace, free_op, rows.free)
    freed_step = np.where(rows.free >= 0, step_rows(trace).of_rows(np.maximum(rows.free, 0)), -2)
    reads = _read_phases(trace, keyframe)
    in_forward, in_backward = reads if reads else (np.zeros(len(op), bool), freed_phase == PHASE["backward"])
    made_in_forward = (phase == PHASE["forward"]) | op_column(trace, op, "recompute")
    category = np.full(len(op), CATEGORY["unknown"])
    in_recording = (rows.alloc >= 0) | keyframe.is_live
    same_phase = (freed_phase == phase) & (phase >= 0) & (freed_step == step)
    # Weakest rule first.
    category[in_recording & same_phase] = CATEGORY["temporary"]
    category[in_recording & (phase == PHASE["other"]) & in_forward] = CATEGORY["input"]
    category[in_recording & (op < 0) & in_forward & ~same_phase] = CATEGORY["input"]
    category[waits] = CATEGORY["activation"]
    category[in_recording & made_in_forward & in_backward] = CATEGORY["activation"]
    category[in_recording & (op >= 0) & (free_op == op)] = CATEGORY["workspace"]
    return category


def _read_phases(trace: Trace, keyframe: _Keyframe) -> tuple[Array, Array] | None:
    """Return which blocks operators of forward and of backward read; None where accesses were not recorded."""
    events = trace.columns("events", "kind", "block_id", "op_id")
    reads = np.flatnonzero((events["kind"] == KIND["read"]) & (events["block_id"] >= 0))
    has_accesses = trace.manifest.coverage.has_accesses
    if not (len(reads) if has_accesses is None else has_accesses):
        return None
    phase = op_column(trace, events["op_id"][reads], "phase")
    recompute = op_column(trace, events["op_id"][reads], "recompute")
    in_forward, in_backward = keyframe.read_in_forward.copy(), keyframe.read_in_backward.copy()
    in_forward[events["block_id"][reads[phase == PHASE["forward"]]]] = True
    in_backward[events["block_id"][reads[(phase == PHASE["backward"]) & ~recompute]]] = True
    return in_forward, in_backward


def allocating_op(trace: Trace, block: Array) -> Array:
    """Return the operator call that allocated each block; -1: unknown."""
    alloc_event = blocks(trace).alloc_event[block]
    return np.where(alloc_event >= 0, trace.columns("events", "op_id")["op_id"][alloc_event], -1)


def blocks_table(trace: Trace) -> pd.DataFrame:
    """Return one row per block: the columns of ``Blocks``, codes and ids as text, unknown as NA. Bytes and ns."""
    import pandas as pd

    columns = blocks(trace)
    table: dict[str, object] = {}
    for field in fields(columns):
        values = allocated_sizes(trace) if field.name == "allocated_size" else getattr(columns, field.name)
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
