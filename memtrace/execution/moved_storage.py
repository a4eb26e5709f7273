"""Tensors that move between a device and host memory and stay the same objects."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from memtrace.execution.host_memory import Copy, HostMemory, Pair


class MovedStorage:
    """Tensors that share one storage, which is on the device or in host memory; they refer to where it is.

    Only ``Tensor.data`` changes, so that parameters keep their identity, their hooks and their graph. In host memory
    the tensors are whole: code that uses them there computes what it would have computed on the device. A
    `StorageMover` moves them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        first = self.tensors[0]
        self.torch_device = first.device
        self.num_bytes = first.untyped_storage().nbytes()
        self.incoming: tuple[torch.Tensor, Copy] | None = None
        """Memory of the device, and the copy to it that was started."""
        self.outgoing: Copy | None = None
        """The copy to host memory that was started."""
        self.host: torch.Tensor | None = None
        """The host memory; None before the first copy."""
        self._device: torch.Tensor | None = as_bytes(first)
        self._geometries = [
            (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()) for tensor in self.tensors
        ]
        self._host_views: list[torch.Tensor] = []
        self._versions: list[int] | None = None
        """Versions of the tensors when they were loaded; None: the host memory is not up to date."""

    @property
    def device(self) -> torch.Tensor | None:
        """The memory of the device; None: the tensors are in host memory."""
        return self._device

    @property
    def is_loaded(self) -> bool:
        """Whether the tensors are on the device."""
        return self._device is not None

    @property
    def is_changed(self) -> bool:
        """Whether the tensors on the device may differ from the copy in host memory."""
        return self.is_loaded and self._versions != [tensor._version for tensor in self.tensors]

    @property
    def is_stored(self) -> bool:
        """Whether no copy to host memory is under way."""
        return self.outgoing is None or self.outgoing.is_done()

    def mark_changed(self) -> None:
        """Copy the tensors back when they leave the device, whatever their versions."""
        self._versions = None

    def refer_to_device(self, memory: torch.Tensor) -> None:
        """Let the tensors refer to memory of the device, which has the content of the host memory."""
        self._device = memory
        for tensor, geometry in zip(self.tensors, self._geometries, strict=True):
            tensor.data = view_bytes(memory, *geometry)
        self._versions = [tensor._version for tensor in self.tensors]

    def refer_to_host(self) -> torch.Tensor:
        """Let the tensors refer to the host memory, which has their content, and return the memory of the device."""
        assert self._device is not None and self.host is not None
        if not self._host_views:
            self._host_views = [view_bytes(self.host, *geometry) for geometry in self._geometries]
        for tensor, view in zip(self.tensors, self._host_views, strict=True):
            tensor.data = view
        memory, self._device = self._device, None
        return memory

    def describe_view(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the arguments of ``view_bytes`` that give ``tensor``; None: it is not in this memory."""
        if self._device is None or tensor.untyped_storage()._cdata != self._device.untyped_storage()._cdata:
            return None
        return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


class StorageMover:
    """Moves storages, many of them with one copy: each copy costs time in the interpreter.

    Args:
        memory: The host memory.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._spare = _SpareMemory()

    @contextmanager
    def reusing(self, storages: Iterable[MovedStorage]) -> Iterator[None]:
        """Keep the memory that storages leave in the block for those that will be loaded in it."""
        self._spare.expect(moved.num_bytes for moved in storages if not moved.is_loaded and moved.incoming is None)
        try:
            yield
        finally:
            self._spare.expect(())

    def start_loading(self, storages: Iterable[MovedStorage], *, overlaps: bool = True) -> None:
        """Start to copy storages to the device; their tensors are in host memory until ``load``."""
        chosen = [moved for moved in storages if moved.incoming is None]
        self.finish_storing(chosen)
        chosen = [moved for moved in chosen if not moved.is_loaded]
        if not chosen:
            return
        with _ordinary_tensors():
            pairs = [(self._spare.take(moved), _host_of(moved)) for moved in chosen]
        copy = self.memory.copy_many(pairs, to_host=False, overlaps=overlaps)
        for moved, (target, _) in zip(chosen, pairs, strict=True):
            moved.incoming = target, copy

    def load(self, storages: Iterable[MovedStorage]) -> None:
        """Move storages to the device; the computation that follows waits for the copies."""
        storages = [moved for moved in storages if not moved.is_loaded or moved.outgoing is not None]
        if not storages:
            return
        self.start_loading(storages, overlaps=False)
        with _ordinary_tensors():
            for moved in storages:
                if moved.incoming is not None:
                    (target, copy), moved.incoming = moved.incoming, None
                    copy.wait()
                    moved.refer_to_device(target)

    def cancel_loading(self, storages: Iterable[MovedStorage]) -> None:
        """Discard what ``start_loading`` has copied."""
        for moved in storages:
            if moved.incoming is not None:
                moved.incoming[1].wait()
                moved.incoming = None

    def start_storing(self, storages: Iterable[MovedStorage], *, overlaps: bool = True) -> list[MovedStorage]:
        """Start to move storages to host memory, and return those that are copied.

        Tensors that were not changed since they were loaded are not copied: they are in host memory at once. The others
        stay on the device until ``finish_storing``.
        """
        storages = list(storages)
        self.cancel_loading(storages)
        storages = [moved for moved in storages if moved.is_loaded and moved.outgoing is None]
        if not storages:
            return []
        copied: list[MovedStorage] = []
        pairs: list[Pair] = []
        with _ordinary_tensors():
            for moved in storages:
                if not moved.is_changed:
                    self._spare.add(moved.refer_to_host())
                    continue
                if moved.host is None:
                    moved.host = self.memory.allocate(moved.num_bytes)
                copied.append(moved)
                pairs.append((moved.host, _device_of(moved)))
        if copied:
            copy = self.memory.copy_many(pairs, to_host=True, overlaps=overlaps)
            for moved in copied:
                moved.outgoing = copy
        return copied

    def finish_storing(self, storages: Iterable[MovedStorage]) -> None:
        """Wait for the copies of storages to host memory, and free their memory on the device."""
        storages = [moved for moved in storages if moved.outgoing is not None]
        if not storages:
            return
        with _ordinary_tensors():
            for moved in storages:
                if moved.outgoing is not None:
                    moved.outgoing.finish()
                    moved.outgoing = None
                    self._spare.add(moved.refer_to_host())


class _SpareMemory:
    """Memory of the device that storages have left, for others of the same size.

    Memory that is freed and allocated again costs a page fault for every page on some systems.
    """

    def __init__(self) -> None:
        self._wanted: Counter[int] = Counter()
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def expect(self, sizes: Iterable[int]) -> None:
        """Drop what is left, and keep memory of these sizes from now on."""
        self._spare.clear()
        self._wanted = Counter(sizes)

    def add(self, memory: torch.Tensor) -> None:
        """Keep memory if it is wanted, and nobody else refers to it."""
        if self._wanted[memory.nbytes] > 0 and _count_references(memory) == _UNSHARED:
            self._wanted[memory.nbytes] -= 1
            self._spare[memory.nbytes].append(memory)

    def take(self, moved: MovedStorage) -> torch.Tensor:
        """Return memory for a storage."""
        spare = self._spare[moved.num_bytes]
        if spare and spare[-1].device == moved.torch_device:
            return spare.pop()
        self._wanted[moved.num_bytes] -= 1
        return torch.empty(moved.num_bytes, dtype=torch.uint8, device=moved.torch_device)


def _count_references(memory: torch.Tensor) -> tuple[int, int]:
    """Return how many references there are to the storage of a tensor, in C++ and in Python."""
    storage = memory.untyped_storage()
    count_uses: Any = torch._C._storage_Use_Count
    return count_uses(storage._cdata), sys.getrefcount(storage)


_UNSHARED: Final = _count_references(torch.empty(1, dtype=torch.uint8))
"""References to the storage of a tensor that is the only one with it."""


def _device_of(moved: MovedStorage) -> torch.Tensor:
    assert moved.device is not None
    return moved.device


def _host_of(moved: MovedStorage) -> torch.Tensor:
    assert moved.host is not None
    return moved.host


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Make tensors that autograd can use, whatever the mode of the program."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def view_bytes(
    memory: torch.Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: Any
) -> torch.Tensor:
    """Return a tensor in memory given as bytes."""
    rest = memory.nbytes % dtype.itemsize
    whole = memory[: memory.nbytes - rest] if rest else memory
    return whole.view(dtype).as_strided(size, stride, offset)


def as_bytes(tensor: torch.Tensor, start: Any = 0, num_bytes: int | None = None) -> torch.Tensor:
    """Return the storage of a tensor as bytes, from the byte ``start`` on."""
    return storage_bytes(tensor.untyped_storage(), start, num_bytes)


def storage_bytes(storage: Any, start: Any = 0, num_bytes: int | None = None) -> torch.Tensor:
    """Return a storage as bytes, from the byte ``start`` on."""
    with torch.inference_mode(False), torch.no_grad():
        empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
        whole: torch.Tensor = empty.set_(storage, start, (storage.nbytes() if num_bytes is None else num_bytes,))
    return whole


def find_storages(tensors: Iterable[torch.Tensor]) -> list[MovedStorage]:
    """Return one ``MovedStorage`` for each storage of the tensors."""
    by_storage: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return [MovedStorage(shared.values()) for shared in by_storage.values()]
