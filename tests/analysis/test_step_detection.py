"""Step detection without marks: real training programs, synthetic sequences, and programs that have no steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.cli import cli
from torch import nn

import memtrace
from memtrace.analysis import analyze_steps, detect_steps, steps_table
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.periodicity import find_periodicities
from memtrace.analysis.step_analysis import StepBoundaries, find_boundaries
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of
from tests.programs import training
from tests.programs.training import PROGRAMS, STEPS, Program, not_iterative, recorded

Rows = list[dict[str, Any]]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_detected_boundaries_are_those_of_the_optimizer(program_traces: dict[str, Trace], program: Program) -> None:
    trace = program_traces[program.name]
    boundaries = find_boundaries(trace, from_events=True)
    assert boundaries.source == "events"
    assert len(step_rows(trace).number) == STEPS
    assert boundaries.detected.num_steps == STEPS
    assert boundaries.marks is not None
    assert boundaries.marks.agreement >= program.wanted


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_steps_are_detected_from_allocations_alone(tmp_path: Path, program: Program) -> None:
    trace = recorded(program.run, tmp_path / "run.memtrace", accesses=False)
    boundaries = find_boundaries(trace, from_events=True)
    assert boundaries.detected.method == "allocations"
    assert boundaries.detected.num_steps == STEPS
    assert boundaries.marks is not None
    assert boundaries.marks.agreement >= program.wanted


def test_without_accesses_and_stacks_micro_batches_lower_the_confidence(tmp_path: Path) -> None:
    def boundaries_of(program: Callable[[], None]) -> StepBoundaries:
        path = tmp_path / f"{program.__name__}.memtrace"
        return find_boundaries(recorded(program, path, accesses=False, stacks=False), from_events=True)

    regular, accumulating = boundaries_of(training.transformer), boundaries_of(training.accumulation)
    # Steps are not confused with micro-batches, of which there are four times as many.
    assert regular.detected.num_steps == accumulating.detected.num_steps == STEPS
    assert regular.marks is not None and accumulating.marks is not None
    assert regular.marks.agreement == accumulating.marks.agreement == 1
    assert regular.detected.confidence > 0.9
    assert accumulating.detected.confidence < 0.7


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def plain_sgd() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        inputs = torch.randn(16, 64)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def three_updates_per_rollout() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS // 3):
        with torch.no_grad():
            rollout = torch.cat([model(torch.randn(1, 64)) for _ in range(16)])
        for _ in range(3):
            loss = (model(torch.randn(16, 64)) - rollout).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def weight_averaging() -> None:
    """Averages of the parameters are updated after the optimizer."""
    model, average = _model(), _model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.99).add_(parameter, alpha=0.01)


def optimizer_with_closure() -> None:
    model, inputs = _model(), torch.randn(16, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def optimizer_in_backward() -> None:
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is accumulated."""
    model = _model()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        model(torch.randn(16, 64)).square().mean().backward()


def foreach_optimizer() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        model(torch.randn(16, 64)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


LOOPS = (
    plain_sgd,
    three_updates_per_rollout,
    weight_averaging,
    optimizer_with_closure,
    optimizer_in_backward,
    foreach_optimizer,
)


@pytest.mark.parametrize("accesses", [True, False], ids=["accesses", "allocations"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_steps_of_other_training_loops_are_detected(tmp_path: Path, loop: Callable[[], None], accesses: bool) -> None:
    trace = recorded(loop, tmp_path / "run.memtrace", accesses=accesses)
    boundaries = find_boundaries(trace, from_events=True)
    assert boundaries.detected.num_steps == STEPS
    assert boundaries.marks is not None
    assert boundaries.marks.agreement == 1


def test_a_constant_shift_from_the_marks_is_reported(tmp_path: Path) -> None:
    trace = recorded(weight_averaging, tmp_path / "run.memtrace", stacks=False)
    marks = find_boundaries(trace).marks
    assert marks is not None and marks.shift_events is not None
    assert (marks.agreement, marks.shifted_agreement) == (0, 1)
    # For each of the four parameters the average is read and written twice and the parameter read once, give or take
    # the reads of scalars.
    assert marks.shift_events >= 20
    text = CliRunner().invoke(cli, ["steps", str(tmp_path / "run.memtrace")]).output
    assert f"100 % were detected exactly {marks.shift_events} events later" in " ".join(text.split())


def test_a_program_without_steps_is_reported_as_not_iterative(tmp_path: Path) -> None:
    trace = recorded(not_iterative, tmp_path / "run.memtrace")
    assert detect_steps(trace).num_steps == 0
    result = analyze_steps(trace, from_events=True)
    assert result.is_iterative is False
    assert result.steps == ()
    assert result.source == "none"
    assert len(steps_table(trace)) == 0


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()) for _ in range(16)))


