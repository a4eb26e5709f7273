"""Host memory for tensors that leave a device, and copies between the two that overlap computation.

A CPU has no other memory than its own. There the host memory is a file mapped into memory: torch's allocator does
not count it, and the kernel can write its pages to disk. On CUDA it is pinned memory, and copies run on streams of
their own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import torch

from memtrace.errors import MemtraceError
from memtrace.recording.excluded_memory import exclude_memory, include_memory
from memtrace.units import format_bytes

FILE_BYTES: Final = 64 << 20
"""Smallest size of a mapped file."""
_ALIGNMENT: Final = 4096


class Copy(Protocol):
    """A copy that was started."""

    def is_done(self) -> bool:
        """Return whether the copy has been made."""

    def wait(self) -> None:
        """Make the computation that follows on the device wait for the copy, which uses its memory no longer then."""

    def finish(self) -> None:
        """Wait until the copy is made, so that the program can read it on the host."""


class HostMemory(Protocol):
    """Host memory for the tensors of one device. Memory is passed as one-dimensional tensors of bytes."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return host memory, which is reused when nothing refers to its storage any more.

        Raises:
            MemtraceError or RuntimeError: There is no space.
        """

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, ended: Callable[[], None] | None = None) -> Copy:
        """Start to copy from device memory, which must not be changed until the copy is done.

        ``ended`` may be called on another thread when the copy has ended.
        """

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """Start to copy to device memory, which was allocated for the computation that calls this."""

    def close(self) -> None:
        """Wait for all copies, and give memory back as far as no tensor uses it.

        Copies that are started later happen on the calling thread.
        """


def host_memory_for(device: torch.device) -> HostMemory:
    """Return the host memory for tensors of a device.

    Raises:
        MemtraceError: Tensors of this type of device cannot be moved.
    """
    if device.type == "cpu":
        return MappedMemory()
    if device.type == "cuda":
        return PinnedMemory(device)
    raise MemtraceError(f"a tensor is on {device}: memtrace moves tensors of the CPU and of CUDA devices only.")


class MappedMemory:
    """Host memory for the CPU: parts of mapped files without names. Copies run on two threads, one per direction."""

    def __init__(self) -> None:
        self._files: list[tuple[mmap.mmap, int]] = []
        self._file_end = self._file_used = 0
        self._free: defaultdict[int, list[tuple[mmap.mmap, int]]] = defaultdict(list)
        self._out, self._in = (_copy_thread(name) for name in ("out", "in"))
        self._is_closed = False
        self._process = os.getpid()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See ``HostMemory.allocate``. Raises MemtraceError if the disk is full."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        file, offset = self._free[size].pop() if self._free[size] else self._extend(size)
        view = memoryview(file)[offset : offset + num_bytes]
        # torch keeps the view as long as a storage uses it.
        weakref.finalize(view, self._free[size].append, (file, offset)).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _extend(self, size: int) -> tuple[mmap.mmap, int]:
        if self._file_used + size > self._file_end:
            num_bytes = max(size, FILE_BYTES)
            self._files.append(_map_file(num_bytes))
            self._file_end, self._file_used = num_bytes, 0
        offset = self._file_used
        self._file_used += size
        return self._files[-1][0], offset

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, ended: Callable[[], None] | None = None) -> Copy:
        """See ``HostMemory.copy_out``."""
        return self._start(self._out, host, device, ended)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """See ``HostMemory.copy_in``."""
        return self._start(self._in, device, host)

    def _start(
        self, thread: Executor, target: torch.Tensor, source: torch.Tensor, ended: Callable[[], None] | None = None
    ) -> Copy:
        # A forked child has none of the threads.
        if self._is_closed or os.getpid() != self._process:
            future: Future[None] = Future()
            _copy([target, source])
            future.set_result(None)
        else:
            future = thread.submit(_copy, [target, source])
        if ended is not None:
            future.add_done_callback(lambda _: ended())
        return _ThreadCopy(future)

    def close(self) -> None:
        """See ``HostMemory.close``. A mapping disappears with the last tensor in it."""
        self._is_closed = True
        if os.getpid() == self._process:
            for thread in (self._out, self._in):
                thread.shutdown()
        for _, address in self._files:
            include_memory(address)
        self._files.clear()
        self._free.clear()


def _copy_thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"memtrace-copy-{name}")


def _copy(tensors: list[torch.Tensor]) -> None:
    """Copy the second tensor to the first, without the interpreter lock.

    Both live until the copy has ended. They are dropped before anybody learns of the end, so that whoever waited for it
    finds the memory free.
    """
    target, source = tensors
    addresses = target.data_ptr(), source.data_ptr(), source.nbytes
    del target, source
    ctypes.memmove(*addresses)
    tensors.clear()


def _map_file(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapped file and its address. Its space on disk is reserved: a page without would kill the process."""
    try:
        with tempfile.TemporaryFile(prefix="memtrace-host-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise MemtraceError(
            f"no {format_bytes(num_bytes)} for host memory in {tempfile.gettempdir()} ({error}). Free space there, or "
            "set TMPDIR to a folder with more."
        ) from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    exclude_memory(address, num_bytes)
    return mapped, address


class _ThreadCopy:
    """A copy on another thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    finish = wait


class PinnedMemory:
    """Host memory for a CUDA device: pinned memory, and a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See ``HostMemory.allocate``."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, ended: Callable[[], None] | None = None) -> Copy:
        """See ``HostMemory.copy_out``. ``ended`` is not called: the host does not learn of the end by itself."""
        return _StreamCopy(self._out, host, device)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """See ``HostMemory.copy_in``."""
        return _StreamCopy(self._in, device, host)

    def close(self) -> None:
        """See ``HostMemory.close``."""
        self._out.synchronize()
        self._in.synchronize()


class _StreamCopy:
    """A copy on a stream, after the work that the current stream has at the moment."""

    def __init__(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._tensors: Any = (target, source)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        torch.cuda.current_stream(self._event.device).wait_event(self._event)
        self._tensors = None

    def finish(self) -> None:
        self._event.synchronize()
        self.wait()

    def __del__(self) -> None:
        # Nobody waits for the copies of a graph that is dropped before backward reads it.
        if getattr(self, "_event", None) is not None and self._tensors is not None and not sys.is_finalizing():
            self._event.synchronize()
