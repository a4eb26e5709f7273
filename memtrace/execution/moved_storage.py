"""Tensors that move between a device and host memory and stay the same objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memtrace.execution.host_memory import Copy, HostMemory


class MovedStorage:
    """Tensors that share one storage, which is on the device or in host memory; they refer to where it is.

    Only ``Tensor.data`` changes, so that parameters keep their identity, their hooks and their graph. In host memory
    the tensors are whole: code that uses them there computes what it would have computed on the device.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], memory: HostMemory) -> None:
        self.tensors = tuple(tensors)
        first = self.tensors[0]
        self._memory = memory
        self._views = [
            (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()) for tensor in self.tensors
        ]
        self._torch_device = first.device
        self.num_bytes = first.untyped_storage().nbytes()
        self._device: torch.Tensor | None = as_bytes(first)
        self._host: torch.Tensor | None = None
        self._incoming: tuple[torch.Tensor, Copy] | None = None
        self._outgoing: Copy | None = None
        self._versions: list[int] | None = None
        """Versions of the tensors when they were loaded; None: the host memory is not up to date."""

    @property
    def is_loaded(self) -> bool:
        """Whether the tensors are on the device."""
        return self._device is not None

    @property
    def is_loading(self) -> bool:
        """Whether a copy to the device was started."""
        return self._incoming is not None

    def start_loading(self) -> None:
        """Start to copy to the device; the tensors are in host memory until ``load``."""
        self.finish_storing()
        if self.is_loaded or self.is_loading:
            return
        assert self._host is not None
        with torch.inference_mode(False):
            target = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._torch_device)
        self._incoming = target, self._memory.copy_in(target, self._host)

    def load(self) -> None:
        """Move the tensors to the device."""
        self.start_loading()
        if self.is_loaded:
            return
        assert self._incoming is not None
        (self._device, copy), self._incoming = self._incoming, None
        copy.wait()
        self._refer_to(self._device)
        self._versions = [tensor._version for tensor in self.tensors]

    def cancel_loading(self) -> None:
        """Discard what ``start_loading`` has copied."""
        if self._incoming is not None:
            self._incoming[1].wait()
            self._incoming = None

    @property
    def is_changed(self) -> bool:
        """Whether the tensors on the device may differ from the copy in host memory."""
        return self.is_loaded and self._versions != [tensor._version for tensor in self.tensors]

    def mark_changed(self) -> None:
        """Copy the tensors back when they leave the device, whatever their versions."""
        self._versions = None

    def start_storing(self) -> int:
        """Start to move the tensors to host memory; return how many bytes are being copied.

        Tensors that were not changed since they were loaded are not copied: they are in host memory at once. The others
        stay on the device until ``finish_storing``.
        """
        self.cancel_loading()
        if self._device is None or self._outgoing is not None:
            return 0
        if not self.is_changed:
            self._leave_device()
            return 0
        if self._host is None:
            self._host = self._memory.allocate(self.num_bytes)
        self._outgoing = self._memory.copy_out(self._host, self._device)
        return self.num_bytes

    @property
    def is_stored(self) -> bool:
        """Whether the copy to host memory is done."""
        return self._outgoing is None or self._outgoing.is_done()

    def finish_storing(self) -> None:
        """Wait for the copy to host memory, and free the memory of the device."""
        if self._outgoing is not None:
            copy, self._outgoing = self._outgoing, None
            copy.finish()
            self._leave_device()

    def _leave_device(self) -> None:
        assert self._host is not None
        self._refer_to(self._host)
        self._device = None

    def _refer_to(self, memory: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, (dtype, size, stride, offset) in zip(self.tensors, self._views, strict=True):
                tensor.data = view_bytes(memory, dtype, size, stride, offset)

    def describe_view(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the arguments of ``view`` that give ``tensor``; None if it is not in this storage on the device."""
        if self._device is None or tensor.untyped_storage()._cdata != self._device.untyped_storage()._cdata:
            return None
        return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def view(self, *geometry: Any) -> torch.Tensor:
        """Return a tensor in this storage on the device."""
        self.load()
        assert self._device is not None
        return view_bytes(self._device, *geometry)


def view_bytes(
    memory: torch.Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: Any
) -> torch.Tensor:
    """Return a tensor in memory given as bytes."""
    whole = memory.nbytes // dtype.itemsize * dtype.itemsize
    return memory[:whole].view(dtype).as_strided(size, stride, offset)


def as_bytes(tensor: torch.Tensor, start: Any = 0, num_bytes: int | None = None) -> torch.Tensor:
    """Return the storage of a tensor as bytes, from the byte ``start`` on."""
    return storage_bytes(tensor.untyped_storage(), start, num_bytes)


def storage_bytes(storage: Any, start: Any = 0, num_bytes: int | None = None) -> torch.Tensor:
    """Return a storage as bytes, from the byte ``start`` on."""
    with torch.inference_mode(False), torch.no_grad():
        empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
        whole: torch.Tensor = empty.set_(storage, start, (storage.nbytes() if num_bytes is None else num_bytes,))
    return whole


def move_storages(tensors: Iterable[torch.Tensor], memory: HostMemory) -> list[MovedStorage]:
    """Return one ``MovedStorage`` for each storage of the tensors."""
    by_storage: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return [MovedStorage(shared.values(), memory) for shared in by_storage.values()]