def one_forward_pass() -> None:
    with torch.no_grad():
        _layers()(torch.randn(8, 32))


def one_training_step() -> None:
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()


def one_pass_without_modules() -> None:
    x = torch.randn(8, 32)
    for weight, bias in [(torch.randn(32, 32), torch.randn(32)) for _ in range(20)]:
        x = torch.relu(x @ weight + bias)


def one_recurrent_sequence() -> None:
    """The same cell at every position of one sequence, whose gradients accumulate in one backward pass."""
    cell, state = nn.GRUCell(32, 64), torch.zeros(8, 64)
    states = [state := cell(torch.randn(8, 32), state) for _ in range(40)]
    torch.stack(states).sum().backward()


@pytest.mark.parametrize("options", [{}, {"accesses": False}, {"accesses": False, "stacks": False}], ids=str)
@pytest.mark.parametrize(
    "run",
    [one_forward_pass, one_training_step, one_pass_without_modules, one_recurrent_sequence],
    ids=lambda run: run.__name__,
)
def test_layers_are_not_mistaken_for_steps(tmp_path: Path, run: Callable[[], None], options: dict[str, bool]) -> None:
    assert detect_steps(recorded(run, tmp_path / "run.memtrace", **options)).num_steps == 0


@pytest.mark.parametrize(("width", "optimizer_type"), [(1, torch.optim.Adam), (2, torch.optim.SGD)])
def test_updates_of_a_narrow_last_layer_belong_to_their_step(
    tmp_path: Path, width: int, optimizer_type: Callable[..., torch.optim.Optimizer]
) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, width))
    optimizer = optimizer_type(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()

    boundaries = find_boundaries(recorded(run, tmp_path / "run.memtrace"), from_events=True)
    assert boundaries.detected.num_steps == STEPS
    assert boundaries.marks is not None
    assert boundaries.marks.agreement == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=20, max_size=200, unique=True))
def test_sizes_that_never_repeat_are_not_steps(sizes: list[int]) -> None:
    rows = []
    for number, size in enumerate(sizes):
        rows += [event("alloc", number, 2 * number, size), event("free", number, 2 * number + 1, size)]
    assert detect_steps(trace_of(events=rows)).num_steps == 0


class SyntheticTraining(NamedTuple):
    """Rows of the tables of a synthetic trace, and the rows of events at which its steps end."""

    events: Rows
    ops: Rows
    names: Rows
    ends: list[int]


@st.composite
def synthetic_training(draw: st.DrawFn) -> SyntheticTraining:
    """Steps with parameters that are updated once, activations of drawn sizes, and unrelated allocations between."""
    sizes = draw(st.lists(st.integers(16, 4096), min_size=3, max_size=8))
    num_steps, num_parameters = draw(st.integers(5, 12)), draw(st.integers(1, 4))
    noise = draw(st.lists(st.integers(0, 3), min_size=num_steps, max_size=num_steps))
    rows = [event("baseline", number, 0, 1000 + number) for number in range(num_parameters)]
    ops: Rows = []
    ends, block, now = [], num_parameters, 1

    def call(name: int, *actions: tuple[str, int, int | None]) -> None:
        nonlocal now
        ops.append(op(len(ops), "forward", name=name))
        for kind, number, size in actions:
            now += 1
            rows.append(event(kind, number, now, size, op_id=len(ops) - 1))

    for number in range(num_steps):
        for _ in range(noise[number]):
            call(50, ("alloc", block, 7 + number), ("free", block, 7 + number))
            block += 1
        first = block
        for place, size in enumerate(sizes):
            call(place, ("read", place % num_parameters, None), ("alloc", block, size), ("write", block, None))
            block += 1
        for activation, size in reversed(list(zip(range(first, block), sizes, strict=True))):
            call(20, ("read", activation, None), ("free", activation, size))
        for parameter in range(num_parameters):
            call(30, ("read", parameter, None), ("write", parameter, None))
        ends.append(len(rows))
    names = [{"id": number, "kind": "operator", "text": f"op{number}"} for number in range(60)]
    return SyntheticTraining(rows, ops, names, ends)


