"""Plans that recompute modules: what they predict, against recordings of the programs that carry them out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrace
from memtrace import MemtraceError, Plan, Trace
from memtrace.analysis.peak import level_at, requested_bytes
from memtrace.planning import plan_recompute
from memtrace.planning.plan import StepCost
from memtrace.planning.recompute import make_actions
from memtrace.planning.recompute_options import find_options
from memtrace.planning.recorded_step import choose_step
from tests.programs.planned import PROGRAMS, PlannedProgram, Training, train

STEPS = 5


@dataclass(frozen=True)
class Recorded:
    trace: Trace
    losses: list[float]

    @property
    def rise_bytes(self) -> int:
        """The peak of the step above its start, which memory of other tests does not affect."""
        return self.above_start(choose_step(self.trace, "cpu").cost.peak_bytes)

    def above_start(self, peak_bytes: int) -> int:
        step = choose_step(self.trace, "cpu")
        start = requested_bytes(self.trace, "cpu")
        return peak_bytes - int(level_at(start, np.array([step.first_row - 1]))[0])


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage of other tests from being freed in the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def record_training(build: Callable[[], Training], path: Path, plan: Plan | None = None) -> Recorded:
    with quiet_collector():
        training = build()
        with memtrace.record(path, model=training.model, optimizer=training.optimizer):
            applied = memtrace.apply(plan, training.model) if plan else nullcontext()
            with applied:
                losses = train(training)
        values = [float(loss) for loss in losses]
    return Recorded(memtrace.load(path), values)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_predicted_peak_is_reached(program: PlannedProgram, tmp_path: Path) -> None:
    before = record_training(lambda: program.small(STEPS), tmp_path / "before.memtrace")
    lowest = plan_recompute(before.trace)
    assert lowest.is_optimal
    assert lowest.plan.predicted.peak_bytes < lowest.plan.recorded.peak_bytes
    halfway = (lowest.plan.predicted.peak_bytes + lowest.plan.recorded.peak_bytes) // 2
    faster = plan_recompute(before.trace, target_bytes=halfway)
    assert faster.plan.predicted.peak_bytes <= halfway
    assert sum(module.added_ns or 0 for module in faster.modules) <= sum(
        module.added_ns or 0 for module in lowest.modules
    )
    for name, found in (("lowest", lowest), ("faster", faster)):
        after = record_training(lambda: program.small(STEPS), tmp_path / f"{name}.memtrace", found.plan)
        predicted = before.above_start(found.plan.predicted.peak_bytes)
        assert after.rise_bytes == pytest.approx(predicted, rel=0.01)
        assert after.losses == before.losses


def test_without_options_the_model_replays_the_recorded_step(tmp_path: Path) -> None:
    recorded = record_training(lambda: PROGRAMS[2].small(STEPS), tmp_path / "run.memtrace")
    step = choose_step(recorded.trace, "cpu")
    model = find_options(recorded.trace, step, "cpu").model
    assert model.replay([]).peak_bytes == step.cost.peak_bytes


@pytest.mark.parametrize("program", [PROGRAMS[1], PROGRAMS[2], PROGRAMS[5]], ids=lambda program: program.name)
@pytest.mark.parametrize("seed", range(3))
def test_any_choice_of_modules_is_predicted(program: PlannedProgram, seed: int, tmp_path: Path) -> None:
    """Choices that no planner would make, too."""
    before = record_training(lambda: program.small(STEPS), tmp_path / "before.memtrace")
    step = choose_step(before.trace, "cpu")
    found = find_options(before.trace, step, "cpu")
    chosen: set[int] = set()
    for option in np.random.default_rng(seed).permutation(found.model.num_options)[:12].tolist():
        if not found.model.conflicts(option) & chosen:
            chosen.add(option)
    actions = make_actions([found.options[option] for option in sorted(chosen)])
    plan = Plan("cpu", actions, StepCost(1, None), StepCost(1, None))
    after = record_training(lambda: program.small(STEPS), tmp_path / "after.memtrace", plan)
    predicted = before.above_start(found.model.replay(chosen).peak_bytes)
    assert after.rise_bytes <= 1.01 * predicted
    # A model that keeps outputs of operators while all of it runs again can stay a little lower than predicted.
    keeps_outputs = any(action.kept_operators for action in actions)
    assert after.rise_bytes >= (0.9 if keeps_outputs else 0.99) * predicted
    assert after.losses == before.losses


def test_a_peak_that_cannot_be_reached_is_an_error_that_names_the_lowest(tmp_path: Path) -> None:
    recorded = record_training(lambda: PROGRAMS[0].small(STEPS), tmp_path / "run.memtrace")
    with pytest.raises(MemtraceError, match=r"cannot reach a peak of 1\.00 KiB on cpu: the lowest peak it reaches is"):
        plan_recompute(recorded.trace, target_bytes=1024)


def test_a_peak_above_the_recorded_one_needs_no_change(tmp_path: Path) -> None:
    recorded = record_training(lambda: PROGRAMS[0].small(STEPS), tmp_path / "run.memtrace")
    found = plan_recompute(recorded.trace, target_bytes=1 << 40)
    assert found.plan.actions == ()
    assert found.plan.predicted == found.plan.recorded


class Checkpointed(nn.Module):
    """Recomputes one of its parts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.second = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(self.first, x, use_reentrant=False)
        output: torch.Tensor = self.second(hidden)
        return output


def test_modules_that_the_program_checkpoints_are_left_alone(tmp_path: Path) -> None:
    def build() -> Training:
        torch.manual_seed(0)
        model = Checkpointed()
        batches = tuple((torch.randn(256, 32), torch.randint(32, (256,))) for _ in range(STEPS))
        loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        return Training(model, torch.optim.SGD(model.parameters()), batches, loss)

    before = record_training(build, tmp_path / "before.memtrace")
    found = plan_recompute(before.trace)
    assert not {module.module for module in found.modules} & {"first", "first.0", "first.1", "first.2", ""}
    assert any("already recomputes in first" in note for note in found.plan.assumptions)
    after = record_training(build, tmp_path / "after.memtrace", found.plan)
    assert after.rise_bytes == pytest.approx(before.above_start(found.plan.predicted.peak_bytes), rel=0.01)


def test_a_trace_without_reads_is_an_error(tmp_path: Path) -> None:
    training = PROGRAMS[0].small(STEPS)
    with memtrace.record(tmp_path / "run.memtrace", model=training.model, accesses=False):
        train(training)
    with pytest.raises(MemtraceError, match="has no reads and writes"):
        plan_recompute(memtrace.load(tmp_path / "run.memtrace"))


def test_a_program_without_modules_is_an_error(tmp_path: Path) -> None:
    weight = torch.randn(32, 32, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    with memtrace.record(tmp_path / "run.memtrace"):
        for _ in range(4):
            optimizer.zero_grad()
            torch.tanh(torch.ones(8, 32) @ weight).sum().backward()
            optimizer.step()
    with pytest.raises(MemtraceError, match="nothing to recompute"):
        plan_recompute(memtrace.load(tmp_path / "run.memtrace"))
