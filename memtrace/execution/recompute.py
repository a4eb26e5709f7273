"""Recomputation in backward, with ``torch.utils.checkpoint`` and without reentrant autograd.

While the plan is applied, ``forward`` of a module checkpoints its calls. The repeated call sees the states of all
random generators of the program and the buffers that the first call saw, and leaves them as they are: without that,
batch norm would update its running statistics twice.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import MethodType, TracebackType
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memtrace.errors import MemtraceError
from memtrace.execution.target import Target, is_compiled
from memtrace.planning.actions import Recompute
from memtrace.recording.plain_access import module_members, walk_modules, walk_tensors

_running: Final = threading.local()
"""``inside``: whether the thread runs a checkpointed call. Calls inside it are repeated with it."""


def apply_action(action: Recompute, target: Target) -> AbstractContextManager[None]:
    """Return a context manager in which the modules of an action are recomputed in backward.

    Raises:
        MemtraceError: A module or an operator does not exist, or a module cannot be checkpointed.
    """
    operators = [_find_operator(name) for name in action.kept_operators]
    modules = {name: _unwrap(module) for name, module in target.find_modules(action.modules).items()}
    _require_checkpointable(target.model, modules)
    return _checkpointed(list({id(module): module for module in modules.values()}.values()), operators)


@contextmanager
def _checkpointed(modules: Sequence[torch.nn.Module], operators: Sequence[Any]) -> Iterator[None]:
    replaced: list[CheckpointedForward] = []
    try:
        for module in modules:
            replaced.append(CheckpointedForward(module, operators))
            module.__dict__["forward"] = replaced[-1]
        yield
    finally:
        for forward in replaced:
            forward.restore()


class CheckpointedForward:
    """Stands in for ``forward`` of a module and checkpoints its calls. A copy of the module gets the forward itself."""

    def __init__(self, module: torch.nn.Module, operators: Sequence[Any] = ()) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")
        self._original: Callable[..., Any] = module.forward
        self._operators = list(operators)
        self._buffers = _WrittenBuffers(module)
        update_wrapper(self, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward, to be repeated in backward where autograd is recording."""
        if not _can_checkpoint():
            return self._original(*args, **kwargs)
        return checkpoint(partial(self._run, kwargs), *args, use_reentrant=False, context_fn=self._contexts)

    def restore(self) -> None:
        """Give the module its forward back, unless the program has replaced it."""
        if self._module.__dict__.get("forward") is not self:
            return
        if self._own is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._own

    def _run(self, kwargs: dict[str, Any], *args: Any) -> Any:
        _running.inside = True
        try:
            return self._original(*args, **kwargs)
        finally:
            _running.inside = False

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return what surrounds the first run of a call and each repetition."""
        create: Any = create_selective_checkpoint_contexts
        first, repeated = create(self._operators) if self._operators else (nullcontext(), nullcontext())
        repetition = _Repetition(repeated)
        generators, before = _GeneratorStates(), self._buffers.copy()

        @contextmanager
        def run_first() -> Iterator[None]:
            with first:
                yield
            self._buffers.find_written(before)
            if not generators.is_current():
                repetition.surround(generators.restored)
            if before.values:
                repetition.surround(lambda: self._buffers.restored(before.values))

        return run_first(), repetition

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return deepcopy(self._own, memo)
        return _bind_forward(deepcopy(self._module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own is not None:
            return _identity, (self._own,)
        return _bind_forward, (self._module,)


class _Repetition(AbstractContextManager[None]):
    """What surrounds the repetition of a call, which several backward passes may enter."""

    def __init__(self, innermost: AbstractContextManager[None]) -> None:
        self._innermost = innermost
        self._outer: list[Callable[[], AbstractContextManager[None]]] = []
        self._entered = ExitStack()

    def surround(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Add a context inside those that were added before."""
        self._outer.append(context)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._outer:
                stack.enter_context(context())
            stack.enter_context(self._innermost)
            self._entered = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, error, traceback)


@dataclass
class _BufferCopies:
    values: dict[str, torch.Tensor]
    """Copies by name."""
    versions: dict[str, int]
    """Versions of all buffers when the copies were made."""


