"""Programs whose objects run code of their own when something looks at them.

Each program returns what it computed and how often its code ran. A recording must change neither.
"""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Program = Callable[[], object]


def train(model: nn.Module, parameters: list[nn.Parameter] | None = None, *args: Any, **kwargs: Any) -> list[float]:
    """Three training steps on random inputs of 8 columns; returns the losses."""
    optimizer = torch.optim.Adam(model.parameters() if parameters is None else parameters)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8), *args, **kwargs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Linear(nn.Module):
    """A module with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner(x)


def length_raises() -> object:
    """As torch.compile's OptimizedModule, and containers that are filled in forward."""

    class Buffer(Linear):
        def __len__(self) -> int:
            raise TypeError("no length")

        def __bool__(self) -> bool:
            raise TypeError("no truth value")

    return train(nn.Sequential(Buffer(), Linear()))


def compiled_model() -> object:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses = train(torch.compile(Linear(), backend="eager"))  # type: ignore[arg-type]
    return losses, dict(torch._dynamo.utils.counters["stats"]), dict(torch._dynamo.utils.counters["frames"])


def compiled_submodules() -> object:
    """With a graph break, and forward hooks, which make torch.compile trace ``Module.__call__``."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(Linear(), Linear())
    model[1].inner.register_forward_hook(lambda module, args, output: output * 2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.model(x)
            torch._dynamo.graph_break()
            return self.model(x)

    losses = train(torch.compile(Outer(), backend="eager"))  # type: ignore[arg-type]
    return losses, dict(torch._dynamo.utils.counters["stats"]), dict(torch._dynamo.utils.counters["frames"])


def called_before_init() -> object:
    """A module whose constructor calls its backbone before ``super().__init__()``."""

    class Head(nn.Module):
        def __init__(self, backbone: nn.Module) -> None:
            width = backbone(torch.zeros(1, 8)).shape[1]
            super().__init__()
            self.backbone, self.last = backbone, nn.Linear(width, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.backbone(x))
            return out

    return train(Head(nn.Sequential(nn.Linear(8, 16), nn.ReLU())))


def overridden_methods() -> object:
    """A module that refuses every question that is not asked by its owner."""

    class Closed(Linear):
        def _refuse(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not to be called")

        named_parameters = named_modules = named_buffers = named_children = _refuse
        modules = children = buffers = state_dict = _refuse
        __eq__ = __hash__ = __iter__ = __len__ = __contains__ = __repr__ = __dir__ = _refuse  # type: ignore[assignment]

    model = Closed()
    return train(model, list(model.inner.parameters()))


def counted_attributes() -> object:
    """A module that counts reads of its attributes and has another class than it shows."""
    reads: dict[str, int] = {}

    class Counting(Linear):
        def __getattribute__(self, name: str) -> Any:
            reads[name] = reads.get(name, 0) + 1
            return super().__getattribute__(name)

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            reads["shown class"] = reads.get("shown class", 0) + 1
            return nn.Linear

    losses = train(nn.Sequential(Counting(), Counting()))
    return losses, reads


def optimizer_without_equality() -> object:
    class Strange(torch.optim.Adam):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not comparable")

        def __len__(self) -> int:
            raise RuntimeError("no length")

    model = Linear()
    optimizer = Strange(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.inner.weight.tolist()


class _Lazy(Mapping[str, torch.Tensor]):
    """A mapping that loads its values when they are read."""

    def __init__(self) -> None:
        self.num_loads = 0

    def __getitem__(self, key: str) -> torch.Tensor:
        self.num_loads += 1
        return torch.randn(3)

    def __iter__(self) -> Iterator[str]:
        self.num_loads += 1
        return iter("abc")

    def __len__(self) -> int:
        self.num_loads += 1
        return 3


def unusual_inputs() -> object:
    """Endless iterables, and containers that count how often they are read."""

    class CountingList(list):  # type: ignore[type-arg]
        num_reads = 0

        def __iter__(self) -> Iterator[Any]:
            CountingList.num_reads += 1
            return super().__iter__()

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(2)

    lazy, iterator, counting = _Lazy(), endless(), CountingList([torch.zeros(3)])
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    losses = train(Linear(), None, iterator, lazy, counting, cyclic, batch=UserDict(a=torch.ones(2)))
    return losses, lazy.num_loads, CountingList.num_reads, next(iterator).tolist()


def function_modes() -> object:
    """A function mode that counts the functions and attributes of torch that are used."""
    used: dict[str, int] = {}

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__qualname__", str(func))
            used[name] = used.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    with Counting():
        losses = train(nn.Sequential(Linear(), Linear()))
    return losses, used


def tensor_subclasses() -> object:
    """Parameters and inputs of a tensor class that counts how it is used."""
    used: dict[str, int] = {}

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__qualname__", str(func))
            used[name] = used.get(name, 0) + 1
            return super().__torch_function__(func, types, args, kwargs)

    model = Linear()
    model.register_buffer("offset", torch.ones(8).as_subclass(Counting))
    model.register_forward_hook(lambda module, args, output: output + model.offset)
    return train(model, None, torch.ones(3).as_subclass(Counting)), used


def replaced_call() -> object:
    """Compares, replaces and restores ``Module.__call__``, as quantisation and graph tracers do."""
    original: Any = nn.Module.__call__
    names: list[str] = []

    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names.append(type(self).__name__)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = patched  # type: ignore[method-assign]
    try:
        losses = train(Linear())
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
    from torch.fx import symbolic_trace

    graph = str(symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())).graph)
    return losses, names, graph, id(nn.Module.__call__), original.__name__, original.__qualname__


def own_warnings() -> object:
    """Warnings that name callers some frames away, and that are shown once per place."""
    shown: list[tuple[str, str]] = []

    class Warning_(Linear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            for level in range(1, 7):
                warnings.warn(f"level {level}", UserWarning, stacklevel=level)
            return super().forward(x)

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        shown.append((str(message), f"{filename}:{lineno}"))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        model = nn.Sequential(Warning_(), Warning_())
        losses = train(model)
        # The gradient of a tensor that is not a leaf: only the program's own access may warn.
        model.register_buffer("scale", torch.ones(1, requires_grad=True) * 2)
        losses += train(model)
    return losses, shown


def recursion_limit() -> object:
    """The depth at which nested modules reach the recursion limit."""

    class Deep(nn.Module):
        depth = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Deep.depth += 1
            out: torch.Tensor = self(x)
            return out

    model = Deep()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        model(torch.ones(1))
    except RecursionError:
        pass
    finally:
        sys.setrecursionlimit(limit)
    return Deep.depth


def traceback_of(fail: Callable[[], object]) -> str:
    try:
        fail()
    except ValueError:
        return traceback.format_exc()
    return ""


def tracebacks() -> object:
    """The traceback of an error in a module and in a backward hook."""

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken on purpose")

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(broken)
    return [traceback_of(lambda: nn.Sequential(Broken())(x)), traceback_of(lambda: (x * 2).sum().backward())]


def dictionary_of_variables() -> object:
    """A program that changes the dictionary of its variables, which looking at the frame would undo."""
    rate, model = 0.1, Linear()
    variables = locals()
    variables["rate"] = rate * 2
    model(torch.randn(4, 8))
    later = 1.0
    train(nn.Sequential(model))
    return sorted(variables), variables["rate"], later


def own_collection_callbacks() -> object:
    """A program that clears the callbacks of the garbage collector, and one that cannot be compared."""

    class Callback:
        def __call__(self, phase: str, info: dict[str, int]) -> None:
            pass

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not comparable")

    others = list(gc.callbacks)
    gc.callbacks.clear()
    gc.callbacks.append(Callback())
    losses = train(Linear())
    gc.callbacks[:] = others
    return losses


PROGRAMS: tuple[Program, ...] = (
    length_raises,
    compiled_model,
    compiled_submodules,
    called_before_init,
    overridden_methods,
    counted_attributes,
    optimizer_without_equality,
    unusual_inputs,
    function_modes,
    tensor_subclasses,
    replaced_call,
    own_warnings,
    recursion_limit,
    tracebacks,
    dictionary_of_variables,
    own_collection_callbacks,
)
