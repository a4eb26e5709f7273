"""The model against torch's own allocator, asked on the spot; needs what oracle/README.md says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allocator.oracle.machine import Machine, build
from allocator.programs import SETTINGS, anything, training
from allocator.recorded import Follower, cut, history_of
from memtrace.planning.allocator.reproduce import reproduce

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
