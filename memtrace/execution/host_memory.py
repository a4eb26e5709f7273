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
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import torch

from memtrace.errors import MemtraceError
from memtrace.recording.excluded_memory import exclude_memory, include_memory
from memtrace.units import format_bytes

FILE_BYTES: Final = 64 << 20
"""Smallest size of a mapped file."""
_ALIGNMENT: Final = 4096


Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy."""


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

    def copy_many(self, pairs: Sequence[Pair], *, to_host: bool, overlaps: bool) -> Copy:
        """Start to copy several tensors, each to the first tensor of its pair, as one copy.

        Without ``overlaps`` the copies take place between the computation before and after this call, which costs less
        than a copy for which the computation waits.
        """

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
    """Host memory for the CPU: parts of mapped files without names.

    Copies run on one thread, whatever their direction: they share the bandwidth of the memory anyway, and every thread
    takes a core from the computation.
    """

    def __init__(self) -> None:
        self._files: list[tuple[mmap.mmap, int]] = []
        self._file_end = self._file_used = 0
        self._free: defaultdict[int, list[tuple[mmap.mmap, int]]] = defaultdict(list)
        self._thread = _copy_thread()
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
        return self._start([(host, device)], ended)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """See ``HostMemory.copy_in``."""
        return self._start([(device, host)])

    def copy_many(self, pairs: Sequence[Pair], *, to_host: bool, overlaps: bool) -> Copy:
        """See ``HostMemory.copy_many``."""
        if overlaps:
            return self._start(list(pairs))
        copy_pairs(list(pairs))
        return _NO_COPY

    def _start(self, pairs: list[Pair], ended: Callable[[], None] | None = None) -> Copy:
        # A forked child does not have the thread.
        if self._is_closed or os.getpid() != self._process:
            future: Future[None] = Future()
            copy_pairs(pairs)
            future.set_result(None)
        else:
            future = self._thread.submit(copy_pairs, pairs)
        if ended is not None:
            future.add_done_callback(lambda _: ended())
        return ThreadCopy(future)

    def close(self) -> None:
        """See ``HostMemory.close``. A mapping disappears with the last tensor in it."""
        self._is_closed = True
        if os.getpid() == self._process:
            self._thread.shutdown()
        for _, address in self._files:
            include_memory(address)
        self._files.clear()
        self._free.clear()


def _copy_thread() -> Executor:
    return ThreadPoolExecutor(1, thread_name_prefix="memtrace-copy")


def copy_pairs(pairs: list[Pair]) -> None:
    """Copy the second tensor of each pair to the first, without the interpreter lock.

    All live until the last copy has ended. They are dropped before anybody learns of the end, so that whoever waited
    for it finds the memory free.
    """
    for address, source, num_bytes in [(to.data_ptr(), source.data_ptr(), source.nbytes) for to, source in pairs]:
        ctypes.memmove(address, source, num_bytes)
    pairs.clear()


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


class ThreadCopy:
    """A copy on another thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        """See ``Copy.is_done``."""
        return self._future.done()

    def wait(self) -> None:
        """See ``Copy.wait``."""
        self._future.result()

    finish = wait


class _NoCopy:
    """A copy that was made before it is asked for."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    finish = wait


_NO_COPY: Final = _NoCopy()


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
        return _StreamCopy(self._out, [(host, device)])

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """See ``HostMemory.copy_in``."""
        return _StreamCopy(self._in, [(device, host)])

    def copy_many(self, pairs: Sequence[Pair], *, to_host: bool, overlaps: bool) -> Copy:
        """See ``HostMemory.copy_many``."""
        current: Any = torch.cuda.current_stream(self._device)
        return _StreamCopy((self._out if to_host else self._in) if overlaps else current, pairs)

    def close(self) -> None:
        """See ``HostMemory.close``."""
        self._out.synchronize()
        self._in.synchronize()


class _StreamCopy:
    """Copies on a stream, after the work that the current stream has at the moment."""

    def __init__(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> None:
        self._pairs: Sequence[Pair] | None = pairs
        """They are used until the event has taken place; None: the computation waits for it."""
        self._stream: Any = stream
        self._origin: Any = torch.cuda.current_stream(stream.device)
        """The stream that the memory of the device was allocated for."""
        stream.wait_stream(self._origin)
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        current: Any = torch.cuda.current_stream(self._event.device)
        current.wait_event(self._event)
        if current != self._origin and self._pairs is not None:
            # The allocator reuses memory in the order of the stream that it was allocated for.
            self._origin.wait_event(self._event)
            for tensor in (tensor for pair in self._pairs for tensor in pair if tensor.is_cuda):
                tensor.record_stream(current)
        self._pairs = None

    def finish(self) -> None:
        self._event.synchronize()
        self.wait()

    def __del__(self) -> None:
        # Nobody waits for the copy of a storage that did not have to leave, or of a graph that is dropped. The
        # allocators then keep the memory until the event has taken place; that of the host does so for all copies.
        if getattr(self, "_event", None) is not None and self._pairs is not None and not sys.is_finalizing():
            for tensor in (tensor for pair in self._pairs for tensor in pair if tensor.is_cuda):
                tensor.record_stream(self._stream)
