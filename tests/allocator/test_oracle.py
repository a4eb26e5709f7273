"""The model against torch's own allocator, asked on the spot; needs what oracle/README.md says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memtrace.allocator.history import History
from memtrace.allocator.infer_rules import reproduce
from memtrace.allocator.plan import case_of
from memtrace.allocator.program import ALLOCATE, EMPTY_CACHE, FREE, Program
from memtrace.allocator.requests import read_device
from memtrace.allocator.rules import TORCH_2_13
from memtrace.allocator.settings import Settings
from memtrace.allocator.what_if import SWEEP, outcome
from memtrace.trace import load
from tests.allocator.oracle.machine import Machine, Operation, build
from tests.allocator.programs import SETTINGS, anything, training
from tests.allocator.recorded import Follower, cut, history_of

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "snapshots"
CAPACITIES = (300 << 20, 512 << 20, 1 << 30, 80 << 30)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    built = build(tmp_path_factory.mktemp("oracle"))
    if built is None:
        pytest.skip("MEMTRACE_TORCH_CUDA names no unpacked CUDA build of torch (tests/allocator/oracle/README.md)")
    yield built


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_model_follows_the_allocator(machine: Machine, settings: str) -> None:
    for seed in range(40):
        capacity, order = CAPACITIES[seed % 4], seed // 4 % 2
        operations = anything(seed, 300) if seed % 5 else training(seed)
        answer = machine.answer(operations, settings=settings, capacity=capacity, order=order)
        follower = Follower(settings, capacity, order)
        for operation, entries in zip(operations, answer.entries, strict=True):
            follower.follow(operation, entries)
        follower.check_state(answer)


@pytest.mark.parametrize("settings", [text for text in SETTINGS if "fraction" not in text])
def test_histories_of_the_allocator_replay(machine: Machine, settings: str) -> None:
    """With addresses in any order; cut in the middle too, where only the order of older segments must be found."""
    cuts = exact = 0
    for seed in range(100, 120):
        operations = anything(seed, 300)
        capacity = CAPACITIES[seed % 4]
        answer = machine.answer(operations, settings=settings, capacity=capacity, order=seed % 3)
        history = history_of(operations, answer, settings, capacity)
        _, result = reproduce(history)
        assert result.is_exact, (seed, result.reason)
        assert result.final_blocks_match
        for share in (0.25, 0.5, 0.75):
            cuts += 1
            exact += reproduce(cut(history, int(share * len(history))))[1].is_exact
    assert exact >= 0.95 * cuts, f"{exact} of {cuts}"


def operations_of(program: Program) -> list[Operation]:
    """A program as the driver takes it, its older blocks requested first; only what it is made of here."""
    requested, stream = program.requested.tolist(), program.stream.tolist()
    older = range(program.num_older)
    operations: list[Operation] = [("alloc", number, requested[number], stream[number]) for number in older]
    for operation, number in zip(program.operation.tolist(), program.number.tolist(), strict=True):
        if operation == ALLOCATE:
            operations.append(("alloc", number, requested[number], stream[number]))
        elif operation == FREE:
            operations.append(("free", number))
        else:
            assert operation == EMPTY_CACHE
            operations.append(("empty_cache",))
    return operations


@pytest.mark.skipif(not DATA.is_dir(), reason="the recorded snapshots are not beside the repository")
@pytest.mark.parametrize("name", ["complete_windows", "complete_small", "transformer_training_step", "missing_frames"])
def test_what_other_settings_would_reserve(machine: Machine, name: str) -> None:
    """Real requests, recorded under the defaults: the predicted peak is the allocator's own under every setting."""
    trace = load(DATA / f"{name}.pickle")
    recorded = read_device(trace, trace.devices[0])
    assert isinstance(recorded, History)
    case = replace(case_of(reproduce(recorded)[0]), rules=TORCH_2_13)
    operations = operations_of(case.program)
    for text in (*SWEEP, *(text for text in SETTINGS if "fraction" not in text)):
        settings = Settings.parse(text)
        asked = machine.answer(operations, settings=str(settings))
        assert outcome(case, settings).peak_reserved == asked.peak_reserved, text
