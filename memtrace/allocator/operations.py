"""The operations of a program on the allocator, without addresses, so that any allocator can execute them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from memtrace.allocator.blocks import Block
from memtrace.allocator.history import Bools, Int8s, Int64s
from memtrace.allocator.model import CachingAllocator

ALLOCATE: Final = 0  # a request that was served
FREE: Final = 1  # a free that takes effect at once
DEFER_FREE: Final = 2  # the program frees a block that a stream still uses
EMPTY_CACHE: Final = 3  # the program calls `empty_cache`
FAILED_ALLOCATE: Final = 4  # a request that failed when it was recorded; if it is served, it is freed at once
ABANDON_POOL: Final = 5  # a private pool lost its owner and may be released; the number is that of the pool
COMPLETE_FREE: Final = 6  # the stream is done with a deferred block
RELEASE_POOL: Final = 7  # a private pool lost its owner, which releases only this pool; the number is that of the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSequence:
    """Operations in order, and the request behind each block. Sizes in bytes.

    Blocks are numbered: first those older than the first operation, then one per request, in order.
    """

    operation: Int8s
    """Code of each operation: ALLOCATE, FREE, ..."""
    number: Int64s
    """Block of each operation; for ABANDON_POOL and RELEASE_POOL the pool."""
    entry: Int64s
    """Entry of the history behind each operation; -1: none."""
    requested: Int64s
    """Bytes requested for each block."""
    stream: Int64s
    """Stream of each block."""
    pool: Int64s
    """Memory pool of each block."""
    num_older: int
    """Blocks older than the first operation."""

    def __len__(self) -> int:
        return len(self.operation)

    @property
    def is_request(self) -> Bools:
        """Whether each operation requests memory."""
        requests: Bools = (self.operation == ALLOCATE) | (self.operation == FAILED_ALLOCATE)
        return requests

    @property
    def request_entries(self) -> Int64s:
        """Entries of the history behind the requests, in order."""
        entries: Int64s = self.entry[self.is_request]
        return entries


class PlacedBlocks(NamedTuple):
    """Where an allocator placed the blocks of a sequence, by number; -1 where the request failed."""

    address: Int64s
    size: Int64s
    """Size of each block when it was allocated, rounding and slack included."""


def run_operations(
    sequence: OperationSequence, allocator: CachingAllocator, older: Iterable[Block] | None = None
) -> PlacedBlocks:
    """Execute the operations and return where each block was placed.

    Args:
        sequence: the operations.
        allocator: the allocator that executes them.
        older: blocks older than the first operation, by number; None: they are requested first.
    """
    malloc, free = allocator.malloc, allocator.free
    requested, stream, pool = sequence.requested.tolist(), sequence.stream.tolist(), sequence.pool.tolist()
    blocks: list[Block | None]
    if older is None:
        blocks = [malloc(requested[i], stream[i], pool[i]) for i in range(sequence.num_older)]
    else:
        blocks = list(older)
    blocks += [None] * (len(requested) - len(blocks))
    addresses = [-1 if block is None else block.address for block in blocks]
    sizes = [-1 if block is None else block.size for block in blocks]
    for operation, number in zip(sequence.operation.tolist(), sequence.number.tolist(), strict=True):
        if operation == ALLOCATE:
            block = blocks[number] = malloc(requested[number], stream[number], pool[number])
            if block is not None:
                addresses[number], sizes[number] = block.address, block.size
        elif operation == FREE:
            block = blocks[number]
            if block is not None:
                free(block)
        elif operation == FAILED_ALLOCATE:
            block = malloc(requested[number], stream[number], pool[number])
            if block is not None:
                free(block)
        else:
            _run_rare_operation(allocator, operation, number, blocks)
    return PlacedBlocks(np.array(addresses, np.int64), np.array(sizes, np.int64))


def _run_rare_operation(allocator: CachingAllocator, operation: int, number: int, blocks: list[Block | None]) -> None:
    if operation == EMPTY_CACHE:
        allocator.empty_cache()
    elif operation == ABANDON_POOL:
        allocator.releasable_pools.add(number)
    elif operation == RELEASE_POOL:
        allocator.release_private_pool(number)
    elif (block := blocks[number]) is not None:
        if operation == DEFER_FREE:
            allocator.defer_free(block)
        else:
            allocator.complete_free(block)
