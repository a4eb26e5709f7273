"""Features of Python around training: threads, coroutines, generators, tracing, signals, forks."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Generator

import torch
from torch import nn

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, state, train


def _loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(8, 16)).square().mean()
    return loss


@kind
def coroutines() -> Result:
    async def run(model: nn.Module) -> list[torch.Tensor]:
        losses = []
        for _ in range(3):
            losses.append(train(model, lambda: _loss_of(model), num_steps=1)[0])
            await asyncio.sleep(0)
        return losses

    async def main() -> list[list[torch.Tensor]]:
        return await asyncio.gather(*(run(make_mlp()) for _ in range(3)))

    return asyncio.run(main())


@kind
def generators() -> Result:
    def steps(model: nn.Module) -> Generator[torch.Tensor, float, None]:
        rate = 0.1
        while True:
            loss = _loss_of(model)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= rate * gradient
            rate = yield loss.detach()

    model = make_mlp()
    loop = steps(model)
    return [next(loop), [loop.send(rate) for rate in (0.05, 0.02, 0.01)], state(model)]


@kind
def models_trained_by_threads() -> Result:
    results: dict[int, list[torch.Tensor]] = {}

    def run(number: int, model: nn.Module) -> None:
        results[number] = train(model, lambda: _loss_of(model))

    threads = [threading.Thread(target=run, args=(number, make_mlp())) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(4)]


@kind
def threads_that_share_a_model() -> Result:
    """Hogwild, one thread after another: the order of lock-free updates would not be repeatable."""
    model = make_mlp().share_memory()
    for _ in range(3):
        thread = threading.Thread(target=train, args=(model, lambda: _loss_of(model)))
        thread.start()
        thread.join()
    return state(model)


@kind
def traced_and_profiled_by_python() -> Result:
    calls = []

    def trace(frame: object, event: str, argument: object) -> None:
        if frame.f_code.co_name == "_loss_of":  # type: ignore[attr-defined]
            calls.append(event)

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        model = make_mlp()
        result = train(model, lambda: _loss_of(model))
    finally:
        sys.setprofile(before)
    return [calls, result]


@kind
def torch_profiler_at_the_same_time() -> Result:
    model = make_mlp()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        result = train(model, lambda: _loss_of(model))
    names = {event.key for event in profiler.key_averages()}
    return ["aten::addmm" in names, result]


@kind
def weak_references_and_finalisers() -> Result:
    dead: list[int] = []
    for number in range(3):
        model = make_mlp()
        weakref.finalize(model, dead.append, number)
        reference = weakref.ref(model)
        _loss_of(model).backward()
        del model
        dead.append(100 + (reference() is None))
    return dead


@kind
def tensors_die_when_they_did() -> Result:
    """A recording must not keep tensors alive."""
    alive = []
    for _ in range(3):
        x = torch.randn(8, 16, requires_grad=True)
        hidden = x.relu()
        reference = weakref.ref(hidden)
        loss = hidden.sum()
        del hidden
        loss.backward()
        del loss, x
        alive.append(reference() is not None)
    return alive


@kind
def storms_of_garbage_collection() -> Result:
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        model = make_mlp()
        return train(model, lambda: _loss_of(model), num_steps=2)
    finally:
        gc.set_threshold(*thresholds)


@kind
def signal_handlers() -> Result:
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        model = make_mlp()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            _loss_of(model).backward()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return [len(received), [parameter.grad for parameter in model.parameters()]]


@kind
def forked_children() -> Result:
    reader, writer = os.pipe()
    for number in range(3):
        child = os.fork()
        if child == 0:
            os.write(writer, bytes([number + int(torch.ones(3).sum())]))
            os._exit(0)
        os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        return [stream.read(), _loss_of(make_mlp())]


def _square(number: int) -> float:
    return float(torch.full((2,), float(number)).square().sum())


@kind
def pool_of_processes() -> Result:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(_square, range(4))


@kind
def exceptions_through_modules() -> Result:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("inside forward")

    model = nn.Sequential(nn.Linear(16, 16), Failing())
    messages = []
    for _ in range(3):
        try:
            model(torch.ones(2, 16))
        except KeyError as error:  # noqa: PERF203 -- each step fails
            messages.append(str(error))
    return [messages, train(good := make_mlp(), lambda: _loss_of(good))]


@kind
def deep_recursion() -> Result:
    def descend(x: torch.Tensor, depth: int) -> torch.Tensor:
        return x if depth == 0 else descend(x + 1, depth - 1)

    try:
        descend(torch.zeros(1), 10 * sys.getrecursionlimit())
    except RecursionError:
        return descend(torch.zeros(1), 200)
    return "no recursion limit"


@kind
def random_generators() -> Result:
    import random

    import numpy as np

    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 -- programs use the global generator
    generator = torch.Generator().manual_seed(3)
    return [
        torch.rand(3),
        random.random(),
        float(np.random.rand()),  # noqa: NPY002
        torch.rand(2, generator=generator),
        torch.get_rng_state().sum(),
    ]
