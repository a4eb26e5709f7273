"""``plan auto``: mixes of changes, against recordings of programs that make them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memtrace
from memtrace import Plan, Trace
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.planning import plan_auto
from memtrace.planning.actions import Offload, OffloadedTensor
from memtrace.planning.auto_changes import OPTIMIZER_IN_BACKWARD, optimizer_in_backward, shard_optimizer_state
from memtrace.planning.pareto import pareto_front
from memtrace.planning.plan import StepCost
from memtrace.planning.recompute import recompute_options
from memtrace.planning.recorded_step import choose_step
from tests.programs.planned import PROGRAMS, train

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}


def record_wide_model(path: Path, make_optimizer: Optimizer, *, in_backward: bool) -> tuple[Trace, list[float], int]:
    """Train a model whose gradients outweigh its activations; return the trace, the losses, and the peak's rise.

    Args:
        path: Where to record.
        make_optimizer: Makes the optimizer of a list of parameters.
        in_backward: Whether to run the lines that the plan tells the user to paste.
    """
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)))
        optimizer = make_optimizer(list(model.parameters()))
        names = {"torch": torch, "model": model, "make_optimizer": make_optimizer}
        if in_backward:
            exec(OPTIMIZER_IN_BACKWARD.replace("torch.optim.AdamW(", "make_optimizer("), names)
        losses = []
        with memtrace.record(path, model=model):
            for _ in range(4):
                loss = model(torch.ones(8, 128)).square().mean()
                loss.backward()
                if not in_backward:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(float(loss.detach()))
                del loss
        trace = memtrace.load(path)
        table = blocks(trace)
        return trace, losses, int(table.size[table.category == CATEGORY["parameter"]].sum())
    finally:
        gc.enable()
        for parameter in model.parameters():  # hooks that hold their parameter are never collected
            (parameter._post_accumulate_grad_hooks or {}).clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_in_backward_reaches_the_predicted_peak(name: str, tmp_path: Path) -> None:
    before, losses, _ = record_wide_model(tmp_path / "before.memtrace", OPTIMIZERS[name], in_backward=False)
    after, other_losses, _ = record_wide_model(tmp_path / "after.memtrace", OPTIMIZERS[name], in_backward=True)
    step, found = recompute_options(before, "cpu")
    change = optimizer_in_backward(before, step, "cpu")
    assert change is not None
    predicted = found.model.with_fixed_changes(change.positions, change.bytes).replay([]).peak_bytes
    measured = choose_step(after, "cpu").cost.peak_bytes
    assert measured < step.cost.peak_bytes
    assert predicted == pytest.approx(measured, rel=0.03)
    assert losses == other_losses


def test_gradient_accumulation_excludes_the_optimizer_in_backward(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters())
    with memtrace.record(tmp_path / "run.memtrace", model=model):
        for _ in range(4):
            for _ in range(2):
                model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert optimizer_in_backward(trace, choose_step(trace, "cpu"), "cpu") is None


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A recording of the small GPT."""
    path = tmp_path_factory.mktemp("auto") / "gpt.memtrace"
    training = PROGRAMS[2].small(4)
    with memtrace.record(path, model=training.model, optimizer=training.optimizer):
        train(training)
    return memtrace.load(path)


def test_sharding_leaves_one_part_of_the_optimizer_state(gpt: Trace) -> None:
    step, found = recompute_options(gpt, "cpu")
    change = shard_optimizer_state(gpt, step, "cpu", 4, 1e9)
    assert change is not None
    table = blocks(gpt)
    state = table.size[(table.category == CATEGORY["optimizer_state"]) & (table.free_event < 0)]
    saved = step.cost.peak_bytes - found.model.with_fixed_changes(change.positions, change.bytes).replay([]).peak_bytes
    assert saved == sum(int(size) - -(-int(size) // 4) for size in state)
    parameters = int(table.size[table.category == CATEGORY["parameter"]].sum())
    assert change.change.cost_ns == pytest.approx(parameters * 0.75, rel=0.01)
    assert shard_optimizer_state(gpt, step, "cpu", 1, 1e9) is None


def test_the_cheapest_plan_that_fits_is_chosen(gpt: Trace) -> None:
    recorded = choose_step(gpt, "cpu").cost
    capacity = int(recorded.peak_bytes * 0.7)
    result = plan_auto(gpt, capacity_bytes=capacity, num_ranks=2)
    assert result.fits
    assert result.plan.predicted.peak_bytes <= capacity
    fitting = [option for option in result.front if option.fits]
    assert result.plan.predicted.step_ns == min(option.step_ns or 0 for option in fitting)
    peaks = [option.peak_bytes for option in result.front]
    times = [option.step_ns or 0 for option in result.front]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)


def test_changes_of_the_program_come_with_lines_to_paste(gpt: Trace) -> None:
    result = plan_auto(gpt, capacity_bytes=1, num_ranks=8)
    assert result.fits is False
    assert [change.name for change in result.changes] == [
        "optimizer in backward",
        "optimizer state sharded over 8 ranks",
    ]
    assert all("torch." in change.instruction for change in result.changes)
    assert any("memtrace.apply does not carry out" in note for note in result.plan.assumptions)


def test_only_what_memtrace_carries_out(gpt: Trace) -> None:
    result = plan_auto(gpt, num_ranks=8, only_applicable=True)
    assert result.changes == ()
    assert result.fits is None
    assert not any(option.changes for option in result.front)
    assert result.plan.actions


def test_a_plan_without_need_changes_nothing(gpt: Trace) -> None:
    result = plan_auto(gpt, capacity_bytes=1 << 40, num_ranks=8)
    assert result.fits
    assert result.plan.actions == ()
    assert result.changes == ()


def test_plans_of_other_planners_compete(gpt: Trace) -> None:
    recorded = choose_step(gpt, "cpu").cost
    cheaper = StepCost(recorded.peak_bytes // 2, (recorded.step_ns or 0) + 1)
    action = Offload((OffloadedTensor("blocks.0", 0, 1 << 20),), "cpu")
    result = plan_auto(
        gpt,
        capacity_bytes=recorded.peak_bytes * 2 // 3,
        only_applicable=True,
        other_planners=[lambda _: Plan("cpu", (action,), recorded, cheaper)],
    )
    assert result.plan.actions == (action,)
    assert result.plan.predicted == cheaper


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_pareto_front_equals_brute_force(points: list[tuple[int, int]]) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one[0] <= other[0] and one[1] <= other[1] and one != other

    expected = sorted({point for point in points if not any(beats(other, point) for other in points)})
    assert pareto_front(points, lambda point: point) == expected
