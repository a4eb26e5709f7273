"""The blocks of a device with all that is known of each, for views that look blocks up by instant, place or text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import KIND, op_column, step_rows
from memtrace.analysis.block_groups import find_owning_modules
from memtrace.analysis.blocks import allocated_sizes, blocks, phases_at
from memtrace.analysis.missing_stacks import missing_stack_reasons
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class BlockCatalog:
    """Blocks in the order of their allocation: one element per block in every array, -1 for none or unknown.

    A block is live after each row of events from ``begin_row`` to the one before ``end_row``.
    """

    place: Array
    """Index of the block in ``blocks(trace)``."""
    block: Array
    """Id of the block, the same in a window and in the whole trace."""
    begin_row: Array
    """Row of the allocation; -1: live from the start of the trace."""
    end_row: Array
    """Row of the free; the number of rows where the block is live at the end."""
    begin_ns: Array
    end_ns: Array
    size: Array
    """Requested bytes."""
    allocated_size: Array
    """Bytes that the allocator counts."""
    address: Array
    stream: Array
    category: Array
    """Code into ``schema.CATEGORIES``."""
    is_labeled: Array
    """Whether the category is a label of the program; otherwise it is inferred."""
    is_likely: Array
    """Whether the category is only likely: memory ran out before the backward that would have read the block."""
    phase: Array
    """Code into ``schema.PHASES``."""
    step: Array
    num_reads: Array
    num_writes: Array
    name: Array
    """Index into ``names``."""
    operator: Array
    """Index into ``operators``."""
    module: Array
    """Index into ``modules``."""
    stack: Array
    """Index into ``stacks``."""
    no_stack_reason: Array
    """Index into ``no_stack_reasons``; -1: the block has a call stack."""
    free_operator: Array
    """Index into ``operators``: the operator call that freed the block."""
    free_module: Array
    """Index into ``modules``: the module of that operator call."""
    free_phase: Array
    free_step: Array
    names: tuple[str | None, ...]
    operators: tuple[str | None, ...]
    modules: tuple[str | None, ...]
    """Modules that own the blocks (`find_owning_modules`)."""
    stacks: tuple[int, ...]
    """Ids of call stacks in the table names; -1: none."""
    stack_sites: tuple[str | None, ...]
    """The allocation site of each of ``stacks``."""
    no_stack_reasons: tuple[str, ...]
    """Why blocks have no call stack, as phrases."""
    num_blocks: int
    """Blocks of the device, whether among those of the catalog or not."""

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class LeftOutBlocks:
    """Sums over the blocks of a device that a catalog leaves out, after some rows of events."""

    row: Array
    """Rows of events, ascending; the first is -1, the start of the trace."""
    live_bytes: Array
    num_live: Array
    allocated_bytes: Array
    """Bytes of the blocks allocated up to the row."""
    num_allocated: Array


def catalog_blocks(trace: Trace, device: str, max_blocks: int) -> BlockCatalog:
    """Return the largest blocks of a device, at most ``max_blocks``.

    Args:
        trace: A single-rank trace.
        device: One of ``trace.devices``.
        max_blocks: Number of blocks in the catalog.
    """
    table = blocks(trace)
    on_device = _blocks_on(trace, device)
    place = on_device
    if len(on_device) > max_blocks:
        place = on_device[np.argsort(-table.size[on_device], kind="stable")[:max_blocks]]
    place = place[np.argsort(table.alloc_event[place], kind="stable")]
    modules, module = find_owning_modules(trace, place)
    stacks, stack = np.unique(table.stack[place], return_inverse=True)
    sites, site = allocation_sites(trace, stacks)
    stackless = np.flatnonzero(table.stack[place] < 0)
    reasons, reason = missing_stack_reasons(trace, place[stackless])
    no_stack_reason = np.full(len(place), -1, np.int64)
    no_stack_reason[stackless] = reason
    names, name = _texts(trace, table.name[place])
    free = table.free_event[place]
    free_op = _freeing_operators(trace, free)
    both = np.concatenate([table.op_name[place], op_column(trace, free_op, "name")])
    operators, operator = _texts(trace, both)
    modules, free_module = _add_texts(trace, modules, op_column(trace, free_op, "module"))
    ids = trace.block_ids
    return BlockCatalog(
        place=place,
        block=place if ids is None else ids[place],
        begin_row=table.alloc_event[place],
        end_row=np.where(free >= 0, free, trace.num_rows("events")),
        begin_ns=table.alloc_ns[place],
        end_ns=table.free_ns[place],
        size=table.size[place],
        allocated_size=allocated_sizes(trace)[place],
        address=table.address[place],
        stream=table.stream[place],
        category=table.category[place],
        is_labeled=table.category_is_labeled[place],
        is_likely=table.waits_for_backward[place],
        phase=table.phase[place],
        step=table.step[place],
        num_reads=table.num_reads[place],
        num_writes=table.num_writes[place],
        name=name,
        operator=operator[: len(place)],
        module=module,
        stack=stack,
        no_stack_reason=no_stack_reason,
        free_operator=operator[len(place) :],
        free_module=free_module,
        free_phase=phases_at(trace, free_op, free),
        free_step=np.where(free >= 0, step_rows(trace).of_rows(np.maximum(free, 0)), -1),
        names=names,
        operators=operators,
        modules=tuple(modules),
        stacks=tuple(stacks.tolist()),
        stack_sites=tuple(sites[index] for index in site.tolist()),
        no_stack_reasons=tuple(reasons),
        num_blocks=len(on_device),
    )


def sum_left_out(trace: Trace, device: str, catalog: BlockCatalog, rows: Array) -> LeftOutBlocks:
    """Return sums over the blocks that a catalog leaves out.

    Args:
        trace: The trace of the catalog.
        device: The device of the catalog.
        catalog: The blocks that are not left out.
        rows: Rows of events, ascending, after which to sum; the start of the trace is added.
    """
    table = blocks(trace)
    left_out = np.setdiff1d(_blocks_on(trace, device), catalog.place, assume_unique=True)
    size, begin, free = table.size[left_out], table.alloc_event[left_out], table.free_event[left_out]
    at = np.concatenate([[-1], rows])
    num_allocated, allocated = _sums_until(begin, size, at)
    num_freed, freed = _sums_until(free[free >= 0], size[free >= 0], at)
    is_older = begin < 0  # live from the start, and not allocated within the trace
    return LeftOutBlocks(
        row=at,
        live_bytes=allocated - freed,
        num_live=num_allocated - num_freed,
        allocated_bytes=allocated - size[is_older].sum(),
        num_allocated=num_allocated - is_older.sum(),
    )


def _sums_until(rows: Array, sizes: Array, at: Array) -> tuple[Array, Array]:
    """Return how many of the blocks have a row up to each of ``at``, and the sum of their sizes."""
    order = np.argsort(rows, kind="stable")
    count = np.searchsorted(rows[order], at, side="right")
    return count, np.concatenate([[0], np.cumsum(sizes[order], dtype=np.int64)])[count]


def _blocks_on(trace: Trace, device: str) -> Array:
    table = blocks(trace)
    return np.flatnonzero((table.device == trace.devices.index(device)) & (table.size > 0))


def _freeing_operators(trace: Trace, free: Array) -> Array:
    """Return the operator call that freed each block, -1: none or unknown.

    With a CUDA device, a block is freed when its streams are done with it; the operator call is that which released it.
    """
    events = trace.columns("events", "kind", "block_id", "op_id")
    op = np.where(free >= 0, events["op_id"][np.maximum(free, 0)], -1)
    requests = np.flatnonzero((events["kind"] == KIND["free_requested"]) & (events["op_id"] >= 0))
    if len(requests):
        requested = np.full(len(blocks(trace)), -1, np.int64)
        requested[events["block_id"][requests]] = events["op_id"][requests]
        is_freed = free >= 0
        by_request = requested[events["block_id"][free[is_freed]]]
        op[is_freed] = np.where(op[is_freed] >= 0, op[is_freed], by_request)
    return op


def _texts(trace: Trace, ids: Array) -> tuple[tuple[str | None, ...], Array]:
    """Return the distinct texts of names, and for each name the index of its text."""
    distinct, index = np.unique(ids, return_inverse=True)
    return tuple(trace.name(int(identity)) for identity in distinct), index


def _add_texts(trace: Trace, texts: list[str | None], ids: Array) -> tuple[list[str | None], Array]:
    """Return texts with those of further names behind them, and for each name the index of its text."""
    added, index = _texts(trace, ids)
    together = list(dict.fromkeys([*texts, *added]))
    number = {text: place for place, text in enumerate(together)}
    return together, np.array([number[text] for text in added], np.int64)[index]
