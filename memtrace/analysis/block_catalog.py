"""The blocks of a device with all that is known of each, for views that look blocks up by instant, place or text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.block_groups import find_owning_modules
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class BlockCatalog:
    """Blocks in the order of their allocation: one element per block in every array, -1 for none or unknown.

    A block is live after each row of events from ``begin_row`` to the one before ``end_row``.
    """

    block: Array
    """Id of the block."""
    begin_row: Array
    """Row of the allocation; -1: live from the start of the trace."""
    end_row: Array
    """Row of the free; the number of rows where the block is live at the end."""
    begin_ns: Array
    end_ns: Array
    size: Array
    """Requested bytes."""
    category: Array
    """Code into ``schema.CATEGORIES``."""
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
    site: Array
    """Index into ``sites``."""
    stack: Array
    """Index into ``stacks``."""
    names: tuple[str | None, ...]
    operators: tuple[str | None, ...]
    modules: tuple[str | None, ...]
    """Modules that own the blocks (`find_owning_modules`)."""
    sites: tuple[str | None, ...]
    stacks: tuple[int, ...]
    """Ids of call stacks in the table names; -1: none."""
    num_blocks: int
    """Blocks of the device, whether among those of the catalog or not."""

    def __len__(self) -> int:
        return len(self.block)


def catalog_blocks(trace: Trace, device: str, max_blocks: int) -> BlockCatalog:
    """Return the largest blocks of a device, at most ``max_blocks``.

    Args:
        trace: A single-rank trace.
        device: One of ``trace.devices``.
        max_blocks: Number of blocks in the catalog.
    """
    table = blocks(trace)
    on_device = np.flatnonzero((table.device == trace.devices.index(device)) & (table.size > 0))
    block = on_device[np.argsort(-table.size[on_device], kind="stable")[:max_blocks]]
    block = block[np.argsort(table.alloc_event[block], kind="stable")]
    modules, module = find_owning_modules(trace, block)
    sites, site = allocation_sites(trace, table.stack[block])
    stacks, stack = np.unique(table.stack[block], return_inverse=True)
    names, name = _texts(trace, table.name[block])
    operators, operator = _texts(trace, table.op_name[block])
    free = table.free_event[block]
    return BlockCatalog(
        block=block,
        begin_row=table.alloc_event[block],
        end_row=np.where(free >= 0, free, trace.num_rows("events")),
        begin_ns=table.alloc_ns[block],
        end_ns=table.free_ns[block],
        size=table.size[block],
        category=table.category[block],
        phase=table.phase[block],
        step=table.step[block],
        num_reads=table.num_reads[block],
        num_writes=table.num_writes[block],
        name=name,
        operator=operator,
        module=module,
        site=site,
        stack=stack,
        names=names,
        operators=operators,
        modules=tuple(modules),
        sites=tuple(sites),
        stacks=tuple(stacks.tolist()),
        num_blocks=len(on_device),
    )


def _texts(trace: Trace, ids: Array) -> tuple[tuple[str | None, ...], Array]:
    """Return the distinct texts of names, and for each name the index of its text."""
    distinct, index = np.unique(ids, return_inverse=True)
    return tuple(trace.name(int(identity)) for identity in distinct), index
