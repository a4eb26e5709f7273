"""Plans that spill a model: cuts, predicted peaks and step times."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memtrace
from memtrace import MemtraceError, Plan, Trace
from memtrace.analysis.bandwidth import bandwidths_from_rates
from memtrace.analysis.peak import requested_bytes
from memtrace.pipeline.costs import LayerCosts
from memtrace.planning import plan_spill, read_plan, write_plan
from memtrace.planning.actions import Spill
from memtrace.planning.recorded_step import choose_step
from memtrace.planning.shards import SpilledModel, cut_shards
from memtrace.planning.spill_times import peak_bytes, step_seconds
from tests.builders import with_manifest
from tests.programs.planned import Training, gpt, train

FAST = bandwidths_from_rates(10, 10)
SIZES = st.integers(0, 1000)


@st.composite
def spilled_models(draw: st.DrawFn) -> SpilledModel:
    def layer(number: int) -> LayerCosts:
        return LayerCosts(
            name=str(number),
            forward_s=draw(st.sampled_from([0.0, 0.1, 1.0])),
            backward_s=draw(st.sampled_from([0.0, 0.2, 2.0])),
            parameter_bytes=draw(SIZES),
            gradient_bytes=draw(SIZES),
            optimizer_bytes=draw(SIZES),
            activation_bytes=draw(SIZES),
            output_bytes=draw(SIZES),
            forward_temporary_bytes=draw(SIZES),
            backward_temporary_bytes=draw(SIZES),
            largest_optimizer_temporary_bytes=draw(SIZES),
        )

    layers = tuple(layer(number) for number in range(draw(st.integers(1, 8))))
    return SpilledModel(layers, draw(SIZES), draw(st.floats(0, 1)), draw(st.booleans()))


@given(spilled_models(), st.integers(1, 20_000))
def test_shards_are_the_longest_prefixes_that_fit(model: SpilledModel, capacity: int) -> None:
    alone = [model.make_shard(place, place + 1).peak_bytes for place in range(len(model.layers))]
    try:
        shards = cut_shards(model, capacity)
    except MemtraceError as error:
        assert max(alone) > capacity
        assert f"the layer {next(place for place, peak in enumerate(alone) if peak > capacity)} " in str(error)
        return
    assert [name for shard in shards for name in shard.layers] == [layer.name for layer in model.layers]
    ends = list(accumulate(len(shard.layers) for shard in shards))
    for shard, end in zip(shards, ends, strict=True):
        assert shard.peak_bytes <= capacity
        if end < len(model.layers):
            longer = model.make_shard(end - len(shard.layers), end + 1)
            assert longer.peak_bytes > capacity, "one more layer would have fitted"


@given(spilled_models(), st.integers(0, 5000))
def test_a_plan_fits_its_budget_and_a_buffer_never_makes_it_slower(model: SpilledModel, buffer_bytes: int) -> None:
    capacity = max(model.make_shard(place, place + 1).peak_bytes for place in range(len(model.layers)))
    shards = cut_shards(model, capacity)
    assert peak_bytes(shards, buffer_bytes) <= capacity + buffer_bytes
    buffered, unbuffered = step_seconds(shards, FAST, buffer_bytes), step_seconds(shards, FAST, 0)
    assert buffered <= unbuffered + 1e-12
    computed = sum(shard.forward_s + shard.backward_s + shard.update_s for shard in shards)
    assert buffered >= computed - 1e-9


def test_step_time_is_copies_and_computation_without_a_buffer_and_the_longer_of_both_with_one() -> None:
    def layer(name: str) -> LayerCosts:
        return LayerCosts(
            name=name,
            forward_s=1.0,
            backward_s=1.0,
            parameter_bytes=10**9,
            gradient_bytes=10**9,
            optimizer_bytes=0,
            activation_bytes=0,
            output_bytes=0,
        )

    model = SpilledModel((layer("a"), layer("b"), layer("c")), 0, 3.0, recompute=True)
    shards = tuple(model.make_shard(place, place + 1) for place in range(3))
    rates = bandwidths_from_rates(2, 2)
    # A shard's parameters are copied in 0.5 s. Forward 3 * (0.5 + 1); backward 3 * (2 + 0.5), two loads of 0.5 as the
    # last shard is still there; update 3 * (1 + 1 + 0.5) for parameters and gradients, and parameters back.
    assert step_seconds(shards, rates, 0) == pytest.approx(4.5 + 7.5 + 1.0 + 7.5)
    # The copies at the ends of the three passes remain: one load of 0.5 s, one gradient, one load of 1 s and one store.
    # While the second shard is updated, the first is stored and then the third is loaded, which takes 0.5 s longer.
    assert step_seconds(shards, rates, 1 << 40) == pytest.approx(3.5 + 6.5 + 1.0 + 1.0 + 1.5 + 1.0 + 0.5)


def record(case: Training, path: Path) -> Trace:
    with memtrace.record(path, model=case.model, optimizer=case.optimizer):
        train(case)
    return memtrace.load(path)


def small_gpt() -> Training:
    return gpt(6, width=64, layers=6, heads=4, length=16, vocabulary=64, batch=2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    torch.set_num_threads(1)
    return record(small_gpt(), tmp_path_factory.mktemp("spill") / "run.memtrace")


@pytest.fixture(scope="module")
def resident(trace: Trace) -> int:
    """What is never spilled: the batches, and whatever else this process holds."""
    return plan_spill(trace, budget_bytes=1 << 40).resident_bytes


ROOM = 1600 << 10
"""Budget beside what is never spilled."""


def test_the_plan_describes_the_recorded_model(trace: Trace, resident: int, tmp_path: Path) -> None:
    budget = resident + ROOM
    result = plan_spill(trace, budget_bytes=budget, buffer_bytes=100_000, bandwidths=FAST)
    parameters = sum(p.nbytes for p in small_gpt().model.parameters())
    assert sum(shard.parameter_bytes for shard in result.shards) == parameters
    assert result.state_bytes == pytest.approx(4 * parameters, rel=0.01)
    assert result.plan.predicted.peak_bytes <= budget < result.plan.recorded.peak_bytes
    assert result.plan.predicted.step_ns is not None and result.unbuffered_step_ns is not None
    assert result.plan.predicted.step_ns <= result.unbuffered_step_ns
    action = result.plan.actions[0]
    assert isinstance(action, Spill)
    names = [name for shard in action.shards for name in shard]
    assert names == ["tokens", "positions", *(f"blocks.{number}" for number in range(6)), "norm", "head"]
    write_plan(result.plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == result.plan


@pytest.mark.parametrize("buffer_bytes", [0, 200_000])
def test_the_measured_peak_is_that_of_the_plan(trace: Trace, resident: int, tmp_path: Path, buffer_bytes: int) -> None:
    result = plan_spill(trace, budget_bytes=resident + ROOM, buffer_bytes=buffer_bytes, bandwidths=FAST)
    plain, spilled = small_gpt(), small_gpt()
    torch.manual_seed(1)
    expected = train(plain)
    del plain
    torch.manual_seed(1)
    with memtrace.apply(result.plan, spilled.model, spilled.optimizer):
        assert all(map(torch.equal, train(spilled), expected))
        measured = choose_step(record(spilled, tmp_path / "after.memtrace"), "cpu").cost.peak_bytes
        at_start = memory_at_start(spilled, tmp_path / "before.memtrace")
    # Both recordings see what else the process holds, which differs between them.
    predicted = result.plan.predicted.peak_bytes - resident
    assert 0.85 * predicted <= measured - at_start <= ROOM


def memory_at_start(case: Training, path: Path) -> int:
    """Bytes on the device of a process whose model is in host memory."""
    with memtrace.record(path, model=case.model, optimizer=case.optimizer):
        torch.zeros(1)
    return requested_bytes(memtrace.load(path), "cpu").start


def test_a_layer_that_does_not_fit_is_an_error_with_the_way_out(trace: Trace, resident: int) -> None:
    with pytest.raises(MemtraceError, match=r"the layer tokens alone needs .* Raise the budget"):
        plan_spill(trace, budget_bytes=resident + 10_000, buffer_bytes=0)
    with pytest.raises(MemtraceError, match="leaves nothing of the budget"):
        plan_spill(trace, budget_bytes=ROOM, buffer_bytes=ROOM)


def test_without_times_no_step_time_is_claimed(trace: Trace, resident: int) -> None:
    budget = resident + ROOM
    coverage = replace(trace.manifest.coverage, has_times=False)
    result = plan_spill(with_manifest(trace, coverage=coverage), budget_bytes=budget)
    assert result.plan.predicted.step_ns is None and result.unbuffered_step_ns is None
    assert result.buffer_bytes == int(0.05 * budget)
    assert any("no times" in note for note in result.plan.assumptions)


def test_smaller_layers_fit_smaller_budgets(trace: Trace, resident: int) -> None:
    budget = resident + (700 << 10)
    patterns = ("tokens", "positions", "blocks.*.*", "norm", "head")
    fine = plan_spill(trace, budget_bytes=budget, buffer_bytes=0, layers=patterns)
    with pytest.raises(MemtraceError, match="alone needs"):
        plan_spill(trace, budget_bytes=budget, buffer_bytes=0)
    assert isinstance(fine.plan, Plan)
    assert "blocks.0.attention" in fine.shards[1].layers + fine.shards[0].layers + fine.shards[2].layers


class Twice(nn.Module):
    """Not a training program: it has no backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_trace_without_training_is_an_error(tmp_path: Path) -> None:
    model = Twice()
    with memtrace.record(tmp_path / "run.memtrace", model=model) as recording:
        for _ in range(3):
            model(torch.zeros(10))
            recording.step()
    with pytest.raises(MemtraceError, match="no step has module calls and a backward"):
        plan_spill(memtrace.load(tmp_path / "run.memtrace"), budget_bytes=1000)
