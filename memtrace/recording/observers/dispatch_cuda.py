"""CUDA blocks for the dispatch observer: joins the events of torch's allocator with the accesses of operators.

The allocator's events arrive later than they happen and know neither operators nor threads. Events and accesses are
therefore kept until all events up to some time are there, and then given their blocks in the order of time.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from memtrace.allocator.rules import MAX_SLACK_BYTES, SMALL_REQUEST_BYTES, round_size
from memtrace.format.schema import EVENT_KINDS
from memtrace.recording.observers import OLDER_SEGMENT, CudaRow

_EVENT: Final = {kind: code for code, kind in enumerate(EVENT_KINDS)}
_ALLOC, _FREE, _BASELINE, _OOM = (_EVENT[kind] for kind in ("alloc", "free", "baseline", "oom"))
_ACCESSES: Final = (_EVENT["read"], _EVENT["write"])
_ENTRY_TIME_ERROR_NS: Final = 1000
"""An allocation of torch's history happened at most so long after its time, which is in microseconds."""


class CudaEvent(NamedTuple):
    """An event of the allocator, an access or a label whose block is not known yet."""

    time_ns: int
    kind: int
    """Index into EVENT_KINDS, or OLDER_SEGMENT."""
    device: int
    """1 + i for cuda:i."""
    address: int
    """For an out-of-memory error, the free bytes of the device."""
    size: int = 0
    op: int = -1
    stream: int = -1
    thread: int = -1
    pool: int = -1
    extra: int = -1
    """As in ``CudaRow``."""
    category: int = -1
    """Of a label, otherwise -1."""
    name: int = -1
    is_storage: bool = False
    """Whether the event is about a storage, whose memory may not come from torch's allocator."""


@dataclass
class _Block:
    number: int
    size: int
    allocated_size: int
    stream: int = -1
    pool: int = -1
    is_foreign: bool = False
    labels: set[int] = field(default_factory=set)


@dataclass
class _ThreadCalls:
    """Operator calls of a thread in the order of time; they do not overlap."""

    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    op: list[int] = field(default_factory=list)


class CudaBlockSizes:
    """Computes the allocator's sizes of blocks from its rules, as ``native/tables.cpp`` does."""

    def __init__(self) -> None:
        self.divisions: tuple[int, ...] | None = ()
        self.max_split_size = -1
        self._segments: dict[int, tuple[list[int], dict[int, int]]] = defaultdict(lambda: ([], {}))
        self._mapped: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._live: dict[int, list[int]] = defaultdict(list)

    def segment_event(self, event: CudaEvent) -> None:
        """Follow the segments."""
        kind, device, begin, end = event.kind, event.device, event.address, event.address + event.size
        if kind == _EVENT["segment_map"] or (kind == OLDER_SEGMENT and event.extra == 1):
            parts = [*self._without(device, begin, end), (begin, end)]
            self._mapped[device] = sorted(parts)
        elif kind == _EVENT["segment_unmap"]:
            self._mapped[device] = self._without(device, begin, end)
        elif kind in (_EVENT["segment_alloc"], OLDER_SEGMENT):
            addresses, sizes = self._segments[device]
            if begin not in sizes:
                bisect.insort(addresses, begin)
            sizes[begin] = event.size
        elif kind == _EVENT["segment_free"]:
            addresses, sizes = self._segments[device]
            if sizes.pop(begin, None) is not None:
                addresses.remove(begin)

    def _without(self, device: int, begin: int, end: int) -> list[tuple[int, int]]:
        parts = []
        for low, high in self._mapped[device]:
            parts += [(low, min(high, begin))] if low < begin else []
            parts += [(max(low, end), high)] if high > end else []
        return parts

    def add_block(self, device: int, address: int) -> None:
        """A block is live from now on."""
        live = self._live[device]
        index = bisect.bisect_left(live, address)
        if index == len(live) or live[index] != address:
            live.insert(index, address)

    def free(self, device: int, address: int) -> None:
        """A block is no longer live."""
        live = self._live[device]
        index = bisect.bisect_left(live, address)
        if index < len(live) and live[index] == address:
            del live[index]

    def allocated_size(self, device: int, address: int, requested: int) -> int:
        """Size of a block that is allocated now; -1 if it is unknown."""
        self.add_block(device, address)
        if self.divisions is None:
            return -1
        rounded = round_size(requested, self.divisions)
        if rounded <= SMALL_REQUEST_BYTES or any(low <= address < high for low, high in self._mapped[device]):
            return rounded
        addresses, sizes = self._segments[device]
        index = bisect.bisect_right(addresses, address) - 1
        if index < 0 or address >= (end := addresses[index] + sizes[addresses[index]]):
            return -1
        live = self._live[device]
        following = bisect.bisect_right(live, address)
        limit = min(end, live[following]) if following < len(live) else end
        gap = limit - address - rounded
        never_split = 0 < self.max_split_size <= rounded
        return rounded + gap if gap > 0 and (gap <= MAX_SLACK_BYTES or never_split) else rounded


