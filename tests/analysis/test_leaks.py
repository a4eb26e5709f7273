"""Leaks: planted ones with their slope and line, and what is none."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memtrace.analysis.leaks import is_growth, leaks, live_at_ends
from tests.builders import event, step, trace_of
from tests.programs.tasks import Task
from tests.programs.training import recorded, train


def _training(each):
    model = nn.Linear(64, 64)
    train(Task(model, lambda _: model(torch.randn(4, 64)).square().mean()), each)


def test_a_leak_of_one_mib_a_step_its_line_and_its_slope(tmp_path):
    kept = []
    trace = recorded(lambda: _training(lambda _: kept.append(torch.zeros(1 << 18))), tmp_path / "run.memtrace")
    found = leaks(trace, capacity_bytes=1 << 30)
    assert len(found.leaks) == 1
    assert "test_leaks.py" in found.leaks[0].site
    assert found.leaks[0].bytes_per_step == pytest.approx(1 << 20, rel=0.01)
    assert found.steps_to_capacity == pytest.approx(1024 - 31, abs=2)


def test_a_leak_of_every_fifth_step_and_a_full_cache(tmp_path):
    kept, window = [], []

    def each(number):
        if number % 5 == 0:
            kept.append(torch.zeros(1 << 18))
        window.append(torch.zeros(1 << 16))
        del window[:-6]

    found = leaks(recorded(lambda: _training(each), tmp_path / "run.memtrace"))
    assert len(found.leaks) == 1
    assert found.leaks[0].bytes_per_step == pytest.approx((1 << 20) / 5, rel=0.05)


def test_the_category_is_that_of_what_is_kept_not_of_what_is_in_use(tmp_path):
    model, kept = nn.Linear(64, 64), []
    optimizer = torch.optim.SGD(model.parameters())

    def run():
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 64)).square().mean()  # the line of the gradients too
            kept.append(loss.detach())
            loss.backward()
            optimizer.step()

    (one,) = leaks(recorded(run, tmp_path / "run.memtrace")).leaks
    assert one.bytes_live > 64 * 64 * 4
    assert one.category != "gradient"


class _Node:
    pass


def test_what_reference_cycles_hold_is_told(tmp_path):
    def each(number):
        node = _Node()
        node.itself, node.tensor = node, torch.zeros(1 << 18)
        if number % 10 == 9:
            gc.collect()

    gc.disable()
    try:
        trace = recorded(lambda: _training(each), tmp_path / "run.memtrace")
    finally:
        gc.enable()
    found = leaks(trace)
    assert found.cycles_told
    assert found.cycle_bytes >= 28 << 20
    assert found.leaks == ()


def _made(sizes):
    """One block a step, kept for good where its size is above 0."""
    rows = [event("alloc", n, 10 * n + 1, size) for n, size in enumerate(sizes) if size]
    return trace_of(events=[*rows, event("alloc", 999, 10 * len(sizes) - 2, 1), event("free", 999, 10 * len(sizes) - 1, 1)],
                    spans=[step(n, 10 * n, 10) for n in range(len(sizes))])  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "is_leak"),
    [
        ([8] * 12, True),
        ([8, 8, 8] + [0] * 9, False),  # warm-up
        ([0] * 5 + [4096] + [0] * 6, False),  # one workspace
        ([0, 0] + [8] * 5 + [0] * 5, False),  # filled up
        ([8] * 4, False),  # too few to tell
        ([0] * 7 + [8] * 5, True),  # begins late
        ([0] * 9 + [8] * 3, False),  # at the end alone
    ],
)
def test_what_is_a_leak(sizes, is_leak):
    found = leaks(_made(sizes))
    assert bool(found.leaks) == is_leak
    assert found.bytes_per_step == (None if len(sizes) <= 5 else pytest.approx(8 if is_leak else 0))
    assert found.cycle_bytes is None
    assert found.steps_to_capacity is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100), st.integers(0, 9), st.integers(0, 10)), max_size=20))
def test_live_bytes_at_ends_are_those_of_brute_force(blocks):
    blocks = [(group, size, first, max(first, end)) for group, size, first, end in blocks]
    columns = np.array(blocks, np.int64).reshape(-1, 4).T
    found = live_at_ends(*columns, 3, 10)
    for group in range(3):
        for number in range(10):
            assert found[group, number] == sum(s for g, s, f, e in blocks if g == group and f <= number < e)


def test_a_saw_is_no_growth():
    assert not is_growth(np.array([0, 5, 10, 0, 5, 10, 0, 5, 10]), 3)
    assert is_growth(np.array([0, 5, 10, 15, 20, 25, 30]), 3)


def test_what_grows_by_copying_reaches_the_capacity_twice_as_soon(tmp_path):
    kept = [torch.zeros(0, 1 << 18)]

    def grow(_):
        kept[0] = torch.cat([kept[0], torch.ones(1, 1 << 18)])

    found = leaks(recorded(lambda: _training(grow), tmp_path / "run.memtrace"), capacity_bytes=1 << 30)
    assert found.bytes_per_step == pytest.approx(1 << 20, rel=0.01)
    assert found.steps_to_capacity == pytest.approx((1024 - 60) / 2, abs=2)
