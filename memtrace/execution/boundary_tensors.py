"""Inputs of checkpointed layers in host memory: what backward starts from when it repeats a layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memtrace.execution.host_memory import HostMemory
from memtrace.execution.moved_storage import as_bytes, view_bytes


def detach_saved(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a pack hook may keep instead of a saved tensor.

    The result of an operator refers to its node in autograd's graph, which refers to what the hook returns. Where no
    backward follows, neither would ever be freed. Autograd attaches the node again when it unpacks the tensor.
    """
    if tensor.grad_fn is None:
        return tensor
    with torch.no_grad():
        return tensor.detach()


class BoundaryTensors:
    """Moves the results of operators that autograd saves to host memory, and back when backward needs them.

    Batches and masks stay where they are: the program keeps them anyway. A tensor that several layers take is copied
    once, as long as no operator changes it.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_HostTensor]]] = {}

    @contextmanager
    def saved_on_host(self) -> Iterator[None]:
        """Move what autograd saves while the block runs, except inside inner hooks for saved tensors."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _HostTensor:
        is_result = tensor.grad_fn is not None and type(tensor) is torch.Tensor
        if not is_result or tensor.layout is not torch.strided or not tensor.numel():
            return detach_saved(tensor)
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        key = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.size(), tensor.stride())
        known_storage, reference = self._known.get(key, (None, None))
        packed = reference() if reference is not None and known_storage == storage else None
        if packed is None:
            packed = _HostTensor(tensor, self._memory)
            self._known = {key: entry for key, entry in self._known.items() if entry[1]() is not None}
            self._known[key] = storage, weakref.ref(packed)
        return packed

    def _unpack(self, packed: torch.Tensor | _HostTensor) -> torch.Tensor:
        return packed.to_device() if isinstance(packed, _HostTensor) else packed


class _HostTensor:
    """A copy of a tensor in host memory."""

    def __init__(self, tensor: torch.Tensor, memory: HostMemory) -> None:
        self._memory, self._torch_device = memory, tensor.device
        self._geometry = (tensor.dtype, tensor.size(), tensor.stride(), 0)
        steps = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        num_bytes = (steps + 1) * tensor.element_size()
        self._host = memory.allocate(num_bytes)
        with torch.inference_mode(False), torch.no_grad():
            start = tensor.storage_offset() * tensor.element_size()
            source = as_bytes(tensor, start, num_bytes)
            # The next operator may change the tensor in place.
            memory.copy_many([(self._host, source)], to_host=True, overlaps=False).wait()

    def to_device(self) -> torch.Tensor:
        """Return a copy on the device of the tensor."""
        target = torch.empty(self._host.nbytes, dtype=torch.uint8, device=self._torch_device)
        self._memory.copy_many([(target, self._host)], to_host=False, overlaps=False).wait()
        return view_bytes(target, *self._geometry)
