"""Compilers and tracers of torch."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, train


def _train_compiled(**options: object) -> Result:
    torch._dynamo.reset()
    model = make_mlp()
    compiled = torch.compile(model, **options)  # type: ignore[call-overload]
    return train(model, lambda: compiled(torch.randn(8, 16)).square().mean())


@kind
def compile_with_eager_backend() -> Result:
    return _train_compiled(backend="eager")


@kind
def compile_with_aot_autograd() -> Result:
    return _train_compiled(backend="aot_eager")


@kind
def compile_with_inductor() -> Result:
    return _train_compiled()


@kind
def compile_with_dynamic_shapes_and_graph_breaks() -> Result:
    torch._dynamo.reset()
    model = make_mlp()

    @torch.compile(backend="aot_eager", dynamic=True)
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if y.sum() > 0:  # the value decides: the graph breaks
            y = y * 2
        return y.square().mean()

    return [train(model, lambda size=size: loss(torch.randn(size, 16)), num_steps=1) for size in (4, 6, 9)]


@kind
def number_of_compilations() -> Result:
    """A recording must not make torch.compile break a graph or compile again."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = make_mlp()
    compiled = torch.compile(model, backend=counter)
    losses = [compiled(torch.randn(8, 16)).square().mean() for _ in range(3)]
    return [counter.frame_count, counter.op_count, losses]


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) > 4:
            x = self.layer(x)
        return torch.relu(x)


@kind
def jit_script() -> Result:
    model = torch.jit.script(_Branching())
    return train(model, lambda: model(torch.randn(8, 16)).square().mean())


@kind
def jit_trace() -> Result:
    model = torch.jit.trace(make_mlp(), torch.ones(8, 16))
    return train(model, lambda: model(torch.randn(8, 16)).square().mean())


@kind
def exported_program() -> Result:
    program = torch.export.export(make_mlp(), (torch.ones(8, 16),))
    model = program.module()
    return [str(program.graph), train(model, lambda: model(torch.randn(8, 16)).square().mean())]


@kind
def exported_program_decomposed() -> Result:
    program = torch.export.export(make_mlp(), (torch.ones(8, 16),)).run_decompositions()
    return [str(program.graph), program.module()(torch.ones(8, 16))]


@kind
def symbolic_trace_and_transform() -> Result:
    model = fx.symbolic_trace(_Residual())
    for node in model.graph.nodes:
        if node.target is operator.add:
            with model.graph.inserting_after(node):
                scaled = model.graph.call_function(torch.mul, (node, 0.5))
            node.replace_all_uses_with(scaled)
            scaled.args = (node, 0.5)
    model.recompile()
    return [model.code, train(model, lambda: model(torch.randn(8, 16)).square().mean())]


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x) + x)


@kind
def make_fx() -> Result:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: (x.sin() * x).sum(), tracing_mode="symbolic")(torch.randn(4))
    return [graph.code, graph(torch.randn(4))]


@kind
def custom_operator() -> Result:
    @torch.library.custom_op("memtrace_kinds::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * factor)

    scaled.register_fake(lambda x, factor: torch.empty_like(x))
    scaled.register_autograd(
        lambda ctx, gradient: (gradient * ctx.factor, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )
    model = make_mlp()
    return train(model, lambda: scaled(model(torch.randn(8, 16)), 1.5).square().mean())


@kind
def fake_tensors() -> Result:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = make_mlp()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        return [str(loss.shape), [str(parameter.grad.shape) for parameter in model.parameters()]]  # type: ignore[union-attr]


@kind
def flex_attention_eager() -> Result:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    query, key, value = (torch.randn(1, 1, 128, 16) for _ in range(3))
    return flex_attention(query, key, value, block_mask=mask)
