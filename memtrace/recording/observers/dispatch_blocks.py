"""The live blocks that the dispatch observer knows, identified by their storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memtrace.format.schema import EVENT_KINDS
from memtrace.recording.excluded_memory import is_excluded
from memtrace.recording.observers.dispatch_buffer import RecordBuffer
from memtrace.recording.observers.dispatch_cuda import CudaBlocks, CudaEvent

_EVENT: Final = {kind: code for code, kind in enumerate(EVENT_KINDS)}


@dataclass
class LiveBlock:
    """A block that has not been freed."""

    number: int
    """Its ``block_id`` in the trace; negative while the block is known only by its address (``BlockTable.cuda``)."""
    size: int
    """Requested size in bytes."""
    device: int
    """0 for the CPU, 1 + i for cuda:i."""
    address: int
    """-1 for a fake tensor."""
    labels: set[int] = field(default_factory=set)
    """Categories that were recorded for it."""
    reference: Any = None
    """Weak reference to its storage."""


class BlockTable:
    """Records the events of blocks.

    Args:
        buffer: receives the events.
        now: the clock of the observer.
        thread_index: index of the calling thread.

    Attributes:
        num_blocks: number of block ids given so far.
        cuda: takes the events of CUDA blocks, because torch's allocator reports their allocations and frees; None if it
            does not.
    """

    def __init__(self, buffer: RecordBuffer, now: Callable[[], int], thread_index: Callable[[], int]) -> None:
        self._buffer = buffer
        self._now = now
        self._thread_index = thread_index
        self._blocks: dict[int, LiveBlock] = {}
        self.num_blocks = 0
        self.cuda: CudaBlocks | None = None
        self._num_addressed = 0
        self._is_open = True

    def close(self) -> None:
        """Forget all blocks and record nothing more."""
        self._is_open = False
        self._blocks.clear()

    def find(self, tensor: torch.Tensor) -> LiveBlock | None:
        """The block of a tensor; None if it is unknown."""
        storage = _storage(tensor)
        return None if storage is None else self._blocks.get(storage._cdata)

    def add_older(self, tensor: torch.Tensor) -> LiveBlock | None:
        """The block of a tensor that is older than the recording; None without memory."""
        storage = _storage(tensor)
        if storage is None:
            return None
        return self._blocks.get(storage._cdata) or self._begin(tensor, storage, "baseline", self._now(), -1)

    def allocate(self, tensor: torch.Tensor, time_ns: int, op: int) -> LiveBlock | None:
        """Record the allocation of a block that operator call ``op`` returned; None if the block is known."""
        storage = _storage(tensor)
        if storage is None or storage._cdata in self._blocks:
            return None
        return self._begin(tensor, storage, "alloc", time_ns, op)

    def label(self, block: LiveBlock, category: int, name: int) -> None:
        """Label a block, unless it has that category already."""
        with self._buffer.lock:
            if category in block.labels:
                return
            block.labels.add(category)
            if block.number < 0:
                self._add_cuda_event(-1, block, self._now(), category=category, name=name)
            else:
                self._buffer.add("labels", (block.number, category, name))

    def add_event(self, kind: str, block: LiveBlock, time_ns: int, op: int) -> None:
        """Record an event of a block."""
        is_access = kind in ("read", "write")
        if block.number < 0:
            if is_access or kind == "free":
                self._add_cuda_event(_EVENT[kind], block, time_ns, op=op, thread=self._thread_index())
            return
        size, address = (-1, -1) if is_access else (block.size, block.address)
        # torch's CPU allocator allocates exactly the requested size.
        allocated_size = size if block.device == 0 else -1
        row = (time_ns, _EVENT[kind], block.device, block.number, size, allocated_size, address, op, -1,
               self._thread_index(), -1, -1)  # fmt: skip
        self._buffer.add("events", row)

    def _begin(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, kind: str, time_ns: int, op: int
    ) -> LiveBlock | None:
        device = 0 if tensor.device.type == "cpu" else 1 + (tensor.device.index or 0)
        try:
            address = -1 if is_fake(tensor) else storage.data_ptr()
        except RuntimeError:
            return None  # wrappers of torch.func have a storage without memory
        if is_excluded(address):
            return None
        with self._buffer.lock:
            block = LiveBlock(self._next_number(device, address), int(storage.nbytes()), device, address)
            key = storage._cdata
            self._blocks[key] = block
            block.reference = weakref.ref(storage, lambda _: self._end(key, block))
            self.add_event(kind, block, time_ns, op)
        return block

    def _next_number(self, device: int, address: int) -> int:
        if self.cuda is not None and device > 0 and address >= 0:
            self._num_addressed += 1
            return -self._num_addressed
        self.num_blocks += 1
        return self.num_blocks - 1

    def _add_cuda_event(self, kind: int, block: LiveBlock, time_ns: int, **columns: int) -> None:
        if self.cuda is not None:
            self.cuda.add(CudaEvent(time_ns, kind, block.device, block.address, block.size, is_storage=True, **columns))

    def _end(self, key: int, block: LiveBlock) -> None:
        if not self._is_open:
            return
        with self._buffer.lock:
            if self._blocks.get(key) is block:
                del self._blocks[key]
            self.add_event("free", block, self._now(), -1)


def fake_mode_active() -> bool:
    """Whether the calling thread runs under a FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return issubclass(type(tensor), FakeTensor)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # sparse tensors, uninitialised parameters and others without storage
    if tensor.device.type not in ("cpu", "cuda") or (storage.device.type == "meta" and not is_fake(tensor)):
        return None
    return storage if storage.nbytes() > 0 else None
