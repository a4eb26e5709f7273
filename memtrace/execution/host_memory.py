"""Host memory for tensors that leave a device, and copies between the two that overlap computation.

A CPU has no other memory than its own. There the host memory is a file mapped into memory: torch's allocator does
not count it, and the kernel can write its pages to disk. On CUDA it is pinned memory, and copies run on streams of
their own.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import weakref
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import torch

from memtrace.analysis.bandwidth import COPY_SIZES, CopyBandwidths, best_copy_times, fit_copy_cost
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
        """Make the computation that follows on the device wait for the copy."""

    def finish(self) -> None:
        """Wait until the copy is made, so that the program can read it on the host."""


class HostMemory(Protocol):
    """Host memory for the tensors of one device. Memory is passed as one-dimensional tensors of bytes."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return host memory, which is reused when nothing refers to its storage any more."""

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """Start to copy from device memory, which must not be changed or freed until the copy is done."""

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """Start to copy to device memory, which was allocated for the computation that calls this."""

    def close(self) -> None:
        """Wait for all copies and give memory back as far as no tensor uses it."""


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
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"memtrace-copy-{name}") for name in ("out", "in")]

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
            self._file_end, self._file_used = max(size, FILE_BYTES), 0
            self._files.append(_map_file(self._file_end))
        offset = self._file_used
        self._file_used += size
        return self._files[-1][0], offset

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """See ``HostMemory.copy_out``."""
        return _ThreadCopy(self._threads[0], host, device)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """See ``HostMemory.copy_in``."""
        return _ThreadCopy(self._threads[1], device, host)

    def close(self) -> None:
        """See ``HostMemory.close``. A mapping disappears with the last tensor in it."""
        for thread in self._threads:
            thread.shutdown()
        for _, address in self._files:
            include_memory(address)
        self._files.clear()
        self._free.clear()


def _map_file(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapped file, whose space on disk is reserved, and its address."""
    import os

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
    """A copy on another thread, which runs without the interpreter lock."""

    def __init__(self, thread: ThreadPoolExecutor, target: torch.Tensor, source: torch.Tensor) -> None:
        # The tensors stay alive until the copy is made.
        self._tensors: Any = (target, source)
        arguments = (target.data_ptr(), source.data_ptr(), source.nbytes)
        self._future: Future[Any] = thread.submit(ctypes.memmove, *arguments)

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()
        self._tensors = None

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

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """See ``HostMemory.copy_out``."""
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


def measure_copies() -> CopyBandwidths:
    """Measure copies between torch's CPU memory and the mapped files that stand for host memory.

    Memory is allocated for every copy to the device, as it is while a plan is carried out.
    """
    memory = MappedMemory()
    host = memory.allocate(COPY_SIZES[-1])
    source = torch.empty(COPY_SIZES[-1], dtype=torch.uint8).fill_(1)
    memory.copy_out(host, source).finish()

    def copy_d2h(num_bytes: int) -> None:
        memory.copy_out(host[:num_bytes], source[:num_bytes]).finish()

    def copy_h2d(num_bytes: int) -> None:
        memory.copy_in(torch.empty(num_bytes, dtype=torch.uint8), host[:num_bytes]).finish()

    d2h, h2d = (fit_copy_cost(best_copy_times(copy)) for copy in (copy_d2h, copy_h2d))
    memory.close()
    return CopyBandwidths(d2h, h2d, "measured, mapped files of this machine")
