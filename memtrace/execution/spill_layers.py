"""Forward calls of a spilled model's layers: each puts its shard on the device, and backward repeats it."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from memtrace.execution.boundary_tensors import BoundaryTensors, detach_saved
from memtrace.execution.moved_storage import MovedStorage, view_bytes
from memtrace.execution.spill_residency import Residency
from memtrace.recording.plain_access import module_members, walk_modules

_MISSING: Final = object()
MIN_CONSTANT_BYTES: Final = 64 << 10
"""Smaller buffers are copied at every call."""


class SpilledLayers:
    """What the layers of a spilled model share.

    Args:
        residency: Moves the shards.
        recompute: Whether backward repeats the forward of a layer; otherwise what autograd saves stays on the device.
    """

    def __init__(self, residency: Residency, *, recompute: bool) -> None:
        self.residency = residency
        self.recompute = recompute
        self.inputs = BoundaryTensors(residency.mover.memory)
        self._waits_for_backward = False

    def use_in_forward(self, shard: int) -> None:
        """Put the shard of a layer on the device whose forward begins."""
        is_last = shard + 1 == len(self.residency.shards)
        self.residency.use(shard, None if is_last else shard + 1)

    def use_in_backward(self, shard: int) -> None:
        """Put the shard of a layer on the device whose backward runs."""
        self.watch_backward()
        self.residency.use(shard, shard - 1 if shard else None)

    def watch_backward(self) -> None:
        """Move all shards to host memory when the backward that runs has ended."""
        if not self._waits_for_backward:
            self._waits_for_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._waits_for_backward = False
        self.residency.empty()

    def forget_failed_backward(self) -> None:
        """Watch the next backward, also where the last one has failed."""
        self._waits_for_backward = False


class SpilledForward:
    """Takes the place of a layer's ``forward``. Copies and pickles of the layer get its own ``forward``."""

    def __init__(self, module: torch.nn.Module, shard: int, layers: SpilledLayers) -> None:
        self._module, self._shard, self._layers = module, shard, layers
        self._before: Any = module.__dict__.get("forward", _MISSING)
        self._forward: Callable[..., Any] = module.forward
        self._constant_buffers: set[tuple[int, str]] = set()

    def attach(self) -> None:
        """Take the place of the layer's ``forward``."""
        self._module.__dict__["forward"] = self

    def detach(self) -> None:
        """Give the layer its ``forward`` back."""
        if self._before is _MISSING:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with its shard on the device."""
        layers = self._layers
        layers.forget_failed_backward()
        layers.use_in_forward(self._shard)
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if not layers.recompute:
            with torch.autograd.graph.saved_tensors_hooks(self._pack_parameter, self._unpack_parameter):
                return self._forward(*args, **kwargs)
        call = _RepeatedCall(
            self._module, self._forward, lambda: layers.use_in_backward(self._shard), self._constant_buffers
        )
        with layers.inputs.saved_on_host():
            return checkpoint(call, *args, use_reentrant=False, **kwargs)

    def _pack_parameter(self, tensor: torch.Tensor) -> torch.Tensor | tuple[MovedStorage, tuple[Any, ...]]:
        """Keep a parameter, or a view of one, by its place in the parameter's storage."""
        for moved in self._layers.residency.shards[self._shard].storages:
            geometry = moved.describe_view(tensor)
            if geometry is not None:
                return moved, geometry
        return detach_saved(tensor)

    def _unpack_parameter(self, packed: torch.Tensor | tuple[MovedStorage, tuple[Any, ...]]) -> torch.Tensor:
        self._layers.use_in_backward(self._shard)
        if isinstance(packed, torch.Tensor):
            return packed
        moved, geometry = packed
        self._layers.residency.mover.load([moved])
        assert moved.device is not None
        return view_bytes(moved.device, *geometry)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._before is not _MISSING:
            return copy.deepcopy(self._before, memo)
        return _own_forward(memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module,)


def _own_forward(module: torch.nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


class _RepeatedCall:
    """A forward call that backward repeats with the buffers that it began with.

    The buffers of the module change once, as without recomputation: batch statistics are not counted twice.

    Args:
        module: The module.
        forward: Its forward.
        use_in_backward: Called before the forward is repeated.
        constant_buffers: Large buffers of the module that its first call has not changed, such as masks, by the id of
            their module and their name. They are not copied.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        use_in_backward: Callable[[], None],
        constant_buffers: set[tuple[int, str]],
    ) -> None:
        self._forward, self._use_in_backward, self._constant = forward, use_in_backward, constant_buffers
        self._is_first = True
        self._buffers = [
            (owner, name, buffer.detach().clone())
            for _, owner in walk_modules(module)
            for name, buffer in module_members(owner, "_buffers")
            if owner.training and (id(owner), name) not in constant_buffers
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            self._is_first = False
            result = self._forward(*args, **kwargs)
            self._forget_constant_buffers()
            return result
        self._use_in_backward()
        current = [owner._buffers[name] for owner, name, _ in self._buffers]
        try:
            for owner, name, before in self._buffers:
                owner._buffers[name] = before.clone()
            return self._forward(*args, **kwargs)
        finally:
            for (owner, name, _), buffer in zip(self._buffers, current, strict=True):
                owner._buffers[name] = buffer

    def _forget_constant_buffers(self) -> None:
        # Versions do not tell: batch norms write their statistics without counting it.
        for owner, name, before in self._buffers:
            buffer = owner._buffers.get(name)
            if before.nbytes >= MIN_CONSTANT_BYTES and buffer is not None and torch.equal(buffer, before):
                self._constant.add((id(owner), name))
        self._buffers = [entry for entry in self._buffers if (id(entry[0]), entry[1]) not in self._constant]
