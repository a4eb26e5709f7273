"""Uses of autograd: custom functions, hooks, checkpointing, higher derivatives, torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, state, train


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class _Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos()


@kind
def custom_function() -> Result:
    model = make_mlp()
    return train(model, lambda: _Cube.apply(model(torch.randn(8, 16))).mean())


@kind
def custom_function_under_vmap_and_grad() -> Result:
    return torch.func.vmap(torch.func.grad(lambda x: _Sine.apply(x).sum()))(torch.randn(4, 5))


@kind
def tensor_and_module_hooks() -> Result:
    model, seen = make_mlp(), []
    model[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    model[0].register_forward_hook(lambda _, inputs, output: output + 1)
    model[2].register_full_backward_hook(lambda _, grad_in, grad_out: seen.append(grad_out[0].sum()))
    model[2].weight.register_hook(lambda gradient: gradient * 0.5)
    return [train(model, lambda: model(torch.randn(8, 16)).square().mean()), seen]


@kind
def optimizer_step_in_backward() -> Result:
    model = make_mlp()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
    return state(model)


@kind
def saved_tensors_on_cpu() -> Result:
    model = make_mlp()

    def loss() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(torch.randn(8, 16)).square().mean()

    return train(model, loss)


@kind
def saved_tensors_packed_as_half() -> Result:
    model = make_mlp()

    def loss() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
            return model(torch.randn(8, 16)).square().mean()

    return train(model, loss)


def _checkpointed(**options: Any) -> Result:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)))

    def loss() -> torch.Tensor:
        x = torch.randn(8, 16, requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, **options)
        return x.square().mean()

    return train(model, loss)


@kind
def checkpoint_reentrant() -> Result:
    return _checkpointed(use_reentrant=True)


@kind
def checkpoint_non_reentrant() -> Result:
    return _checkpointed(use_reentrant=False)


@kind
def checkpoint_selective() -> Result:
    def policy(_: object, function: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_matmul = function is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE

    return _checkpointed(use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))


@kind
def gradient_penalty_by_double_backward() -> Result:
    critic = make_mlp()

    def loss() -> torch.Tensor:
        x = torch.randn(8, 16, requires_grad=True)
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    return train(critic, loss)


@kind
def forward_mode() -> Result:
    import torch.autograd.forward_ad as forward_ad

    model = make_mlp()
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(torch.randn(8, 16), torch.randn(8, 16)))
        return list(forward_ad.unpack_dual(output))


@kind
def anomaly_mode() -> Result:
    model = make_mlp()

    def loss() -> torch.Tensor:
        with torch.autograd.detect_anomaly(check_nan=True):
            return model(torch.randn(8, 16)).square().mean()

    return train(model, loss)


@kind
def gradient_check() -> Result:
    return torch.autograd.gradcheck(_Cube.apply, torch.randn(3, 4, dtype=torch.float64, requires_grad=True))


@kind
def jacobian_and_hessian() -> Result:
    x = torch.randn(5)
    return [
        torch.func.jacrev(torch.sin)(x),
        torch.func.jacfwd(torch.cos)(x),
        torch.func.hessian(lambda y: (y**3).sum())(x),
    ]


@kind
def per_sample_gradients() -> Result:
    model = make_mlp()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(6, 16))


@kind
def ensemble_by_vmap() -> Result:
    models = [make_mlp() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = make_mlp().to("meta")

    def call(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    return torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, torch.randn(4, 16))


@kind
def linearized_function() -> Result:
    output, jvp = torch.func.linearize(torch.tanh, torch.randn(4))
    return [output, jvp(torch.ones(4)), jvp(torch.arange(4.0))]


@kind
def model_agnostic_meta_learning() -> Result:
    model = make_mlp()

    def loss_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (torch.randn(8, 16),)).square().mean()

    def loss() -> torch.Tensor:
        fast = dict(model.named_parameters())
        for _ in range(2):
            gradients = torch.autograd.grad(loss_of(fast), list(fast.values()), create_graph=True)
            fast = {name: value - 0.1 * g for (name, value), g in zip(fast.items(), gradients, strict=True)}
        return loss_of(fast)

    return train(model, loss)


@kind
def backward_of_several_losses_with_retained_graph() -> Result:
    model = make_mlp()
    hidden = model[0](torch.randn(8, 16))
    for scale in (1.0, 2.0, 3.0):
        (hidden * scale).square().mean().backward(retain_graph=scale < 3)
    return [parameter.grad for parameter in model[0].parameters()]


@kind
def multithreaded_backward() -> Result:
    from concurrent.futures import ThreadPoolExecutor

    models = [make_mlp() for _ in range(3)]
    inputs = [torch.randn(8, 16) for _ in models]

    def run(job: tuple[nn.Module, torch.Tensor]) -> list[torch.Tensor | None]:
        model, x = job
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, zip(models, inputs, strict=True)))


@kind
def inference_mode_then_training() -> Result:
    model = make_mlp()
    with torch.inference_mode():
        before = model(torch.ones(2, 16)).clone()
    return [before.sum().item(), train(model, lambda: model(torch.randn(8, 16)).square().mean())]


def _grad_of(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    x = torch.randn(6, requires_grad=True)
    function(x).sum().backward()
    return x.grad


@kind
def views_and_in_place_operators() -> Result:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.view(2, 3)[:, 1].mul_(2)
        y.as_strided((3,), (2,)).add_(1)
        return y.unfold(0, 2, 1).relu_()

    return _grad_of(function)
