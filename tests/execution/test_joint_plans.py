"""Plans that recompute modules and offload tensors: equal losses, and the predicted peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from memtrace.analysis.bandwidth import bandwidths_from_rates
from memtrace.analysis.peak import requested_bytes
from memtrace.execution import host_memory
from memtrace.planning.recompute import make_plan, recompute_options
from memtrace.planning.recompute_offload import JointPlanner
from memtrace.planning.recompute_solver import Choice, minimize_cost, minimize_peak
from tests.execution.test_offload_peaks import ImmediateCopies, LateCopies, peak_above_start, record
from tests.programs.planned import PROGRAMS

BANDWIDTHS = bandwidths_from_rates(2.0, 2.0)
ALWAYS = ("MLP", "GPT")
CASES = [
    pytest.param(index, id=program.name, marks=() if program.name in ALWAYS else pytest.mark.slow)
    for index, program in enumerate(PROGRAMS)
]


@pytest.mark.parametrize("index", CASES)
def test_recomputation_with_offloads_has_the_predicted_peak_and_equal_losses(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, expected = record(tmp_path / "before", index)
    step, found = recompute_options(before, "cpu")
    joint = JointPlanner(before, "cpu", step, found, BANDWIDTHS, min_bytes=4096)
    lowest = minimize_peak(found.model)
    half = minimize_cost(found.model, (lowest.peak_bytes + step.cost.peak_bytes) // 2)
    assert half is not None
    num_mixed = 0
    for number, choice in enumerate((lowest, half)):
        recomputing = make_plan(before, "cpu", step, found, choice, None).plan
        for plan in joint.plans(found.model, choice.chosen, recomputing, []):
            num_mixed += 1
            assert [action.kind for action in plan.actions][-1] == "offload" and len(plan.actions) > 1
            assert plan.predicted.peak_bytes < choice.peak_bytes
            copies = (LateCopies, ImmediateCopies)[number]
            monkeypatch.setattr(host_memory, "_copy_thread", copies)
            after, losses = record(tmp_path / f"after-{number}", index, plan)
            assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
            predicted = plan.predicted.peak_bytes - requested_bytes(before, "cpu").start
            # Copies that are later than planned lower the peak, if anything.
            assert peak_above_start(after) <= 1.03 * predicted
            if copies is ImmediateCopies:
                assert peak_above_start(after) >= 0.97 * predicted
    assert num_mixed


def test_a_choice_after_offloads_does_not_recompute_what_is_offloaded(tmp_path: Path) -> None:
    before, _ = record(tmp_path / "before", 0)
    step, found = recompute_options(before, "cpu")
    joint = JointPlanner(before, "cpu", step, found, BANDWIDTHS, min_bytes=4096)
    target = step.cost.peak_bytes * 3 // 4
    choices = list(joint.further_choices(found.model, [target], 5.0))
    for chosen in choices:
        assert found.model.is_allowed(chosen)
        peak = found.model.replay(chosen).peak_bytes
        plan = make_plan(before, "cpu", step, found, Choice(chosen, peak, 0, is_optimal=False), None).plan
        modules = {name for action in plan.actions for name in action.module_names()}
        for mixed in joint.plans(found.model, chosen, replace(plan, actions=plan.actions), [target]):
            offloaded = {name for action in mixed.actions if action.kind == "offload" for name in action.module_names()}
            inside = {name for name in offloaded for module in modules if name.startswith(f"{module}.")}
            assert not inside
    assert all(isinstance(chosen, np.ndarray) for chosen in choices)