class _WrittenBuffers:
    """The buffers that the forward of a module writes, such as running statistics; all of them before its first call.

    The version of a buffer does not tell whether batch norm writes it, so the values are compared after the first call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._written = {
            f"{prefix}.{name}" if prefix else name
            for prefix, part in walk_modules(module)
            if isinstance(part, torch.nn.modules.batchnorm._NormBase)
            for name, _ in module_members(part, "_buffers")
        }
        self._is_known = False

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(walk_tensors(self._module, "_buffers"))

    def copy(self) -> _BufferCopies:
        """Return copies of the buffers that forward may write."""
        buffers = self._buffers()
        with torch.no_grad():
            copies = {
                name: buffer.detach().clone()
                for name, buffer in buffers.items()
                if name in self._written or not self._is_known
            }
        return _BufferCopies(copies, {name: buffer._version for name, buffer in buffers.items()})

    def find_written(self, before: _BufferCopies) -> None:
        """Note which buffers were written since they were copied, and keep only the copies of these."""
        for name, buffer in self._buffers().items():
            is_changed = before.versions.get(name) != buffer._version
            if not self._is_known and name in before.values and not is_changed:
                is_changed = not torch.equal(before.values[name], buffer)
            if is_changed:
                self._written.add(name)
        self._is_known = True
        for name in before.values.keys() - self._written:
            del before.values[name]

    @contextmanager
    def restored(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Set the buffers to earlier values in the block, and back afterwards."""
        buffers = {name: buffer for name, buffer in self._buffers().items() if name in values}
        current = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        _copy_into(buffers, values)
        try:
            yield
        finally:
            _copy_into(buffers, current)


class _GeneratorStates:
    """The states of the random generators of Python and NumPy; ``checkpoint`` itself preserves those of torch."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def is_current(self) -> bool:
        """Return whether nothing has been drawn since."""
        current = _GeneratorStates()
        if current._python != self._python or (current._numpy is None) != (self._numpy is None):
            return False
        return self._numpy is None or bool(
            current._numpy[2:] == self._numpy[2:] and (current._numpy[1] == self._numpy[1]).all()
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the generators to these states in the block, and back afterwards."""
        current = _GeneratorStates()
        self._set()
        try:
            yield
        finally:
            current._set()

    def _set(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _can_checkpoint() -> bool:
    """Return whether autograd records this call, outside of another checkpointed call and of function transforms."""
    autograd: Any = torch._C._autograd
    jit: Any = torch.jit
    return (
        torch.is_grad_enabled()
        and not getattr(_running, "inside", False)
        and not torch._C._are_functorch_transforms_active()
        and bool(autograd._saved_tensors_hooks_is_enabled())
        and not jit.is_tracing()
        and not torch.compiler.is_compiling()
    )


def _copy_into(buffers: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])


def _bind_forward(module: torch.nn.Module) -> Any:
    return MethodType(type(module).forward, module)


def _identity(value: Any) -> Any:
    return value


def _find_operator(name: str) -> Any:
    """Return the operator of a name such as ``aten::addmm`` or ``aten::div.Scalar``."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
    except (AttributeError, RuntimeError):
        raise MemtraceError(
            f"the plan keeps the outputs of the operator {name}, which this torch ({torch.__version__}) does not have. "
            "Make the plan with the torch that carries it out."
        ) from None


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that data parallelism wraps: the wrapper prepares the reduction of gradients in its forward."""
    return module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module


def _require_checkpointable(model: torch.nn.Module, modules: dict[str, torch.nn.Module]) -> None:
    chosen = {id(module): name for name, module in modules.items()}
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise MemtraceError(
                f"{name} is compiled by torch.jit and cannot be recomputed. Apply the plan to the model before "
                "torch.jit.script or torch.jit.trace."
            )
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise MemtraceError(
                f"{name} is wrapped in FullyShardedDataParallel and cannot be recomputed from outside. Choose the "
                "module inside it, or use torch.distributed.fsdp.fully_shard."
            )
    for _, outer in walk_modules(model):
        inside = [chosen[id(module)] for _, module in walk_modules(outer) if id(module) in chosen]
        if inside and is_compiled(outer):
            raise MemtraceError(
                f"{inside[0]} is part of a model compiled by torch.compile, which plans its own recomputation. Set "
                "torch._functorch.config.activation_memory_budget there, or apply the plan to the model without "
                "torch.compile."
            )
        if isinstance(outer, torch.nn.DataParallel) and inside:
            raise MemtraceError(
                f"{inside[0]} is part of a torch.nn.DataParallel, which copies modules in every step and cannot be "
                "recomputed. Use torch.nn.parallel.DistributedDataParallel."
            )
