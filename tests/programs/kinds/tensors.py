"""Tensors of other kinds: sparse, nested, complex, quantised, subclasses, shared and mapped memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, state, train


@kind
def sparse_coordinates() -> Result:
    matrix = torch.eye(16).to_sparse().requires_grad_()
    output = torch.sparse.mm(matrix, torch.randn(16, 4))
    output.sum().backward()
    assert matrix.grad is not None
    return [output, matrix.grad.to_dense(), (matrix.detach() + matrix.detach()).coalesce().values()]


@kind
def sparse_rows() -> Result:
    matrix = torch.randn(8, 8).relu().to_sparse_csr()
    return [matrix @ torch.randn(8, 3), matrix.values(), matrix.to_dense()]


@kind
def sparse_gradients() -> Result:
    model = nn.Embedding(30, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    return train(model, lambda: model(torch.randint(30, (12,))).square().mean(), optimizer=optimizer)


@kind
def nested_tensors() -> Result:
    layer = nn.Linear(8, 8)
    parts = [torch.randn(length, 8) for length in (3, 5, 2)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    output = layer(nested)
    output.values().sum().backward()
    return [output.values(), layer.weight.grad]


@kind
def masked_tensors() -> Result:
    from torch.masked import masked_tensor

    data = torch.arange(12.0).reshape(3, 4)
    return masked_tensor(data, data % 2 == 0).sum(1).to_tensor(0)


@kind
def complex_numbers_and_fourier_transforms() -> Result:
    weight = torch.randn(9, dtype=torch.complex64, requires_grad=True)
    output = torch.fft.irfft(torch.fft.rfft(torch.randn(4, 16)) * weight)
    output.square().sum().backward()
    return [output, weight.grad]


@kind
def quantised_tensors() -> Result:
    x = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 10, torch.quint8)
    return [
        x.int_repr(),
        x.dequantize(),
        torch.quantize_per_channel(torch.randn(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8).int_repr(),
    ]


@kind
def small_floats() -> Result:
    x = torch.randn(8, 8)
    return [x.to(torch.float8_e4m3fn).float(), x.to(torch.float8_e5m2).float(), x.bfloat16() @ x.bfloat16()]


class _Named(torch.Tensor):
    """A subclass whose operators are seen by ``__torch_function__``."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(function, "__name__", "?"))
        return super().__torch_function__(function, types, args, kwargs or {})


@kind
def subclass_with_torch_function() -> Result:
    _Named.seen.clear()
    model = make_mlp()
    result = train(
        model, lambda: model(torch.randn(8, 16).as_subclass(_Named)).square().mean().as_subclass(torch.Tensor)
    )
    return [list(_Named.seen), result]


class _Wrapper(torch.Tensor):
    """A wrapper subclass whose operators run on the tensor inside."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, cls) else x

        result = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)


@kind
def wrapper_subclass_with_torch_dispatch() -> Result:
    x = _Wrapper(torch.randn(4, 16))
    weight = _Wrapper(torch.randn(16, 8)).requires_grad_()
    loss = (x @ weight).relu().square().sum()
    loss.backward()
    return [loss.inner, weight.grad.inner]  # type: ignore[attr-defined, union-attr]


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@kind
def user_dispatch_mode() -> Result:
    model = make_mlp()
    with _Counting() as mode:
        result = train(model, lambda: model(torch.randn(8, 16)).square().mean())
    return [mode.names, result]


@kind
def flop_counter() -> Result:
    from torch.utils.flop_counter import FlopCounterMode

    model = make_mlp()
    with FlopCounterMode(display=False) as counter:
        result = train(model, lambda: model(torch.randn(8, 16)).square().mean())
    return [counter.get_total_flops(), result]


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.nn.functional.relu else result


@kind
def user_function_mode() -> Result:
    model = make_mlp()
    with _Doubling():
        return train(model, lambda: model(torch.randn(8, 16)).square().mean())


@kind
def default_device_and_dtype() -> Result:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("cpu")
    try:
        model = make_mlp()
        return train(model, lambda: model(torch.randn(8, 16)).square().mean())
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@kind
def memory_shared_with_numpy() -> Result:
    array = np.arange(64, dtype=np.float32)
    tensor = torch.from_numpy(array)
    tensor.mul_(2)
    array += 1
    view = tensor.numpy()
    view[0] = 7
    return [tensor, float(array.sum()), torch.frombuffer(bytearray(b"12345678"), dtype=torch.int32)]


@kind
def mapped_files() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "array.bin"
        mapped = np.memmap(path, dtype=np.float32, mode="w+", shape=(32, 16))
        mapped[:] = 1.5
        model = make_mlp()
        x = torch.from_numpy(mapped[:8])
        result = train(model, lambda: model(x).square().mean())
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        loaded = torch.load(Path(folder) / "model.pt", mmap=True, weights_only=True)
        return result + [value.clone() for value in loaded.values()]


@kind
def memory_in_shared_segments() -> Result:
    tensor = torch.zeros(16).share_memory_()
    tensor += 1
    return [tensor.clone(), tensor.is_shared()]


@kind
def storages_resized_and_swapped() -> Result:
    tensor = torch.arange(8.0)
    tensor.untyped_storage().resize_(64 * 4)
    tensor.set_(tensor.untyped_storage(), 0, (16,), (1,))  # type: ignore[call-overload]
    tensor[8:] = 1
    other = torch.zeros(3)
    other.data = tensor[:5].clone()
    return [tensor.clone(), other]


@kind
def tensors_exchanged_by_dlpack() -> Result:
    tensor = torch.arange(6.0)
    other = torch.from_dlpack(np.arange(4.0))
    return [torch.from_dlpack(tensor) * 2, other + 1]


@kind
def parameters_flattened_into_vectors() -> Result:
    model = make_mlp()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())
    return state(model)
