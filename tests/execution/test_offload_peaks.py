"""The peak of an offload that is applied: at most the predicted one, whatever the speed of the copies."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrace
from memtrace import Plan, Trace
from memtrace.analysis.bandwidth import bandwidths_from_rates
from memtrace.analysis.peak import requested_bytes
from memtrace.execution import host_memory
from memtrace.planning.offload import plan_offload
from memtrace.planning.recorded_step import choose_step
from tests.programs.planned import PROGRAMS, train


class _LateFuture(Future[Any]):
    """The result of a call that is made when somebody waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call: Callable[[], Any] | None = call

    def result(self, timeout: float | None = None) -> Any:
        call, self._call = self._call, None
        if call is not None:
            self.set_result(call())
        return super().result(timeout)


class LateCopies(Executor):
    """Copies that take as long as the program lets them: until it waits for one."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _LateFuture(lambda: fn(*args, **kwargs))


class ImmediateCopies(Executor):
    """Copies that take no time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def record(path: Path, index: int, plan: Plan | None = None) -> tuple[Trace, list[torch.Tensor]]:
    gc.collect()  # tensors of earlier programs would count as memory of this one
    training = PROGRAMS[index].small(4)
    with memtrace.record(path, model=training.model):
        if plan is None:
            return_value = train(training)
        else:
            with memtrace.apply(plan, training.model, training.optimizer):
                return_value = train(training)
    return memtrace.load(path), return_value


def peak_above_start(trace: Trace) -> int:
    """Both runs share the process, with tensors of other tests and of each other."""
    return choose_step(trace, "cpu").cost.peak_bytes - requested_bytes(trace, "cpu").start


@pytest.mark.parametrize("gb_per_s", [0.01, 100])
@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.name for program in PROGRAMS])
def test_the_peak_is_the_predicted_one_however_long_copies_take(
    tmp_path: Path, index: int, gb_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, expected = record(tmp_path / "before", index)
    bandwidths = bandwidths_from_rates(gb_per_s, gb_per_s)
    plan = plan_offload(before, device="cpu", bandwidths=bandwidths, min_bytes=4096)
    start = requested_bytes(before, "cpu").start
    assert plan.predicted.peak_bytes < plan.recorded.peak_bytes
    for copies in (LateCopies, ImmediateCopies):
        monkeypatch.setattr(host_memory, "_copy_thread", copies)
        after, losses = record(tmp_path / copies.__name__, index, plan)
        assert [loss.item().hex() for loss in losses] == [loss.item().hex() for loss in expected]
        assert peak_above_start(after) <= 1.03 * (plan.predicted.peak_bytes - start), copies.__name__
