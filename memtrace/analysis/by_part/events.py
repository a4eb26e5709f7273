"""Second pass over the parts of a rank: reads a part once and measures its levels, its steps and what outlives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from memtrace.analysis.by_part.levels import NO_DEVICE, DeviceFacts, find_fullest, find_levels
from memtrace.analysis.by_part.retained import (
    NO_BLOCKS,
    OpenBlocks,
    RetainedFacts,
    close_blocks,
    join_retained,
)
from memtrace.analysis.by_part.spans import Cuts
from memtrace.analysis.by_part.step_facts import StepFacts, find_rows, measure_steps
from memtrace.analysis.event_codes import KIND
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.format.arrays import Array
from memtrace.format.keyframes import find_sorted
from memtrace.trace import StoredPart, Trace

_EVENTS = ("time_ns", "kind", "device", "block_id", "size", "allocated_size", "op_id")
_SEGMENTS = ("address", "stream", "pool")
_LIVE = ("kind", "device", "block_id", "size", "allocated_size", "op_id", "op_stack", "op_name")
_GROWS = (KIND["segment_alloc"], KIND["segment_map"])
_SHRINKS = (KIND["segment_free"], KIND["segment_unmap"])


class NotDivisibleError(Exception):
    """The parts cannot be analyzed one by one; the trace must be analyzed whole."""


@dataclass(frozen=True)
class EventFacts:
    """What a run of parts holds of the events. Rows count from the first event of the run."""

    part_events: tuple[int, ...]
    """Number of events of each part."""
    num_events: int
    first_ns: int
    last_ns: int
    num_failures: int
    """Allocations that failed."""
    last_block: int
    """Largest number of a block; -1 without blocks."""
    devices: Mapping[str, DeviceFacts]
    live_bytes: int
    """Change of the live bytes of all devices."""
    baseline_bytes: int
    steps: StepFacts
    retained: RetainedFacts
    collected_bytes: Mapping[int, int]
    """Bytes that the garbage collector freed, by call stack."""

    def joined(self, later: EventFacts, num_ends: int) -> EventFacts:
        """Return the facts of two runs that follow each other; ``num_ends`` is the number of step ends of the trace."""
        names = list(dict.fromkeys([*self.devices, *later.devices]))
        collected = dict(self.collected_bytes)
        for stack, num_bytes in later.collected_bytes.items():
            collected[stack] = collected.get(stack, 0) + num_bytes
        return EventFacts(
            part_events=self.part_events + later.part_events,
            num_events=self.num_events + later.num_events,
            first_ns=self.first_ns if self.num_events else later.first_ns,
            last_ns=later.last_ns if later.num_events else self.last_ns,
            num_failures=self.num_failures + later.num_failures,
            last_block=max(self.last_block, later.last_block),
            devices={
                name: self.devices.get(name, NO_DEVICE).joined(later.devices.get(name, NO_DEVICE), self.num_events)
                for name in names
            },
            live_bytes=self.live_bytes + later.live_bytes,
            baseline_bytes=self.baseline_bytes + later.baseline_bytes,
            steps=self.steps.joined(later.steps, self.num_events, self.live_bytes),
            retained=join_retained(self.retained, later.retained, num_ends),
            collected_bytes=collected,
        )


@dataclass(frozen=True)
class _PartBlocks:
    """The blocks of a part: those of its keyframe, then those that begin in it. -1: none or unknown."""

    id: Array
    """Ascending."""
    size: Array
    allocated: Array
    device: Array
    row: Array
    """Row in which the block begins; -1 for those of the keyframe."""
    is_alloc: Array
    """Whether the row is an allocation, not the first sight of a block that is older than the recording."""
    free_row: Array
    requested_row: Array
    """Row in which the program requests the free."""
    keyframe_row: Array


def read_events(trace: Trace, number: int, cuts: Cuts) -> EventFacts:
    """Return the facts about the events of one part of a single-rank trace.

    Raises:
        NotDivisibleError: a block begins or ends twice, or the trace ran out of memory.
    """
    stored = trace.stored_columns(number, {"events": _EVENTS, "live": _LIVE})
    events, live = stored.columns["events"], stored.columns["live"]
    kind, num_rows = events["kind"], len(events["kind"])
    blocks = _find_blocks(events, live)
    num_failures = int(np.count_nonzero(kind == KIND["oom"]))
    allocated = blocks.is_alloc & (blocks.row >= 0)
    is_begun = blocks.row >= 0
    devices, live_change = {}, np.zeros(num_rows, np.int64)
    segments = _segment_rows(trace, number, kind)
    for code, name in enumerate(stored.devices):
        of_device = blocks.device == code
        changes = _changes(blocks, of_device, blocks.size, blocks.free_row, num_rows)
        live_change += changes
        devices[name] = _measure_device(name, number, blocks, of_device, changes, segments, stored)
    rows = find_rows(events["time_ns"], cuts.steps.start_ns, cuts.steps.end_ns, cuts.order_ns)
    alloc = np.flatnonzero(allocated)
    alloc = alloc[np.argsort(blocks.row[alloc], kind="stable")]
    steps = measure_steps(cuts, rows, kind, live_change, blocks.row[alloc], blocks.size[alloc])
    ends = _StepEnds(cuts.first_step, rows.end_row[rows.owns_end], max(cuts.num_steps - WARM_UP_STEPS, 0))
    origins = _Origins(trace, number, events, live, blocks)
    time = events["time_ns"]
    return EventFacts(
        part_events=(num_rows,),
        num_events=num_rows,
        first_ns=int(time[0]) if num_rows else 0,
        last_ns=int(time[-1]) if num_rows else 0,
        num_failures=num_failures,
        last_block=int(blocks.id[-1]) if len(blocks.id) else -1,
        devices=devices,
        live_bytes=int(live_change.sum()),
        baseline_bytes=int(blocks.size[is_begun & ~blocks.is_alloc].sum()),
        steps=steps,
        retained=_retained(blocks, ends, origins, number),
        collected_bytes=_collected(blocks, cuts, time, origins),
    )


def _find_blocks(events: Mapping[str, Array], live: Mapping[str, Array]) -> _PartBlocks:
    kind, block = events["kind"], events["block_id"]
    is_begin = (kind == KIND["alloc"]) | (kind == KIND["baseline"]) | (kind == KIND["live"])
    begins = np.flatnonzero(is_begin & (block >= 0))
    older = np.flatnonzero(live["block_id"] >= 0)
    ids = np.concatenate([live["block_id"][older], block[begins]]).astype(np.int64)
    columns = {
        name: np.concatenate([live[name][older], events[name][begins]])
        for name in ("size", "allocated_size", "device", "kind")
    }
    row = np.concatenate([np.full(len(older), -1), begins])
    keyframe_row = np.concatenate([older, np.full(len(begins), -1)])
    if (ids[1:] <= ids[:-1]).any():
        order = np.argsort(ids, kind="stable")
        ids, row, keyframe_row = ids[order], row[order], keyframe_row[order]
        columns = {name: values[order] for name, values in columns.items()}
        if (ids[1:] == ids[:-1]).any():
            raise NotDivisibleError("a block begins twice")
    requested, allocated = columns["size"].astype(np.int64), columns["allocated_size"].astype(np.int64)
    ends = [_rows_of(events, ids, name) for name in ("free", "free_requested")]
    return _PartBlocks(
        id=ids,
        size=np.where(requested >= 0, requested, np.maximum(allocated, 0)),
        allocated=allocated,
        device=columns["device"],
        row=row,
        is_alloc=columns["kind"] == KIND["alloc"],
        free_row=ends[0],
        requested_row=ends[1],
        keyframe_row=keyframe_row,
    )


def _rows_of(events: Mapping[str, Array], ids: Array, name: str) -> Array:
    """Return for each block the row with an event of a kind; -1: none."""
    rows = np.flatnonzero((events["kind"] == KIND[name]) & (events["block_id"] >= 0))
    result = np.full(len(ids), -1)
    if not len(rows):
        return result
    place, found = _places(ids, events["block_id"][rows])
    result[place[found]] = rows[found]
    if not found.all() or np.count_nonzero(result >= 0) != len(rows):
        raise NotDivisibleError(f"a block has another {name} than its own")
    return result


def _places(ids: Array, wanted: Array) -> tuple[Array, Array]:
    """Return the place of each wanted id among ascending ids, and whether it is there.

    Most blocks of a part begin in it, and those are numbered one after another: their places follow from the ids.
    """
    if not len(ids):
        return find_sorted(ids, wanted)
    last = int(ids[-1])
    num_dense = int(np.searchsorted(-(ids[::-1] + np.arange(len(ids))), -last, side="right"))
    first_dense = last - num_dense + 1
    places = (wanted.astype(np.int64) - first_dense) + (len(ids) - num_dense)
    is_dense = (wanted >= first_dense) & (wanted <= last)
    others = np.flatnonzero(~is_dense)
    found = is_dense
    places[others], found[others] = find_sorted(ids[: len(ids) - num_dense], wanted[others])
    return places, found


def _changes(blocks: _PartBlocks, chosen: Array, sizes: Array, end_row: Array, num_rows: int) -> Array:
    """Return the change of a byte count in each row by the blocks that begin and end in the part."""
    change = np.zeros(num_rows, np.int64)
    begun = np.flatnonzero(chosen & blocks.is_alloc & (blocks.row >= 0))
    ended = np.flatnonzero(chosen & (end_row >= 0))
    change[blocks.row[begun]] = sizes[begun]
    change[end_row[ended]] -= sizes[ended]
    return change


def _measure_device(
    name: str,
    number: int,
    blocks: _PartBlocks,
    of_device: Array,
    live_change: Array,
    segments: _SegmentRows,
    stored: StoredPart,
) -> DeviceFacts:
    begun = of_device & (blocks.row >= 0)
    older = np.flatnonzero(begun & ~blocks.is_alloc)
    facts = DeviceFacts(
        live=find_levels(live_change, number),
        is_requested=bool((stored.columns["events"]["size"][blocks.row[begun]] >= 0).all()),
        is_allocated_known=not (blocks.allocated[begun] < 0).any(),
        num_blocks=int(np.count_nonzero(begun)),
        older_bytes=int(blocks.size[older].sum()),
        older_ids=((number, blocks.id[older]),) if len(older) else (),
    )
    if facts.is_allocated_known:
        facts = _measure_allocated(facts, number, blocks, of_device, live_change, has_requests=name != "cpu")
    if name == "cpu":  # its allocator has no segments
        return facts
    if name not in segments.devices:
        return replace(facts, fullest=find_fullest(live_change, np.zeros_like(live_change), number))
    reserved_change = segments.changes(name, len(live_change))
    return replace(
        facts,
        reserved=find_levels(reserved_change, number),
        fullest=find_fullest(live_change, reserved_change, number),
        segment_rows=segments.columns_of(name),
    )


def _measure_allocated(
    facts: DeviceFacts, number: int, blocks: _PartBlocks, of_device: Array, live_change: Array, *, has_requests: bool
) -> DeviceFacts:
    """Add the levels of the allocated bytes to the facts about a device.

    A block counts until the program requests its free. Where frees are requested, a block that is freed and whose free
    was not requested in the part had it requested earlier, and does not count any more.
    """
    sizes, num_rows = blocks.allocated, len(live_change)
    older = of_device & (blocks.row >= 0) & ~blocks.is_alloc
    has_equal_sizes = bool((sizes == blocks.size)[of_device].all())
    until_free = facts.live
    if not has_equal_sizes:
        until_free = find_levels(_changes(blocks, of_device, sizes, blocks.free_row, num_rows), number)
    num_requests = int(np.count_nonzero(of_device & (blocks.requested_row >= 0)))
    until_request = until_free
    if has_requests:
        until_request = find_levels(_changes(blocks, of_device, sizes, blocks.requested_row, num_rows), number)
    is_waiting = of_device & (blocks.requested_row < 0) & (blocks.free_row >= 0)
    return replace(
        facts,
        allocated=until_request,
        allocated_until_free=until_free,
        num_requests=num_requests,
        older_allocated_bytes=int(sizes[older].sum()),
        waiting_bytes=int(sizes[older & is_waiting].sum()),
    )


@dataclass(frozen=True)
class _SegmentRows:
    """The segment events of a part."""

    devices: tuple[str, ...]
    code: Array
    columns: tuple[Array, ...]
    """Row, kind, address, size, stream, pool."""

    def columns_of(self, device: str) -> tuple[Array, ...]:
        """Return the columns of one device."""
        chosen = np.flatnonzero(self.code == self.devices.index(device))
        return tuple(column[chosen] for column in self.columns)

    def changes(self, device: str, num_rows: int) -> Array:
        """Return the change of the reserved bytes in each row of the part."""
        row, kind, _, size, *_ = self.columns_of(device)
        change = np.zeros(num_rows, np.int64)
        change[row] = np.where(np.isin(kind, _GROWS), size, -size)
        return change


def _segment_rows(trace: Trace, number: int, kind: Array) -> _SegmentRows:
    rows = np.flatnonzero(np.isin(kind, (*_GROWS, *_SHRINKS))) if kind.max(initial=0) >= min(_GROWS) else kind[:0]
    if not len(rows):
        return _SegmentRows((), np.empty(0, np.int8), ())
    stored = trace.stored_columns(number, {"events": ("device", "size", *_SEGMENTS)})
    events = stored.columns["events"]
    columns = (rows, kind[rows], *(events[name][rows] for name in ("address", "size", "stream", "pool")))
    code = events["device"][rows]
    present = tuple(name for place, name in enumerate(stored.devices) if (code == place).any())
    place_of = np.array([present.index(name) if name in present else -1 for name in stored.devices], np.int64)
    return _SegmentRows(present, place_of[code], columns)


@dataclass(frozen=True)
class _StepEnds:
    """The ends of steps in a part, as numbers of step ends after warm-up up to a row."""

    num_before: int
    """Number of step ends before the part, warm-up steps included."""
    rows: Array
    num_ends: int
    """Number of step ends of the trace, without warm-up steps."""

    def up_to(self, rows: Array) -> Array:
        """Return how many step ends are at or before each row, without those of warm-up steps."""
        number = self.num_before + np.searchsorted(self.rows, rows, side="right")
        return np.maximum(number - WARM_UP_STEPS, 0)


@dataclass(frozen=True)
class _Origins:
    """Finds the call stacks of blocks of a part."""

    trace: Trace
    number: int
    events: Mapping[str, Array]
    live: Mapping[str, Array]
    blocks: _PartBlocks

    def stacks(self, chosen: Array) -> Array:
        """Return the stack of each block, by the operator call that allocated it."""
        rows, keyframe_rows = self.blocks.row[chosen], self.blocks.keyframe_row[chosen]
        is_older = keyframe_rows >= 0
        stack, op = np.full(len(chosen), -1, np.int64), np.full(len(chosen), -1, np.int64)
        op[~is_older] = self.events["op_id"][rows[~is_older]]
        older = keyframe_rows[is_older]
        stack[is_older] = self.live["op_stack"][older]
        # A call that had not returned when the part began has no name there.
        op[is_older] = np.where(self.live["op_name"][older] < 0, self.live["op_id"][older], -1)
        return find_stacks(self.trace, self.number, op, stack)


def find_stacks(trace: Trace, number: int, op: Array, known: Array) -> Array:
    """Return the call stack of each operator call of a part; that which is known where the call is not in the trace.

    Args:
        trace: a single-rank trace.
        number: the part.
        op: ids of the calls; -1: none.
        known: what else is known of the stack; -1: nothing.
    """
    stack: Array = known.copy()
    numbers = trace.part_numbers
    missing = np.flatnonzero(op >= 0)
    # A call that is in flight at the end of a part is in one of the next.
    for place in range(numbers.index(number), len(numbers)):
        if not len(missing):
            break
        ops = trace.stored_columns(numbers[place], {"ops": ("op_id", "stack")}).columns["ops"]
        order = np.argsort(ops["op_id"], kind="stable")
        rows, found = find_sorted(ops["op_id"][order], op[missing])
        stack[missing[found]] = ops["stack"][order[rows[found]]] if len(order) else -1
        missing = missing[~found]
        if place > numbers.index(number) + 1:
            break
    return stack


def _retained(blocks: _PartBlocks, ends: _StepEnds, origins: _Origins, number: int) -> RetainedFacts:
    begun = np.flatnonzero(blocks.is_alloc & (blocks.row >= 0))
    first, end = ends.up_to(blocks.row[begun]), ends.up_to(np.maximum(blocks.free_row[begun], 0))
    is_open = blocks.free_row[begun] < 0
    chosen = np.flatnonzero(is_open | (end > first))
    begun, first, end, is_open = begun[chosen], first[chosen], end[chosen], is_open[chosen]
    part = np.full(len(begun), number)
    everything = OpenBlocks(blocks.id[begun], origins.stacks(begun), blocks.size[begun], first, part)
    closed = np.flatnonzero(~is_open)
    facts = close_blocks(everything.take(closed), end[closed], part[closed], ends.num_ends)
    older = np.flatnonzero((blocks.row < 0) & (blocks.free_row >= 0))
    older_freed = np.stack([blocks.id[older], ends.up_to(blocks.free_row[older]), np.full(len(older), number)])
    still_open = everything.take(np.flatnonzero(is_open)) if is_open.any() else NO_BLOCKS
    return RetainedFacts(facts.live, facts.kept, facts.stacks, facts.at_end, still_open, older_freed)


def _collected(blocks: _PartBlocks, cuts: Cuts, time: Array, origins: _Origins) -> dict[int, int]:
    """Return the bytes that the garbage collector freed in the part, by call stack."""
    if not len(cuts.collections.start_ns):
        return {}
    rows = find_rows(time, cuts.collections.start_ns, cuts.collections.end_ns, cuts.order_ns)
    collection = np.searchsorted(rows.first_row, blocks.free_row, side="right") - 1
    inside = (blocks.free_row >= 0) & (collection >= 0)
    inside &= blocks.free_row < rows.end_row[np.maximum(collection, 0)]
    freed = np.flatnonzero(inside)
    stacks, inverse = np.unique(origins.stacks(freed), return_inverse=True)
    total = np.zeros(len(stacks), np.int64)
    np.add.at(total, inverse, blocks.size[freed])
    return dict(zip(stacks.tolist(), total.tolist(), strict=True))