@settings(max_examples=60, deadline=None)
@given(synthetic_training(), st.floats(0, 0.9))
def test_steps_are_detected_despite_noise_and_a_cut_first_step(training: SyntheticTraining, cut_share: float) -> None:
    cut = int(cut_share * training.ends[0])
    kept = training.events[cut:]
    allocated = {row["block_id"] for row in kept if row["kind"] in ("alloc", "baseline")}
    older = sorted({row["block_id"] for row in kept} - allocated)
    size = {row["block_id"]: row["size"] for row in training.events if row["kind"] in ("alloc", "baseline")}
    baseline = [event("baseline", number, 0, size[number]) for number in older]
    detected = detect_steps(trace_of(events=baseline + kept, ops=training.ops, names=training.names))
    assert detected.method == "updates"
    expected = [end - cut + len(baseline) for end in training.ends]
    assert detected.rows[-len(expected) :].tolist() == expected
    assert len(detected.rows) - len(expected) in (0, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 40), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_a_periodic_sequence_with_noise_has_one_cycle_per_period(num_periods: int, length: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    symbols: list[int] = []
    for _ in range(num_periods):
        symbols += [*range(length), *random.integers(100, 10**6, random.integers(0, 3))]
    values, symbol = np.unique(symbols, return_inverse=True)
    best = find_periodicities(symbol, np.arange(len(symbol)), np.ones(len(values)))[0]
    assert len(best.starts) == num_periods
    assert set(range(length)) <= set(values[best.symbols].tolist())
    assert best.agreement == 1


def test_marks_take_precedence_over_detected_steps() -> None:
    rows = [event("alloc", n, 10 * n, 100) for n in range(20)]
    result = analyze_steps(trace_of(events=rows, spans=[step(n, n * 50, 50) for n in range(4)]))
    assert result.source == "marks"
    assert [(row.start_ns, row.duration_ns) for row in result.steps] == [(0, 50), (50, 50), (100, 50), (150, 50)]
    assert [(row.first_event, row.end_event) for row in result.steps] == [(0, 5), (5, 10), (10, 15), (15, 20)]
    assert (result.confidence, result.median_events, result.median_duration_ns) == (1, 5, 50)


def test_from_events_analyzes_the_detected_steps_of_a_marked_trace(tmp_path: Path) -> None:
    model = nn.Linear(32, 16)
    optimizer = torch.optim.SGD(model.parameters())
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        for _ in rec.steps(range(4)):  # epochs
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    marked, detected = analyze_steps(trace), analyze_steps(trace, from_events=True)
    assert (marked.num_steps, detected.num_steps) == (4, 20)
    assert [row.step for row in detected.steps] == list(range(20))
    assert marked.allocation_fit is not None and detected.allocation_fit is not None
    assert marked.allocation_fit.per_step == 5 * detected.allocation_fit.per_step


def test_steps_of_a_real_snapshot_are_detected(data: Path) -> None:
    trace = memtrace.load(data / "snapshots" / "complete_forward_backward.pickle")
    assert detect_steps(trace.rank(trace.ranks[0])).num_steps == 3


@pytest.mark.parametrize(
    "name", ["wrapped_ring_25000", "transformer_training_step", "missing_frames", "expandable_segments"]
)
def test_layers_in_real_snapshots_are_not_mistaken_for_steps(data: Path, name: str) -> None:
    """By their stacks these snapshots hold at most one optimizer step or one forward pass."""
    trace = memtrace.load(data / "snapshots" / f"{name}.pickle")
    assert detect_steps(trace.rank(trace.ranks[0])).num_steps == 0
