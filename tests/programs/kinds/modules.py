"""Unusual modules: lazy, parametrised, pruned, quantised, growing, and with Python methods of their own."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, state, train


def _loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, 16)).square().mean()
    return loss


@kind
def lazy_modules() -> Result:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    model(torch.ones(4, 16))
    return train(model, lambda: _loss_of(model))


@kind
def weight_normalisation() -> Result:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 8)), nn.ReLU())
    return train(model, lambda: _loss_of(model))


@kind
def spectral_normalisation() -> Result:
    model = parametrizations.spectral_norm(nn.Linear(16, 8))
    return train(model, lambda: _loss_of(model))


@kind
def orthogonal_parametrisation() -> Result:
    model = parametrizations.orthogonal(nn.Linear(16, 16))
    return train(model, lambda: _loss_of(model))


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@kind
def parametrisation_cached() -> Result:
    model = nn.Linear(16, 16)
    parametrize.register_parametrization(model, "weight", _Symmetric())

    def loss() -> torch.Tensor:
        with parametrize.cached():
            return _loss_of(model) + _loss_of(model)

    return train(model, loss)


@kind
def pruning() -> Result:
    model = make_mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    prune.global_unstructured([(model[2], "weight")], pruning_method=prune.L1Unstructured, amount=0.3)
    result = train(model, lambda: _loss_of(model))
    prune.remove(model[0], "weight")
    return [result, state(model)]


@kind
def quantisation_aware_training() -> Result:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    quantize = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    model = nn.Sequential(quantize, nn.Linear(16, 8), FakeQuantize(), nn.ReLU())
    return train(model, lambda: _loss_of(model))


@kind
def dynamic_quantisation() -> Result:
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantize_dynamic(make_mlp(), {nn.Linear})
        return model(torch.randn(8, 16))


@kind
def parameter_lists_and_dictionaries() -> Result:
    class Polynomial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.terms = nn.ParameterList(torch.randn(16) for _ in range(3))
            self.scales = nn.ParameterDict({"odd": torch.ones(1), "even": torch.ones(1)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(self.scales["odd" if n % 2 else "even"] * term * x**n for n, term in enumerate(self.terms))  # type: ignore[return-value]

    model = Polynomial()
    return train(model, lambda: _loss_of(model))


@kind
def growing_model() -> Result:
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        layer = nn.Linear(16, 16)
        model.append(layer)
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.01})
        _loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model[1]
    return state(model)


@kind
def shared_and_frozen_parameters() -> Result:
    embedding, head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
    head.weight = embedding.weight
    middle = nn.Linear(16, 16).requires_grad_(False)
    model = nn.Sequential(embedding, middle, head)
    return train(model, lambda: model(torch.randint(10, (4,))).square().mean())


class _Hostile(nn.Module):
    """Its Python protocol methods have side effects or fail: nothing but the program itself may call them."""

    calls: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def __len__(self) -> NoReturn:
        self.calls.append("len")
        raise RuntimeError("no length")

    def __bool__(self) -> NoReturn:
        self.calls.append("bool")
        raise RuntimeError("no truth value")

    def __eq__(self, other: object) -> NoReturn:
        self.calls.append("eq")
        raise RuntimeError("no equality")

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[int]:
        self.calls.append("iter")
        while True:
            yield 0

    def __repr__(self) -> NoReturn:
        self.calls.append("repr")
        raise RuntimeError("no representation")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.calls.append("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_memtrace") or name in ("__len__", "training_state"):
            self.calls.append(name)
        return super().__getattr__(name)


@kind
def module_with_hostile_methods() -> Result:
    _Hostile.calls.clear()
    model = _Hostile()
    optimizer = torch.optim.SGD(list(model.layer.parameters()), lr=0.1)
    for _ in range(3):
        _loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [list(_Hostile.calls), state(model.layer)]


@kind
def module_called_before_its_init() -> Result:
    class Early(nn.Module):
        def __init__(self) -> None:
            self.early = self.forward(torch.ones(2))
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if "_modules" in self.__dict__ and "layer" in self._modules else x * 2

    model = Early()
    return [model.early, train(model, lambda: _loss_of(model))]


@kind
def patched_module_call() -> Result:
    original, seen = nn.Module.__call__, []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(self).__name__)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        model = make_mlp()
        result = train(model, lambda: _loss_of(model))
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
    return [seen, result, nn.Module.__call__ is original]


@kind
def copied_and_pickled_models() -> Result:
    model = make_mlp()
    first = train(model, lambda: _loss_of(model))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    stream = io.BytesIO()
    torch.save(twin.state_dict(), stream)
    stream.seek(0)
    twin.load_state_dict(torch.load(stream, weights_only=True))
    return [first, train(twin, lambda: _loss_of(twin))]


@kind
def meta_device_then_materialised() -> Result:
    with torch.device("meta"):
        model = make_mlp()
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return train(model, lambda: _loss_of(model))


@kind
def module_replaced_during_training() -> Result:
    model = make_mlp()
    results = []
    for activation in (nn.ReLU(), nn.GELU(), nn.Tanh()):
        model[1] = activation
        results.append(train(model, lambda: _loss_of(model), num_steps=1))
    return results


@kind
def modules_in_reference_cycles() -> Result:
    import gc

    results = []
    for _ in range(5):
        model = make_mlp()
        object.__setattr__(model, "myself", model)
        results.append(_loss_of(model).detach())
        del model
        gc.collect()
    return results


@kind
def warnings_of_the_program() -> Result:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make_mlp()
        for _ in range(3):
            warnings.warn("the program's own warning", stacklevel=1)
            _loss_of(model).backward()
    return [str(warning.message) for warning in caught]
