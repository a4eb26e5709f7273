"""``plan auto``: mixes of changes, against recordings of programs that make them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memtrace
from memtrace import Plan, Trace
from memtrace.analysis.bandwidth import bandwidths_from_rates
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.coverage import compute_coverage
from memtrace.planning import plan_auto
from memtrace.planning.auto_autocast import autocast_options
from memtrace.planning.auto_changes import OPTIMIZER_IN_BACKWARD, optimizer_in_backward, shard_optimizer_state
from memtrace.planning.offload import MIN_OFFLOAD_BYTES
from memtrace.planning.offload_candidates import find_step_saves
from memtrace.planning.offload_problem import build_problem
from memtrace.planning.offload_search import least_peak_bytes
from memtrace.planning.pareto import pareto_front
from memtrace.planning.recompute import make_actions, recompute_options
from memtrace.planning.recompute_offload import JointPlanner
from memtrace.planning.recompute_solver import minimize_peak
from memtrace.planning.recorded_step import choose_step
from tests.programs.changed import unused_baseline_bytes
from tests.programs.planned import PROGRAMS, Batch, train

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
    gc.collect()  # what other tests have left counts as live
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
    older = compute_coverage(gpt).baseline_bytes  # tensors of other tests too, which no plan can free
    assert older is not None
    capacity = older + int((recorded.peak_bytes - older) * 0.7)
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


BANDWIDTHS = bandwidths_from_rates(2.0, 2.0)


def test_recomputation_with_offloads_is_at_least_as_good_as_either(gpt: Trace) -> None:
    options = {
        name: plan_auto(gpt, only_applicable=True, bandwidths=bandwidths).front
        for name, bandwidths in (("joint", BANDWIDTHS), ("recompute", None))
    }
    step = choose_step(gpt, "cpu")
    alone = least_peak_bytes(
        build_problem(gpt, "cpu", step, find_step_saves(gpt, "cpu", step, min_bytes=MIN_OFFLOAD_BYTES))
    )
    assert options["joint"][0].peak_bytes <= min(options["recompute"][0].peak_bytes, alone)
    for other in options["recompute"]:
        assert any(
            option.peak_bytes <= other.peak_bytes and (option.step_ns or 0) <= (other.step_ns or 0)
            for option in options["joint"]
        )


def test_nothing_recomputed_is_the_problem_of_offloads_alone(gpt: Trace) -> None:
    step, found = recompute_options(gpt, "cpu")
    nothing = np.zeros(found.model.num_options, bool)
    joint = JointPlanner(gpt, "cpu", step, found, BANDWIDTHS)
    _, problem = joint.problem(found.model.replay(nothing), nothing)
    alone = build_problem(gpt, "cpu", step, find_step_saves(gpt, "cpu", step, min_bytes=joint.min_bytes))
    for name in ("size", "group", "node", "ready", "free", "back", "piece_ns", "piece_node"):
        assert np.array_equal(getattr(problem, name), getattr(alone, name)), name
    assert problem.piece_bytes.max() == alone.piece_bytes.max() == step.cost.peak_bytes


def test_half_precision_is_considered_where_the_user_allows_it(gpt: Trace, tmp_path: Path) -> None:
    result = plan_auto(gpt, autocast_to="bfloat16")
    halved = [option for option in result.front if "autocast to bfloat16" in option.changes]
    assert halved and all(option.step_ns is None for option in halved)
    assert halved[0].peak_bytes < min(option.peak_bytes for option in result.front if option not in halved)
    assert any("Losses change" in change.note for change in result.changes)
    assert not any("autocast" in name for option in plan_auto(gpt).front for name in option.changes)
    assert plan_auto(gpt, autocast_to="bfloat16", capacity_bytes=1 << 40).changes == ()


@pytest.mark.parametrize("recomputes", [False, True])
def test_half_precision_has_about_the_predicted_peak(gpt: Trace, tmp_path: Path, recomputes: bool) -> None:
    step = choose_step(gpt, "cpu")
    found, change = autocast_options(gpt, step, "cpu", "bfloat16")
    model = found.model.with_fixed_changes(change.positions, change.bytes)
    chosen = minimize_peak(model).chosen if recomputes else np.zeros(model.num_options, bool)
    predicted = model.replay(chosen).peak_bytes
    assert predicted < step.cost.peak_bytes
    actions = make_actions([found.options[number] for number in np.flatnonzero(chosen).tolist()])
    training = PROGRAMS[2].small(4)
    loss = training.loss

    def half(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    gc.collect()
    with (
        memtrace.apply(Plan("cpu", actions, step.cost, step.cost), training.model, training.optimizer),
        memtrace.record(tmp_path / "half.memtrace", model=training.model, optimizer=training.optimizer),
    ):
        train(replace(training, loss=half))
    second = memtrace.load(tmp_path / "half.memtrace")
    measured = choose_step(second, "cpu").cost.peak_bytes - unused_baseline_bytes(second)
    predicted -= unused_baseline_bytes(gpt)
    assert abs(predicted / measured - 1) < 0.05


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_pareto_front_equals_brute_force(points: list[tuple[int, int]]) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one[0] <= other[0] and one[1] <= other[1] and one != other

    expected = sorted({point for point in points if not any(beats(other, point) for other in points)})
    assert pareto_front(points, lambda point: point) == expected
