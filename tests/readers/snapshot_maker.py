"""Builds CUDA snapshots for tests with a small caching allocator that records its history as PyTorch does.

The allocator does not follow the rules of PyTorch's allocator, because readers must not depend on them. Its snapshots
are consistent, and it keeps the expected values of the tests.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtrace.readers.content import Content
from memtrace.readers.registry import find_reader
from memtrace.trace import Trace

MIB = 1 << 20
START_US = 1_700_000_000_000_000
SEGMENT_BYTES = 20 * MIB


@dataclass
class Block:
    address: int
    requested: int
    stack: list[dict[str, Any]]
    pending: bool = False

    @property
    def size(self) -> int:
        return max(-(-self.requested // 512), 1) * 512


@dataclass
class SnapshotMaker:
    """Allocates, frees and records.

    ``requested_curve`` and ``reserved_curve`` are the requested live bytes and the reserved bytes after each entry.
    """

    device: int = 0
    stream: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)
    requested_curve: list[int] = field(default_factory=list)
    reserved_curve: list[int] = field(default_factory=list)
    segments: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    clock_us: int = START_US

    def alloc(self, requested: int, stack: list[dict[str, Any]] | None = None, **more: Any) -> int:
        block = Block(self._room(max(-(-requested // 512), 1) * 512), requested, stack or [])
        self.blocks[block.address] = block
        self._record("alloc", block.address, requested, block.stack, **more)
        return block.address

    def free(self, address: int, *, complete: bool = True) -> None:
        block = self.blocks[address]
        if not block.pending:
            block.pending = True
            self._record("free_requested", address, block.requested, [])
        if complete:
            del self.blocks[address]
            self._record("free_completed", address, block.requested, [])

    def release(self) -> None:
        """Release empty segments, as ``torch.cuda.empty_cache`` does."""
        for start, size in list(self.segments.items()):
            if not any(start <= address < start + size for address in self.blocks):
                del self.segments[start]
                self._record("segment_free", start, size, [])

    def out_of_memory(self, requested: int, device_free: int) -> None:
        entry = {"action": "oom", "device_free": device_free, "size": requested, "stream": self.stream}
        self._append(entry, [])

    def snapshot_entry(self) -> None:
        self._record("snapshot", 0, sum(block.size for block in self.blocks.values()), None)

    def snapshot(self, *, last: int | None = None) -> dict[str, Any]:
        """Return the snapshot; with ``last`` only the newest entries, as in a ring buffer that wrapped around."""
        trace = self.entries if last is None else self.entries[len(self.entries) - last :]
        return {
            "segments": [self._segment(start, size) for start, size in self.segments.items()],
            "device_traces": [[] for _ in range(self.device)] + [list(trace)],
            "allocator_settings": {"expandable_segments": False, "roundup_power2_divisions": {"1": 0, "2": 0}},
            "external_annotations": [],
        }

    def _room(self, size: int) -> int:
        for start, length in self.segments.items():
            at = start
            for block in sorted(self.blocks.values(), key=lambda block: block.address):
                if start <= block.address < start + length:
                    if block.address - at >= size:
                        return at
                    at = block.address + block.size
            if start + length - at >= size:
                return at
        length = max(SEGMENT_BYTES, -(-size // (2 * MIB)) * 2 * MIB)
        start = max((at + size for at, size in self.segments.items()), default=1 << 40) + 64 * MIB
        self.segments[start] = length
        self._record("segment_alloc", start, length, [])
        return start

    def _record(self, action: str, address: int, size: int, stack: list[dict[str, Any]] | None, **more: Any) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": self.stream, **more}
        self._append(entry, stack)

    def _append(self, entry: dict[str, Any], stack: list[dict[str, Any]] | None) -> None:
        self.clock_us += 3
        entry["time_us"] = self.clock_us
        if stack is not None:
            entry["frames"] = stack
        self.entries.append(entry)
        self.requested_curve.append(sum(block.requested for block in self.blocks.values()))
        self.reserved_curve.append(sum(self.segments.values()))

    def _segment(self, start: int, length: int) -> dict[str, Any]:
        mine = sorted((b for b in self.blocks.values() if start <= b.address < start + length), key=lambda b: b.address)
        blocks, at = [], start
        for block in mine:
            if block.address > at:
                blocks.append(_block(at, block.address - at, 0, "inactive", []))
            state = "active_pending_free" if block.pending else "active_allocated"
            blocks.append(_block(block.address, block.size, block.requested, state, block.stack))
            at = block.address + block.size
        if at < start + length:
            blocks.append(_block(at, start + length - at, 77, "inactive", []))
        active = sum(block.size for block in mine)
        return {
            "device": self.device,
            "address": start,
            "total_size": length,
            "allocated_size": sum(block.size for block in mine if not block.pending),
            "active_size": active,
            "requested_size": sum(block.requested for block in mine),
            "stream": self.stream,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


def _block(address: int, size: int, requested: int, state: str, stack: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": stack}


def frame(file: str, line: int, name: str, **more: Any) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name, **more}


def random_history(seed: int, num_actions: int, maker: SnapshotMaker | None = None) -> SnapshotMaker:
    """Run a program that allocates and frees at random, with some pending frees and some released segments."""
    dice = random.Random(seed)
    maker = maker or SnapshotMaker()
    stacks = [[frame("train.py", line, "step"), frame("main.py", 1, "<module>")] for line in range(5)]
    for _ in range(num_actions):
        roll = dice.random()
        if roll < 0.55 or not maker.blocks:
            maker.alloc(int(2 ** dice.uniform(0, 25)), dice.choice(stacks))
        elif roll < 0.9:
            maker.free(dice.choice(list(maker.blocks)), complete=dice.random() < 0.8)
        elif roll < 0.95:
            for address in [block.address for block in maker.blocks.values() if block.pending]:
                maker.free(address)
        else:
            maker.release()
    return maker


def read_in_process(path: Path, value: Any) -> Trace:
    """Read a snapshot in this process, for tests that read many snapshots."""
    path.write_bytes(pickle.dumps(value))
    content = Content.of(path)
    (rank,) = find_reader(content).read(content)
    return Trace.from_tables(rank.manifest, rank.tables)
