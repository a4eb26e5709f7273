"""Turns answers of PyTorch's allocator into histories, and runs the same operations on the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memtrace.allocator.blocks import Block, FreeList
from memtrace.allocator.history import (
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    AllocatorHistory,
    RecordedBlocks,
    RecordedSegments,
)
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.rules import TORCH_2_13, virtual_range_size
from memtrace.allocator.settings import AllocatorSettings
from memtrace.format.schema import EVENT_KINDS
from tests.allocator.oracle.machine import Answer, Operation

COLUMNS = ("kind", "address", "size", "stream", "pool", "by_program", "device_free", "time_ns")
SEGMENT_KINDS = (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)


def history_of(
    operations: list[Operation], answer: Answer, settings: str, capacity: int, *, stacks: bool = True
) -> AllocatorHistory:
    """Return the history that a snapshot would contain; without `stacks` it does not say who released segments."""
    rows = [
        (EVENT_KINDS.index(kind), -1 if kind == "oom" else address, size, stream, pool,
         int(operation[0] == "empty_cache") if stacks and kind in ("segment_free", "segment_unmap") else -1,
         address if kind == "oom" else -1)
        for operation, entries in zip(operations, answer.entries, strict=True)
        for kind, address, size, stream, pool in entries
    ]  # fmt: skip
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    segments = np.array(answer.segments, np.int64).reshape(-1, 6).T
    live = np.array([block for block in answer.blocks if block[3]], np.int64).reshape(-1, 4).T
    return AllocatorHistory(
        device="cuda:0",
        kind=columns[0].astype(np.int8),
        address=columns[1],
        size=columns[2],
        stream=columns[3],
        pool=columns[4],
        by_program=columns[5].astype(np.int8),
        device_free=columns[6],
        time_ns=np.arange(len(rows)),
        settings=AllocatorSettings.parse(settings),
        segments=RecordedSegments(
            address=segments[0], size=segments[1], stream=segments[2], pool=segments[3],
            small=segments[4].astype(bool), expandable=segments[5].astype(bool),
        ),
        blocks=RecordedBlocks(address=live[0], size=live[1], requested=live[2]),
        device_bytes=capacity,
        torch="2.13.0",
    )  # fmt: skip


def drop_first_entries(history: AllocatorHistory, first: int) -> AllocatorHistory:
    """Return the history from an entry on: what a ring buffer that overwrote the rest would contain."""
    return replace(history, **{name: getattr(history, name)[first:] for name in COLUMNS})


class OracleDevice:
    """A device that assigns the same addresses as oracle/device.c."""

    def __init__(self, capacity: int, order: int) -> None:
        self.total_bytes: int | None = capacity
        self.order = order
        self.up = self.down = 0x700000000000
        self.ranges = 0x300000000000

    def allocate(self, size: int, *, request: int, reserved: int) -> int | None:
        assert self.total_bytes is not None
        if reserved + size > self.total_bytes:
            return None
        room = -(-size // (2 << 20)) * (2 << 20)
        if self.order == 0:
            self.up += room
            return self.up - room
        self.down -= room
        return self.down

    def range_size(self, page: int) -> int:
        return virtual_range_size(self.total_bytes, page)

    def restore_range(self, address: int, length: int) -> None: ...

    def release_range(self, address: int) -> None: ...

    def reserve_range(self, free_list: FreeList, *, request: int) -> tuple[int, int]:
        address, length = self.ranges, self.range_size(free_list.page)
        self.ranges = (address + length + (1 << 36)) >> 30 << 30
        return address, length

    def map_pages(self, size: int, *, request: int, reserved: int) -> bool:
        assert self.total_bytes is not None
        return reserved + size <= self.total_bytes


class Follower:
    """Runs on the model the operations that PyTorch's allocator executed, and compares after each."""

    def __init__(self, settings: str, capacity: int, order: int) -> None:
        self.model = CachingAllocator(AllocatorSettings.parse(settings), OracleDevice(capacity, order), TORCH_2_13)
        self.blocks: dict[int, Block] = {}
        self.deferred_by_address: dict[int, Block] = {}
        self.pool, self.streams_done = 0, True

    def follow(self, operation: Operation, entries: list[list[Any]]) -> None:
        """Run one operation and assert that the allocator did the same."""
        seen = len(self.model.log)
        name, *rest = operation
        if name == "streams_done":
            self.streams_done = bool(rest[0])
        elif name == "begin_pool":
            self.pool = 2 * rest[0]
        elif name == "end_pool":
            self.pool = 0
        elif name == "release_pool":
            self.model.releasable_pools.add(2 * rest[0])
        elif name == "empty_cache":
            self.model.empty_cache()
        elif name == "alloc":
            self._alloc(*rest, entries)
        elif name == "free" and rest[0] in self.blocks:
            self._free(self.blocks.pop(rest[0]), entries)
        log = [(EVENT_KINDS[kind], *place) for _, kind, *place in self.model.log[seen:] if kind != OOM]
        assert log == [(kind, address, size) for kind, address, size, *_ in entries if kind.startswith("segment")], (
            operation
        )

    def _alloc(self, number: int, size: int, stream: int, entries: list[list[Any]]) -> None:
        for kind, address, *_ in entries if self.streams_done else []:
            if kind == "free":  # the allocator polls its streams before it searches
                block = self.deferred_by_address.pop(address)
                self.model.deferred.remove(block)
                self.model.free(block)
        block = self.model.malloc(size, stream, self.pool)
        served = [address for kind, address, *_ in entries if kind == "alloc"]
        assert ([] if block is None else [block.address]) == served, (number, size)
        if block is not None:
            self.blocks[number] = block

    def _free(self, block: Block, entries: list[list[Any]]) -> None:
        if any(kind == "free" for kind, *_ in entries):
            self.model.free(block)
        else:
            self.deferred_by_address[block.address] = block
            self.model.defer_free(block)

    def check_state(self, answer: Answer) -> None:
        """Assert that every segment, every block and the totals are the same."""
        blocks = [(b.address, b.size, b.live) for segment in self.model.segments() for b in segment]
        assert blocks == [(address, size, state > 0) for address, size, _, state in answer.blocks]
        assert (self.model.reserved, self.model.peak_reserved) == (answer.reserved, answer.peak_reserved)
        assert (self.model.num_retries, self.model.num_ooms) == (answer.retries, answer.ooms)
