"""Copies of storages to host memory and back, one at a time in each direction.

Storages of a GPU go to pinned memory on two side streams. Storages of the CPU go to memory-mapped files on two threads:
the files are outside torch's allocator, so that the effect of a plan is real and can be measured without a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


class Copy(Protocol):
    """A copy that may still run."""

    def done(self) -> bool:
        """Return whether the copy has ended."""

    def wait(self) -> None:
        """Let what the calling thread does next, or launches on its current stream, happen after the copy."""


class HostCopies(Protocol):
    """A place in host memory, and the copies between it and one device."""

    def allocate(self, num_bytes: int) -> Any:
        """Return a host buffer; OSError or RuntimeError where there is no space."""

    def give_back(self, buffer: Any) -> None:
        """Take back a buffer, to use it again. Takes no lock: a finalizer may call this at any time."""

    def copy_out(self, storage: torch.UntypedStorage, buffer: Any, ended: Callable[[], None]) -> Copy:
        """Start to copy a storage to a buffer; ``ended`` may be called on another thread when the copy has ended."""

    def copy_in(self, buffer: Any, num_bytes: int) -> tuple[torch.UntypedStorage, Copy]:
        """Start to copy a buffer to a new storage."""

    def close(self) -> None:
        """Wait for the copies that were started. Copies that are started later happen on the calling thread."""


class MappedBuffer:
    """A file without a name that is mapped into memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with tempfile.TemporaryFile(prefix="memtrace-offload-") as file:
            # A mapped page that the disk has no room for would kill the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class _ThreadCopy:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class MappedFileCopies:
    """Copies between the CPU's storages and memory-mapped files."""

    def __init__(self) -> None:
        self._out, self._in = (ThreadPoolExecutor(1, f"memtrace-offload-{name}") for name in ("out", "in"))
        self._free: defaultdict[int, deque[MappedBuffer]] = defaultdict(deque)
        self._is_closed = False
        self._process = os.getpid()

    def allocate(self, num_bytes: int) -> MappedBuffer:
        """Return a mapped file of this size, a used one where there is one."""
        try:
            return self._free[num_bytes].pop()
        except IndexError:
            return MappedBuffer(num_bytes)

    def give_back(self, buffer: MappedBuffer) -> None:
        """Keep a mapped file for the next storage of its size."""
        self._free[buffer.num_bytes].append(buffer)

    def copy_out(self, storage: torch.UntypedStorage, buffer: MappedBuffer, ended: Callable[[], None]) -> Copy:
        """Start to copy a storage to a mapped file."""
        future = self._start(self._out, buffer.address, storage.data_ptr(), buffer, storage)
        future.add_done_callback(lambda _: ended())
        return _ThreadCopy(future)

    def copy_in(self, buffer: MappedBuffer, num_bytes: int) -> tuple[torch.UntypedStorage, Copy]:
        """Start to copy a mapped file to a new storage."""
        storage = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
        return storage, _ThreadCopy(self._start(self._in, storage.data_ptr(), buffer.address, buffer, storage))

    def close(self) -> None:
        """Wait for the copies that were started, and end the threads."""
        self._is_closed = True
        if os.getpid() == self._process:
            self._out.shutdown()
            self._in.shutdown()

    def _start(
        self, executor: ThreadPoolExecutor, to: int, source: int, buffer: MappedBuffer, storage: torch.UntypedStorage
    ) -> Future[None]:
        # A forked child has none of the threads.
        if not self._is_closed and os.getpid() == self._process:
            return executor.submit(_copy, to, source, buffer, [storage])
        future: Future[None] = Future()
        _copy(to, source, buffer, [storage])
        future.set_result(None)
        return future


def _copy(to: int, source: int, buffer: MappedBuffer, storage: list[torch.UntypedStorage]) -> None:
    """Copy between a buffer and the storage in a list, without the interpreter lock.

    Both live until the copy has ended. The storage is dropped before anybody learns of the end, so that whoever waited
    for it finds the memory free.
    """
    ctypes.memmove(to, source, buffer.num_bytes)
    storage.clear()


class _PinnedBuffer:
    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.last_copy: torch.cuda.Event | None = None


class _StreamCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class PinnedMemoryCopies:
    """Copies between one GPU and pinned memory, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: defaultdict[int, deque[_PinnedBuffer]] = defaultdict(deque)

    def allocate(self, num_bytes: int) -> _PinnedBuffer:
        """Return pinned memory of this size, used memory where there is some."""
        try:
            return self._free[num_bytes].pop()
        except IndexError:
            return _PinnedBuffer(num_bytes)

    def give_back(self, buffer: _PinnedBuffer) -> None:
        """Keep pinned memory for the next storage of its size."""
        self._free[buffer.bytes.numel()].append(buffer)

    def copy_out(self, storage: torch.UntypedStorage, buffer: _PinnedBuffer, ended: Callable[[], None]) -> Copy:
        """Start to copy a storage to pinned memory, after what the current stream does with the storage.

        The caller keeps the storage until it has waited for the copy, so that the allocator cannot give the memory to
        another operator before: no ``record_stream`` is needed, which would delay the reuse of the memory.
        """
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        if buffer.last_copy is not None:
            self._out.wait_event(buffer.last_copy)
        with torch.cuda.stream(self._out):
            buffer.bytes.copy_(_as_bytes(storage), non_blocking=True)
            return _StreamCopy(self._out.record_event())

    def copy_in(self, buffer: _PinnedBuffer, num_bytes: int) -> tuple[torch.UntypedStorage, Copy]:
        """Start to copy pinned memory to a new storage of the current stream."""
        content = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # The allocator may have given memory that work of the current stream still uses.
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        # Nobody waits for the copy of a graph that is dropped before backward reads it.
        content.record_stream(self._in)
        with torch.cuda.stream(self._in):
            content.copy_(buffer.bytes, non_blocking=True)
            event = buffer.last_copy = self._in.record_event()
        return content.untyped_storage(), _StreamCopy(event)

    def close(self) -> None:
        """Wait for the copies that were started."""
        self._out.synchronize()
        self._in.synchronize()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_copies(device: torch.device) -> HostCopies:
    """Return the way in which storages of a device are copied to host memory and back."""
    return PinnedMemoryCopies(device) if device.type == "cuda" else MappedFileCopies()
