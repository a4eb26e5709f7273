"""Applies an offload: saved tensors wait in host memory between forward and backward.

The work is done by the hooks that autograd calls with each tensor that it saves (``saved_tensors_hooks``). They see all
saved tensors, because another operator may save a storage that the plan names once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from memtrace.errors import MemtraceError
from memtrace.execution.boundary_tensors import detach_saved
from memtrace.execution.host_memory import host_memory_for
from memtrace.execution.offload_storage import OffloadedStorage, OffloadedStorages, SavedStorage
from memtrace.execution.target import Target
from memtrace.planning.actions import Offload, OffloadedTensor
from memtrace.recording.plain_access import module_members, walk_modules
from memtrace.recording.untraced import never_compiled

_next_node: Final[Any] = torch._C._autograd._get_sequence_nr


def apply_action(action: Offload, target: Target) -> AbstractContextManager[None]:
    """Return a context manager that offloads the tensors of an action.

    Raises:
        MemtraceError: The model does not have a module that the action names.
    """
    modules = target.find_modules({tensor.module for tensor in action.tensors if tensor.module})
    named: dict[int | None, dict[tuple[int, int], OffloadedTensor]] = {}
    for tensor in action.tensors:
        module = id(modules[tensor.module]) if tensor.module else None
        named.setdefault(module, {})[tensor.bytes, tensor.index] = tensor
    return _offloading(torch.device(action.device), named, target)


@contextmanager
def _offloading(
    device: torch.device, named: dict[int | None, dict[tuple[int, int], OffloadedTensor]], target: Target
) -> Iterator[None]:
    storages = OffloadedStorages(host_memory_for(device))
    hooks = _Hooks(device, named, target, storages)
    with ExitStack() as undo:
        undo.callback(storages.close)
        for _, module in walk_modules(target.model):
            undo.callback(module.register_forward_pre_hook(hooks.enter).remove)
            undo.callback(module.register_forward_hook(hooks.leave, always_call=True).remove)
        undo.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
        yield


class _Call:
    """A forward call of a module, or what the program does between two calls of the model."""

    __slots__ = ("module", "num_saved")

    def __init__(self, module: int | None) -> None:
        self.module = module
        self.num_saved: dict[int, int] = {}
        """Number of storages that the call saved first, by size."""


class _Saved:
    """A saved tensor, in place of the tensor in autograd's graph."""

    __slots__ = ("geometry", "node", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, node: int, storage: SavedStorage | None) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.node = node
        self.storage = storage
        self.geometry = (
            (tensor.storage_offset(), tensor.size(), tensor.stride()) if type(storage) is OffloadedStorage else None
        )


class _Hooks:
    """Counts what each module call saves, and exchanges the tensors that the plan names."""

    def __init__(
        self,
        device: torch.device,
        named: dict[int | None, dict[tuple[int, int], OffloadedTensor]],
        target: Target,
        storages: OffloadedStorages,
    ) -> None:
        self._device = device
        self._named = named
        self._sizes = frozenset(size for tensors in named.values() for size, _ in tensors)
        self._target = target
        self._storages = storages
        self._saved: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self._state = self._addresses_of_state()
        self._calls: list[_Call] = []
        self._outside = _Call(None)
        self._has_warned = False

        # torch.compile would compile methods of this class; these functions are left alone.
        @never_compiled
        def enter(module: torch.nn.Module, _: Any) -> None:
            self._enter(module)

        @never_compiled
        def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
            self._leave(module)

        @never_compiled
        def pack(tensor: torch.Tensor) -> _Saved:
            return self._pack(tensor)

        @never_compiled
        def unpack(saved: _Saved) -> torch.Tensor:
            return self._unpack(saved)

        self.enter, self.leave, self.pack, self.unpack = enter, leave, pack, unpack

    def _enter(self, module: torch.nn.Module) -> None:
        if not self._calls:
            self._state = self._addresses_of_state()
        self._storages.node_saves(_next_node() - 1)
        self._calls.append(_Call(id(module)))

    def _leave(self, module: torch.nn.Module) -> None:
        self._storages.node_saves(_next_node() - 1)
        # The plan may have been applied during a call, whose begin was not seen then.
        if any(call.module == id(module) for call in self._calls):
            while self._calls.pop().module != id(module):
                pass
        if not self._calls:
            self._outside = _Call(None)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        node = _next_node() - 1
        self._storages.node_saves(node)
        storage = self._find_storage(tensor, node)
        if type(storage) is not OffloadedStorage:
            return _Saved(detach_saved(tensor), node, storage)
        # The tensor can be one that the program has; ours shares its version counter and loses its storage.
        with torch.no_grad():
            tensor = tensor.detach()
        saved = _Saved(tensor, node, storage)
        storage.add(tensor, node)
        self._storages.node_saves(node)  # the plan can want this storage to leave at once
        return saved

    def _find_storage(self, tensor: torch.Tensor, node: int) -> SavedStorage | None:
        """Return the storage of a tensor if the plan names storages of this size."""
        if type(tensor) is not torch.Tensor or tensor.device != self._device or tensor.layout is not torch.strided:
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return None
        storage = tensor.untyped_storage()
        num_bytes, address = storage.nbytes(), storage._cdata
        if num_bytes not in self._sizes or address in self._state:
            return None
        known = self._saved.get(address)
        if known is not None:
            return known if known.num_bytes == num_bytes else None
        saved = self._saved[address] = self._save_first(storage, node)
        return saved

    def _save_first(self, storage: torch.UntypedStorage, node: int) -> SavedStorage:
        call = self._calls[-1] if self._calls else self._outside
        size = storage.nbytes()
        index = call.num_saved[size] = call.num_saved.get(size, -1) + 1
        tensor = self._named.get(call.module, {}).get((size, index))
        if tensor is not None:
            try:
                return self._storages.offload(storage, node, tensor)
            except (MemtraceError, RuntimeError) as error:
                self._warn(error)
        return SavedStorage(storage)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "memtrace: a tensor that the plan offloads stays on the device, and so do others for which there is no "
                f"space in host memory: {error}",
                stacklevel=1,
            )

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if type(saved.storage) is OffloadedStorage:
            saved.storage.fetch()  # before the copies that are not due yet
        self._storages.node_reads(saved.node)
        tensor, storage = saved.tensor, saved.storage
        # With these hooks, autograd leaves this check to us.
        if tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of type {tensor.type()} is at version {tensor._version}; expected version {saved.version} "
                "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
                "with torch.autograd.set_detect_anomaly(True)."
            )
        if type(storage) is not OffloadedStorage or saved.geometry is None:
            return tensor
        with torch.no_grad():
            restored = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return restored.set_(storage.restore(), *saved.geometry)

    def _addresses_of_state(self) -> frozenset[int]:
        """Return the addresses of the storages of parameters and buffers, which are not offloaded."""
        addresses = set()
        for _, module in walk_modules(self._target.model):
            for kind in ("_parameters", "_buffers"):
                for _, tensor in module_members(module, kind):
                    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
                        addresses.add(tensor.untyped_storage()._cdata)
        return frozenset(addresses)
