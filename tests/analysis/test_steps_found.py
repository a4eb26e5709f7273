"""Steps found without marks: eight real programs, planted sequences, and runs that have no steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.cli import cli
from torch import nn

import memtrace
from memtrace.analysis import blocks_table, steps_table
from memtrace.analysis.attribution import KIND, step_rows
from memtrace.analysis.block_signatures import roles, roles_table
from memtrace.analysis.detection import detect
from memtrace.analysis.leaks import leaks
from memtrace.analysis.periodicity import clocks
from memtrace.analysis.stability import law, pattern_as_dict, stability, step_pattern
from tests.builders import event, op, step, trace_of
from tests.programs import training
from tests.programs.training import PROGRAMS, STEPS, not_iterative, recorded


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    return {
        program.name: recorded(program.run, folder / f"{number}.memtrace") for number, program in enumerate(PROGRAMS)
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_boundaries_of_real_programs_are_those_of_their_optimizer(traces, program):
    trace = traces[program.name]
    found = step_pattern(trace, from_events=True)
    assert found.source == "events"
    assert len(step_rows(trace).number) == STEPS
    assert found.detection.num_steps == STEPS
    assert found.agreement is not None
    assert found.agreement >= program.wanted


REGULAR = ("MLP", "CNN, batch norm", "transformer", "GAN, two optimizers", "accumulation of 4")


@pytest.mark.parametrize("name", REGULAR)
def test_regular_programs_are_stable_and_obey_the_law(traces, name):
    found = stability(traces[name])
    assert found.usual_bytes == found.usual_roles == found.usual_events == 1
    assert (found.bytes[3:] == 1).all()
    told = law(traces[name])
    assert told is not None
    assert told.exact
    kind = traces[name].columns("events", "kind")["kind"]
    through_last = kind[: step_rows(traces[name]).end_row[-1]]
    assert (through_last == KIND["alloc"]).sum() == told.constant + told.per_step * STEPS


def test_varying_lengths_and_evaluation_are_told(traces):
    varying = stability(traces["LSTM, varying lengths"])
    assert varying.usual_bytes < 0.9
    assert any(len(one.other_size) > 10 for one in varying.differences)
    after = stability(traces["evaluation every 5"])
    assert {number for one in after.differences for number in one.extra} == {5, 10, 15, 20, 25}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_no_false_leak(traces, program):
    assert leaks(traces[program.name]).leaks == ()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_without_accesses_allocations_tell_the_steps(tmp_path, program):
    found = step_pattern(recorded(program.run, tmp_path / "run.memtrace", accesses=False), from_events=True)
    assert found.detection.method == "allocations"
    assert found.detection.num_steps == STEPS
    assert found.agreement >= program.wanted


def test_without_accesses_and_stacks_backward_tells_the_steps_and_doubt_is_said(tmp_path):
    def of(program):
        path = tmp_path / f"{program.__name__}.memtrace"
        return step_pattern(recorded(program, path, accesses=False, stacks=False), from_events=True)

    regular, gathering = of(training.transformer), of(training.accumulation)
    # Not the micro-batches, of which there are four times as many.
    assert regular.detection.num_steps == gathering.detection.num_steps == STEPS
    assert regular.agreement == gathering.agreement == 1
    assert regular.detection.confidence > 0.9
    assert gathering.detection.confidence < 0.7


def _net():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def plain_sgd():
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        inputs = torch.randn(16, 64)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def rollouts():
    """Four updates on what one rollout of the model gave."""
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS // 3):
        with torch.no_grad():
            seen = torch.cat([model(torch.randn(1, 64)) for _ in range(16)])
        for _ in range(3):
            loss = (model(torch.randn(16, 64)) - seen).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def averages():
    """Averages of the parameters follow the optimizer."""
    model, mean = _net(), _net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(mean.parameters(), model.parameters(), strict=True):
                kept.mul_(0.99).add_(new, alpha=0.01)


def closure():
    model, inputs = _net(), torch.randn(16, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def loss():
        optimizer.zero_grad()
        value = model(inputs).square().mean()
        value.backward()
        return value

    for _ in range(STEPS):
        optimizer.step(loss)


def within_backward():
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""
    model = _net()
    optimizers = {one: torch.optim.Adam([one]) for one in model.parameters()}

    def update(one):
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in optimizers:
        one.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        model(torch.randn(16, 64)).square().mean().backward()


def many_at_once():
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        model(torch.randn(16, 64)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


LOOPS = (plain_sgd, rollouts, averages, closure, within_backward, many_at_once)


@pytest.mark.parametrize("accesses", [True, False])
@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
def test_other_loops(tmp_path, run, accesses):
    found = step_pattern(recorded(run, tmp_path / "run.memtrace", accesses=accesses), from_events=True)
    assert found.detection.num_steps == STEPS
    assert found.agreement == 1


def test_a_steady_shift_is_said_as_such(tmp_path):
    trace = recorded(averages, tmp_path / "run.memtrace", stacks=False)
    found = step_pattern(trace)
    assert (found.agreement, found.shifted_agreement) == (0, 1)
    # Of each of the four parameters the average is read and written twice and the parameter read once, less or more
    # as scalars are counted.
    assert found.shift_events >= 20
    text = CliRunner().invoke(cli, ["steps", str(tmp_path / "run.memtrace")]).output
    assert f"100.0 % of them a steady {found.shift_events} events later" in " ".join(text.split())


def test_what_is_not_iterative_is_not_forced_into_steps(tmp_path):
    trace = recorded(not_iterative, tmp_path / "run.memtrace")
    assert detect(trace).num_steps == 0
    told = pattern_as_dict(trace, from_events=True)
    assert told["iterative"] is False
    assert told["boundaries_ns"] == []
    assert told["source"] == "none"
    assert len(steps_table(trace)) == 0


def _layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()) for _ in range(16)))


def one_forward():
    with torch.no_grad():
        _layers()(torch.randn(8, 32))


def one_step():
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()


def one_pass_without_modules():
    x = torch.randn(8, 32)
    for weight, bias in [(torch.randn(32, 32), torch.randn(32)) for _ in range(20)]:
        x = torch.relu(x @ weight + bias)


def one_sequence():
    """The same cell for every place of one sequence, whose gradients add up in one backward."""
    cell, state = nn.GRUCell(32, 64), torch.zeros(8, 64)
    states = [state := cell(torch.randn(8, 32), state) for _ in range(40)]
    torch.stack(states).sum().backward()


@pytest.mark.parametrize("told", [{}, {"accesses": False}, {"accesses": False, "stacks": False}], ids=str)
@pytest.mark.parametrize(
    "run", [one_forward, one_step, one_pass_without_modules, one_sequence], ids=lambda run: run.__name__
)
def test_equal_layers_are_no_steps(tmp_path, run, told):
    assert detect(recorded(run, tmp_path / "run.memtrace", **told)).num_steps == 0


@pytest.mark.parametrize(("width", "made"), [(1, torch.optim.Adam), (2, torch.optim.SGD)])
def test_a_narrow_last_layer_belongs_to_its_step(tmp_path, width, made):
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, width))
    optimizer = made(model.parameters(), lr=0.1)

    def run():
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()

    found = step_pattern(recorded(run, tmp_path / "run.memtrace"), from_events=True)
    assert found.detection.num_steps == STEPS
    assert found.agreement == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=20, max_size=200, unique=True))
def test_sizes_that_never_come_again_are_no_steps(sizes):
    rows = []
    for number, size in enumerate(sizes):
        rows += [event("alloc", number, 2 * number, size), event("free", number, 2 * number + 1, size)]
    assert detect(trace_of(events=rows)).num_steps == 0


@st.composite
def planted(draw):
    """Training as a profiler sees it: parameters updated in every step, activations of chosen sizes, noise between.

    Gives the rows of events and operators, and the rows at which steps end.
    """
    sizes = draw(st.lists(st.integers(16, 4096), min_size=3, max_size=8))
    num_steps, params = draw(st.integers(5, 12)), draw(st.integers(1, 4))
    noise = draw(st.lists(st.integers(0, 3), min_size=num_steps, max_size=num_steps))
    rows = [event("baseline", number, 0, 1000 + number) for number in range(params)]
    ops, ends, block, now = [], [], params, 1

    def do(name, *made):
        nonlocal now
        ops.append(op(len(ops), "forward", name=name))
        for kind, number, size in made:
            now += 1
            rows.append(event(kind, number, now, size, op_id=len(ops) - 1))

    for number in range(num_steps):
        for _ in range(noise[number]):
            do(50, ("alloc", block, 7 + number), ("free", block, 7 + number))
            block += 1
        first = block
        for place, size in enumerate(sizes):
            do(place, ("read", place % params, None), ("alloc", block, size), ("write", block, None))
            block += 1
        for made, size in reversed(list(zip(range(first, block), sizes, strict=True))):
            do(20, ("read", made, None), ("free", made, size))
        for parameter in range(params):
            do(30, ("read", parameter, None), ("write", parameter, None))
        ends.append(len(rows))
    names = [{"id": number, "kind": "operator", "text": f"op{number}"} for number in range(60)]
    return rows, ops, names, ends


@settings(max_examples=60, deadline=None)
@given(planted(), st.floats(0, 0.9))
def test_planted_steps_are_found_with_noise_and_without_their_beginning(plan, dropped):
    rows, ops, names, ends = plan
    cut = int(dropped * ends[0])
    seen = {row["block_id"] for row in rows[cut:] if row["kind"] in ("alloc", "baseline")}
    older = sorted({row["block_id"] for row in rows[cut:]} - seen)
    size = {row["block_id"]: row["size"] for row in rows if row["kind"] in ("alloc", "baseline")}
    begin = [event("baseline", number, 0, size[number]) for number in older]
    found = detect(trace_of(events=begin + rows[cut:], ops=ops, names=names))
    assert found.method == "updates"
    wanted = [end - cut + len(begin) for end in ends]
    assert found.rows[-len(wanted) :].tolist() == wanted
    assert len(found.rows) - len(wanted) in (0, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 40), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_a_beat_with_noise_has_one_tick_a_period(periods, beats, seed):
    random = np.random.default_rng(seed)
    symbols, places = [], []
    for _ in range(periods):
        symbols += [*range(beats), *random.integers(100, 10**6, random.integers(0, 3))]
    values, symbol = np.unique(symbols, return_inverse=True)
    places = np.arange(len(symbol))
    best = clocks(symbol, places, np.ones(len(values)))[0]
    assert len(best.ticks) == periods
    assert set(range(beats)) <= set(values[best.symbols].tolist())
    assert best.agreement == 1


def test_marks_win_and_are_checked():
    rows = [event("alloc", n, 10 * n, 100) for n in range(20)]
    trace = trace_of(events=rows, spans=[step(n, n * 50, 50) for n in range(4)])
    told = pattern_as_dict(trace)
    assert told["source"] == "marks"
    assert told["boundaries_ns"] == [0, 50, 100, 150, 200]
    assert told["confidence"] == 1
    assert told["period_events"] == 5


def test_without_marks_everything_is_told_of_the_steps_found(tmp_path):
    model = nn.Linear(32, 16)
    optimizer = torch.optim.SGD(model.parameters())
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        for _ in rec.steps(range(4)):  # epochs
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    marked, found = pattern_as_dict(trace), pattern_as_dict(trace, from_events=True)
    assert (marked["num_steps"], found["num_steps"]) == (4, 20)
    assert [row["step"] for row in found["stability"]["by_step"]] == list(range(20))
    assert marked["law"]["per_step"] == 5 * found["law"]["per_step"]


def test_roles_are_the_same_block_of_every_step(traces):
    found, table = roles(traces["MLP"]), roles_table(traces["MLP"])
    assert len(found) == len(table)
    assert (found.of_block >= 0).sum() == found.num_steps.sum()
    steady = table[table.num_steps >= STEPS - 1]
    assert len(steady) >= 50
    assert (steady.accesses_std.fillna(0) <= steady.accesses_mean + 1).all()
    # A role is in a step at most once.
    step_of = blocks_table(traces["MLP"])["step"].to_numpy(dtype=float, na_value=-1)
    inside = found.of_block >= 0
    pairs = set(zip(found.of_block[inside].tolist(), step_of[inside].tolist(), strict=True))
    assert len(pairs) == inside.sum()


def test_real_snapshots_without_marks(data):
    trace = memtrace.load(data / "snapshots" / "complete_forward_backward.pickle")
    found = detect(trace.rank(trace.ranks[0]))
    assert found.num_steps == 3


@pytest.mark.parametrize("name", [
    "wrapped_ring_25000", "transformer_training_step", "missing_frames", "expandable_segments",
])  # fmt: skip
def test_the_layers_of_one_step_are_no_steps(data, name):
    """By their stacks these hold one optimizer's step or one forward at most; the beat in them is that of layers."""
    trace = memtrace.load(data / "snapshots" / f"{name}.pickle")
    assert detect(trace.rank(trace.ranks[0])).num_steps == 0
