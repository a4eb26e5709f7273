"""What a program asked of the allocator, without addresses: to be put to any allocator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.allocator.blocks import Block
from memtrace.allocator.history import Int8s, Int64s
from memtrace.allocator.model import Allocator

ALLOCATE: Final = 0  # a request; its number is the block's
FREE: Final = 1  # the block may be reused
DEFER: Final = 2  # the program gave the block back while a stream still uses it
EMPTY_CACHE: Final = 3  # the program called empty_cache
TRY: Final = 4  # a request that failed when it was recorded; served, it is given back at once
GIVE_UP_POOL: Final = 5  # a private pool (its number) lost its owner and may be released
COMPLETE: Final = 6  # the stream is done with a deferred block


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Operations in order, and what is known of each block. Bytes.

    Blocks are numbered: first those older than the operations, then the requests in order.
    """

    operation: Int8s
    number: Int64s
    """The block an operation is about; for GIVE_UP_POOL the pool."""
    entry: Int64s
    """Row of the history an operation comes from; -1: none."""
    requested: Int64s
    stream: Int64s
    pool: Int64s
    num_older: int
    """Blocks older than the first operation."""

    def __len__(self) -> int:
        return len(self.operation)

    @property
    def malloc_entries(self) -> Int64s:
        """Row of the history of the n-th request (ALLOCATE and TRY) at n - 1."""
        entries: Int64s = self.entry[(self.operation == ALLOCATE) | (self.operation == TRY)]
        return entries


def run(program: Program, allocator: Allocator, older: Iterable[Block] | None = None) -> Int64s:
    """Put a program to an allocator; the address each block got, -1 where the request failed.

    `older` are the blocks older than the first operation, in order; None: they are requested afresh first.
    """
    malloc, free = allocator.malloc, allocator.free
    requested, stream, pool = program.requested.tolist(), program.stream.tolist(), program.pool.tolist()
    blocks: list[Block | None]
    if older is None:
        blocks = [malloc(requested[i], stream[i], pool[i]) for i in range(program.num_older)]
    else:
        blocks = list(older)
    addresses = [-1 if block is None else block.address for block in blocks]
    blocks += [None] * (len(requested) - len(blocks))
    addresses += [-1] * (len(requested) - len(addresses))
    for operation, number in zip(program.operation.tolist(), program.number.tolist(), strict=True):
        if operation == ALLOCATE:
            block = blocks[number] = malloc(requested[number], stream[number], pool[number])
            if block is not None:
                addresses[number] = block.address
        elif operation == FREE:
            block = blocks[number]
            if block is not None:
                free(block)
        else:
            _rare(allocator, operation, number, blocks, (requested, stream, pool))
    return np.array(addresses, np.int64)


def _rare(
    allocator: Allocator,
    operation: int,
    number: int,
    blocks: list[Block | None],
    columns: tuple[list[int], list[int], list[int]],
) -> None:
    if operation == DEFER:
        block = blocks[number]
        if block is not None:
            allocator.defer(block)
    elif operation == COMPLETE:
        block = blocks[number]
        # A release of the cache waits for the streams, so it may have freed the block before.
        if block is not None and block in allocator.pending:
            allocator.pending.remove(block)
            allocator.free(block)
    elif operation == EMPTY_CACHE:
        allocator.empty_cache()
    elif operation == GIVE_UP_POOL:
        allocator.freeable_pools.add(number)
    else:
        requested, stream, pool = (column[number] for column in columns)
        served = allocator.malloc(requested, stream, pool)
        if served is not None:
            allocator.free(served)
