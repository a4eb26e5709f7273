"""Leaks: planted ones with their growth and allocation site, and memory that is retained without leaking."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memtrace.analysis import compute_coverage
from memtrace.analysis.leaks import find_leaks, keeps_growing
from memtrace.analysis.retained_memory import live_bytes_at_step_ends
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of
from tests.programs.tasks import Task
from tests.programs.training import recorded, train

MIB = 1 << 20


def record_training(folder: Path, after_step: Callable[[int], None]) -> Trace:
    """Return the trace of a training loop that calls ``after_step`` with the number of each step at its end."""
    model = nn.Linear(64, 64)
    task = Task(model, lambda _: model(torch.randn(4, 64)).square().mean())
    return recorded(lambda: train(task, after_step), folder / "run.memtrace")


def older_mib(trace: Trace) -> float:
    """Return the memory that other tests of this process hold, which counts as used like the memory of this test."""
    return compute_coverage(trace).baseline_bytes / MIB


def test_a_leak_is_reported_with_its_site_its_growth_and_the_time_to_exhaustion(tmp_path: Path) -> None:
    retained: list[torch.Tensor] = []
    trace = record_training(tmp_path, lambda _: retained.append(torch.zeros(MIB // 4)))
    result = find_leaks(trace, capacity_bytes=1024 * MIB)
    assert len(result.leaks) == 1
    assert result.leaks[0].site is not None and "test_leaks.py" in result.leaks[0].site
    assert result.leaks[0].bytes_per_step == pytest.approx(MIB, rel=0.01)
    assert result.steps_to_capacity == pytest.approx(1024 - 31 - older_mib(trace), abs=2)


def test_a_leak_in_every_fifth_step_is_reported_and_a_full_cache_is_not(tmp_path: Path) -> None:
    retained: list[torch.Tensor] = []
    cache: list[torch.Tensor] = []

    def after_step(number: int) -> None:
        if number % 5 == 0:
            retained.append(torch.zeros(MIB // 4))
        cache.append(torch.zeros(MIB // 16))
        del cache[:-6]

    result = find_leaks(record_training(tmp_path, after_step))
    assert len(result.leaks) == 1
    assert result.leaks[0].bytes_per_step == pytest.approx(MIB / 5, rel=0.05)


def test_the_category_of_a_leak_ignores_gradients_still_in_use_at_its_site(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    retained: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters())

    def train() -> None:
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 64)).square().mean()  # gradients are attributed to this line too
            retained.append(loss.detach())
            loss.backward()
            optimizer.step()

    (leak,) = find_leaks(recorded(train, tmp_path / "run.memtrace")).leaks
    assert leak.live_bytes > 64 * 64 * 4
    assert leak.category != "gradient"


class Node:
    """An object that can hold a reference to itself."""

    itself: Node
    tensor: torch.Tensor


def test_memory_freed_only_by_the_garbage_collector_is_reported(tmp_path: Path) -> None:
    def after_step(number: int) -> None:
        node = Node()
        node.itself, node.tensor = node, torch.zeros(MIB // 4)
        if number % 10 == 9:
            gc.collect()

    gc.disable()
    try:
        trace = record_training(tmp_path, after_step)
    finally:
        gc.enable()
    result = find_leaks(trace)
    assert result.records_gc
    assert result.gc_freed_bytes is not None and result.gc_freed_bytes >= 28 * MIB
    assert result.leaks == ()


def test_memory_that_grows_by_copying_exhausts_the_capacity_twice_as_soon(tmp_path: Path) -> None:
    retained = [torch.zeros(0, MIB // 4)]

    def grow(_: int) -> None:
        retained[0] = torch.cat([retained[0], torch.ones(1, MIB // 4)])

    trace = record_training(tmp_path, grow)
    result = find_leaks(trace, capacity_bytes=1024 * MIB)
    assert result.bytes_per_step == pytest.approx(MIB, rel=0.01)
    assert result.steps_to_capacity == pytest.approx((1024 - 60 - older_mib(trace)) / 2, abs=2)


def test_peaks_that_rise_until_the_garbage_collector_runs_do_not_shorten_the_time_to_exhaustion(tmp_path: Path) -> None:
    retained: list[torch.Tensor] = []

    def after_step(number: int) -> None:
        retained.append(torch.zeros(MIB // 64))
        node = Node()
        node.itself, node.tensor = node, torch.zeros(MIB // 4)
        if number % 10 == 9:
            gc.collect()

    gc.disable()
    try:
        trace = record_training(tmp_path, after_step)
    finally:
        gc.enable()
    result = find_leaks(trace, capacity_bytes=1024 * MIB)
    assert result.bytes_per_step == pytest.approx(MIB / 16, rel=0.01)
    assert result.steps_to_capacity == pytest.approx((1024 - older_mib(trace)) * 16 - 220, abs=40)


def trace_of_retained(sizes: list[int]) -> Trace:
    """Return a trace of one block per step, which is never freed; steps with size 0 have none."""
    end = 10 * len(sizes)
    rows = [event("alloc", n, 10 * n + 1, size) for n, size in enumerate(sizes) if size]
    rows += [event("alloc", 999, end - 2, 1), event("free", 999, end - 1, 1)]
    return trace_of(events=rows, spans=[step(n, 10 * n, 10) for n in range(len(sizes))])


@pytest.mark.parametrize(
    ("sizes", "is_leak"),
    [
        pytest.param([8] * 12, True, id="every step"),
        pytest.param([8, 8, 8] + [0] * 9, False, id="only in warm-up"),
        pytest.param([0] * 5 + [4096] + [0] * 6, False, id="one workspace"),
        pytest.param([0, 0] + [8] * 5 + [0] * 5, False, id="a cache that filled up"),
        pytest.param([8] * 4, False, id="too few steps"),
        pytest.param([0] * 7 + [8] * 5, True, id="starts late"),
        pytest.param([0] * 9 + [8] * 3, False, id="only in the last steps"),
    ],
)
def test_lasting_growth_is_a_leak_and_other_growth_is_not(sizes: list[int], is_leak: bool) -> None:
    result = find_leaks(trace_of_retained(sizes))
    assert bool(result.leaks) == is_leak
    assert result.bytes_per_step == (None if len(sizes) <= 5 else pytest.approx(8 if is_leak else 0))
    assert result.gc_freed_bytes is None
    assert result.steps_to_capacity is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100), st.integers(0, 9), st.integers(0, 10)), max_size=20))
def test_live_bytes_at_step_ends_equal_brute_force(blocks: list[tuple[int, int, int, int]]) -> None:
    blocks = [(group, size, first, max(first, end)) for group, size, first, end in blocks]
    group, size, first, end = np.array(blocks, np.int64).reshape(-1, 4).T
    live = live_bytes_at_step_ends(group, size, first, end, (3, 10))
    for row in range(3):
        for number in range(10):
            assert live[row, number] == sum(s for g, s, f, e in blocks if g == row and f <= number < e)


def test_a_sawtooth_does_not_keep_growing() -> None:
    assert not keeps_growing(np.array([0, 5, 10, 0, 5, 10, 0, 5, 10]))
    assert keeps_growing(np.array([0, 5, 10, 15, 20, 25, 30]))


def trace_of_kept_blocks(kept: list[int], newest: list[int], *, one_line: bool = True) -> Trace:
    """Return steps that each keep a block of ``kept`` bytes until the end and one of ``newest`` bytes until the next step.

    Both come from one line, or every kept block from a line of its own.
    """
    names = [{"id": 0, "kind": "stack", "frames": [1]}, {"id": 1, "kind": "frame", "text": "/me/a.py\t1\tmain"}]
    events, ops = [], []
    for number, (kept_bytes, newest_bytes) in enumerate(zip(kept, newest, strict=True)):
        start, stack = 100 * number, 0 if one_line else 2 * number + 2
        if not one_line:
            names += [
                {"id": stack, "kind": "stack", "frames": [stack + 1]},
                {"id": stack + 1, "kind": "frame", "text": f"/me/a.py\t{number + 2}\tmain"},
            ]
        ops += [op(2 * number, "forward", stack=0), op(2 * number + 1, "forward", stack=stack)]
        events.append(event("alloc", 2 * number, start, newest_bytes, op_id=2 * number))
        events += [event("free", 2 * number - 2, start + 1)] if number else []
        events.append(event("alloc", 2 * number + 1, start + 2, kept_bytes, op_id=2 * number + 1))
    return trace_of(events=events, ops=ops, names=names, spans=[step(n, 100 * n, 100) for n in range(len(kept))])


def test_leak_of_a_line_whose_newest_block_varies_in_size_is_found() -> None:
    rng = np.random.default_rng(0)
    trace = trace_of_kept_blocks([1000] * 20, rng.integers(0, 10_000, 20).tolist())
    (leak,) = find_leaks(trace).leaks
    assert leak.bytes_per_step == pytest.approx(1000)
    assert leak.site == "me/a.py:1 main" and find_leaks(trace).bytes_per_step == pytest.approx(1000)


def test_growth_that_is_spread_over_lines_is_found_although_no_line_leaks() -> None:
    result = find_leaks(trace_of_kept_blocks([1000] * 20, [500] * 20, one_line=False))
    assert result.leaks == ()
    assert result.bytes_per_step == result.unattributed_bytes_per_step == pytest.approx(1000)


def test_blocks_that_vary_in_size_and_live_for_one_step_are_no_growth() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        result = find_leaks(trace_of_kept_blocks([0] * 30, rng.integers(0, 10_000, 30).tolist()))
        assert (result.leaks, result.bytes_per_step) == ((), 0.0)


def test_memory_that_is_copied_into_a_larger_block_in_every_step_grows() -> None:
    rng = np.random.default_rng(0)
    copied = [1000 * number + int(noise) for number, noise in enumerate(rng.integers(0, 5_000, 30))]
    growth = find_leaks(trace_of_kept_blocks([0] * 30, copied)).bytes_per_step
    assert growth == pytest.approx(1000, rel=0.1)