class CudaBlocks:
    """Collects events of CUDA blocks and gives them their block ids.

    Attributes:
        sizes: computes the sizes of blocks.
    """

    def __init__(self) -> None:
        self.sizes = CudaBlockSizes()
        self._pending: list[CudaEvent] = []
        self._calls: dict[int, _ThreadCalls] = defaultdict(_ThreadCalls)
        self._live: dict[int, _Block] = {}

    def add(self, event: CudaEvent) -> None:
        """Add an event; it may be older than those added before."""
        self._pending.append(event)

    def add_rows(self, rows: Iterable[CudaRow], now_ns: int) -> None:
        """Add events of the allocator."""
        for kind, device, address, size, stream, pool, extra, time_ns in rows:
            when = now_ns if time_ns < 0 else time_ns
            self.add(CudaEvent(when, kind, 1 + device, address, size, -1, stream, -1, pool, extra))

    def add_call(self, thread: int, op: int, start_ns: int, end_ns: int) -> None:
        """Add a finished operator call, so that its allocations get their operator."""
        calls = self._calls[thread]
        calls.start_ns.append(start_ns)
        calls.end_ns.append(end_ns)
        calls.op.append(op)

    def take(self, until_ns: int | None, first_number: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
        """Rows of ``events`` and ``labels`` up to ``until_ns`` (None: all), and the next unused block id."""
        self._pending.sort(key=lambda event: event.time_ns)
        end = len(self._pending)
        if until_ns is not None:
            end = bisect.bisect_right(self._pending, until_ns, key=lambda event: event.time_ns)
        ready, self._pending = self._pending[:end], self._pending[end:]
        self._next_number = first_number
        events: list[tuple[int, ...]] = []
        labels: list[tuple[int, ...]] = []
        for event in ready:
            self._resolve(event, events, labels)
        self._forget_calls(until_ns)
        return events, labels, self._next_number

    def _forget_calls(self, until_ns: int | None) -> None:
        for calls in self._calls.values():
            num_old = len(calls.op) if until_ns is None else max(bisect.bisect_left(calls.start_ns, until_ns) - 1, 0)
            for column in (calls.start_ns, calls.end_ns, calls.op):
                del column[:num_old]

    def _resolve(self, event: CudaEvent, events: list[tuple[int, ...]], labels: list[tuple[int, ...]]) -> None:
        if event.kind in (_ALLOC, _BASELINE):
            self._begin(event, event.kind, events)
        elif event.kind == _FREE:
            self._end(event, events)
        elif event.kind in _ACCESSES or event.category >= 0:
            block = self._live.get(event.address)
            if block is None:
                # Not from torch's allocator (another library, another process): allocated at the first access.
                block = self._begin(event, _ALLOC, events)
            if event.category < 0:
                events.append(_row(event, event.kind, block))
            elif event.category not in block.labels:
                block.labels.add(event.category)
                labels.append((block.number, event.category, event.name))
        else:
            self.sizes.segment_event(event)
            if event.kind == _OOM:
                op, thread = self._operator_of(event.time_ns)
                event = event._replace(op=op, thread=thread)
            if event.kind != OLDER_SEGMENT:
                events.append(_row(event, event.kind, _Block(-1, event.size, -1, event.stream, event.pool)))

    def _begin(self, event: CudaEvent, kind: int, events: list[tuple[int, ...]]) -> _Block:
        previous = self._live.get(event.address)
        if previous is not None:
            events.append(_row(event, _FREE, previous))
        if event.is_storage:
            size = -1
        elif kind == _BASELINE:
            size = event.extra
            self.sizes.add_block(event.device, event.address)
        else:
            size = self.sizes.allocated_size(event.device, event.address, event.size)
        block = _Block(self._next_number, event.size, size, event.stream, event.pool, event.is_storage)
        self._next_number += 1
        self._live[event.address] = block
        op = self._operator_of(event.time_ns) if kind == _ALLOC and event.op < 0 else (event.op, event.thread)
        events.append(_row(event._replace(op=op[0], thread=op[1]), kind, block))
        return block

    def _end(self, event: CudaEvent, events: list[tuple[int, ...]]) -> None:
        block = self._live.get(event.address)
        if block is None and not event.is_storage and event.size > 0:
            block = self._begin(event._replace(extra=-1), _BASELINE, events)
        if block is None or (event.is_storage and not block.is_foreign):
            return  # the allocator reports the free of its blocks itself
        events.append(_row(event, _FREE, block))
        del self._live[event.address]
        self.sizes.free(event.device, event.address)

    def _operator_of(self, time_ns: int) -> tuple[int, int]:
        """The operator call that runs at a time, and its thread; (-1, -1) if there is none or more than one."""
        running = []
        for thread, calls in self._calls.items():
            index = bisect.bisect_right(calls.start_ns, time_ns + _ENTRY_TIME_ERROR_NS) - 1
            if index > 0 and calls.start_ns[index] > time_ns and calls.end_ns[index - 1] > time_ns:
                index -= 1  # the time is within the error of both calls: the earlier one covers its beginning
            if index >= 0 and calls.end_ns[index] >= time_ns:
                running.append((calls.op[index], thread))
        return running[0] if len(running) == 1 else (-1, -1)


def _row(event: CudaEvent, kind: int, block: _Block) -> tuple[int, ...]:
    is_access, is_oom = kind in _ACCESSES, kind == _OOM
    address = -1 if is_access or is_oom or event.address == 0 else event.address
    return (
        event.time_ns,
        kind,
        event.device,
        block.number,
        -1 if is_access else block.size,
        -1 if is_access else block.allocated_size,
        address,
        event.op,
        -1 if is_access else event.stream,
        event.thread,
        -1 if is_access else event.pool,
        event.address if is_oom else -1,
    )
