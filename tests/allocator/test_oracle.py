"""The model compared with PyTorch's own allocator, run on the spot; oracle/README.md lists the requirements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memtrace.allocator.history import AllocatorHistory
from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.operations import ALLOCATE, EMPTY_CACHE, FREE, OperationSequence
from memtrace.allocator.plan import workload_of
from memtrace.allocator.requests import read_device_history
from memtrace.allocator.rules import TORCH_2_13
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.what_if import SWEEP, simulate_settings
from memtrace.trace import load
from tests.allocator.oracle.machine import Machine, Operation, build
from tests.allocator.programs import SETTINGS, random_program, training_program
from tests.allocator.recorded import Follower, drop_first_entries, history_of

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "snapshots"
pytestmark = pytest.mark.slow
CAPACITIES = (300 << 20, 512 << 20, 1 << 30, 80 << 30)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = build(tmp_path_factory.mktemp("oracle"))
    if machine is None:
        pytest.skip("MEMTRACE_TORCH_CUDA is not an unpacked CUDA build of torch (tests/allocator/oracle/README.md)")
    yield machine


@pytest.mark.parametrize("settings", SETTINGS)
def test_model_matches_pytorch_after_every_operation(machine: Machine, settings: str) -> None:
    for seed in range(40):
        capacity, order = CAPACITIES[seed % 4], seed // 4 % 2
        operations = random_program(seed, 300) if seed % 5 else training_program(seed)
        answer = machine.answer(operations, settings=settings, capacity=capacity, order=order)
        follower = Follower(settings, capacity, order)
        for operation, entries in zip(operations, answer.entries, strict=True):
            follower.follow(operation, entries)
        follower.check_state(answer)


@pytest.mark.parametrize("settings", [text for text in SETTINGS if "fraction" not in text])
def test_histories_of_pytorch_replay_exactly(machine: Machine, settings: str) -> None:
    """With addresses in any order; partial histories too, for which the order of older segments must be inferred."""
    cuts = exact = 0
    for seed in range(100, 120):
        operations = random_program(seed, 300)
        capacity = CAPACITIES[seed % 4]
        answer = machine.answer(operations, settings=settings, capacity=capacity, order=seed % 3)
        history = history_of(operations, answer, settings, capacity)
        _, result = reproduce_history(history)
        assert result.is_exact, (seed, result.reason)
        assert result.final_blocks_match
        for share in (0.25, 0.5, 0.75):
            cuts += 1
            exact += reproduce_history(drop_first_entries(history, int(share * len(history))))[1].is_exact
    assert exact >= 0.95 * cuts, f"{exact} of {cuts}"


def driver_operations(sequence: OperationSequence) -> list[Operation]:
    """Return a sequence in the form that the driver takes, its older blocks requested first."""
    requested, stream = sequence.requested.tolist(), sequence.stream.tolist()
    older = range(sequence.num_older)
    operations: list[Operation] = [("alloc", number, requested[number], stream[number]) for number in older]
    for operation, number in zip(sequence.operation.tolist(), sequence.number.tolist(), strict=True):
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
def test_predicted_peaks_of_real_programs_are_those_of_pytorch(machine: Machine, name: str) -> None:
    """Real requests, recorded with the default settings: the predicted peak is PyTorch's own under every setting."""
    trace = load(DATA / f"{name}.pickle")
    recorded = read_device_history(trace, trace.devices[0])
    assert isinstance(recorded, AllocatorHistory)
    workload = replace(workload_of(reproduce_history(recorded)[0]), rules=TORCH_2_13)
    operations = driver_operations(workload.operations)
    for text in (*SWEEP, *(text for text in SETTINGS if "fraction" not in text)):
        settings = AllocatorSettings.parse(text)
        expected = machine.answer(operations, settings=str(settings))
        assert simulate_settings(workload, settings).peak_reserved == expected.peak_reserved, text
