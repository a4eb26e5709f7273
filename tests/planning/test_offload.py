"""Offload plans: the papers' arithmetic, brute force on small problems, and recorded programs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memtrace
from memtrace import MemtraceError
from memtrace.analysis.bandwidth import CARDS, CopyBandwidths, CopyCost, bandwidths_from_rates, bandwidths_of_card
from memtrace.planning.bus import Bus, fits_interval, free_time_ns
from memtrace.planning.offload import plan_offload
from memtrace.planning.offload_problem import OffloadProblem
from memtrace.planning.offload_schedule import OffloadSchedule, schedule_copies
from memtrace.planning.offload_search import EXHAUSTIVE_GROUPS, choose_tensors, least_peak_bytes
from tests.programs.planned import PROGRAMS, train

EQUAL = bandwidths_from_rates(1, 1)
"""1 GB/s: one nanosecond for each byte."""


@given(st.integers(1, 10**9), st.integers(0, 10**10), st.floats(0.1, 100))
def test_the_inequalities_of_the_papers_agree_where_bandwidths_are_equal(size: int, interval: int, rate: float) -> None:
    costs = bandwidths_from_rates(rate, rate)
    swap_ns = size / rate
    pinpointing, capuchin = 2 * swap_ns <= interval, (interval - swap_ns) - swap_ns >= 0
    if abs(interval - 2 * swap_ns) > 1e-6 * interval:  # apart from rounding
        assert fits_interval(size, interval, costs) == pinpointing == capuchin


def test_free_time_is_that_of_the_published_bandwidths() -> None:
    costs = bandwidths_from_rates(6.4, 6.3)
    assert fits_interval(79_360, 25_000, costs)
    assert not fits_interval(79_380, 25_000, costs)
    assert free_time_ns(63_000, 25_000, costs) == pytest.approx(25_000 - 10_000 - 63_000 / 6.4)


def test_copies_of_one_direction_wait_for_each_other_and_not_for_the_other_direction() -> None:
    bus = Bus(CopyBandwidths(CopyCost(10, 1), CopyCost(0, 2), "test"))
    assert bus.to_host.copy(100, 0) == 110
    assert bus.to_host.copy(100, 50) == 220
    assert bus.to_host.copy(100, 300) == 410
    assert bus.to_device.copy(100, 50) == 250
    assert (bus.to_host.busy_ns, bus.to_device.busy_ns) == (330, 200)


def test_cards_are_found_by_name() -> None:
    assert bandwidths_of_card("titan xp") is CARDS["TITAN Xp"]
    rates = [bandwidths_of_card(name).h2d.gb_per_s for name in ("V100", "A100", "H100")]
    assert rates == pytest.approx([15.754, 31.508, 63.015], abs=1e-3)
    with pytest.raises(MemtraceError, match=r"unknown card 'Voodoo': memtrace knows TITAN Xp, "):
        bandwidths_of_card("Voodoo")


@st.composite
def problems(draw: st.DrawFn, max_tensors: int = 4) -> OffloadProblem:
    """A forward that saves tensors in turn and a backward that reads them in the opposite order."""
    count = draw(st.integers(1, max_tensors))
    size = np.array(draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)))
    duration = st.integers(0, 60)
    num_pieces = 2 * count + 1
    length = draw(st.lists(duration, min_size=num_pieces, max_size=num_pieces))
    ready = np.arange(count) + 1
    back = 2 * count - np.arange(count)
    free = np.minimum(ready + np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))), back)
    held = np.array(draw(st.lists(st.integers(0, 60), min_size=num_pieces, max_size=num_pieces)))
    for tensor in range(count):
        held[ready[tensor] : back[tensor] + 1] += size[tensor]
    return OffloadProblem(
        piece_ns=np.concatenate([[0], np.cumsum(length)]).astype(float),
        piece_bytes=held,
        piece_node=np.concatenate([[-1], np.arange(count), np.arange(count)[::-1]]),
        is_read=np.arange(num_pieces) > count,
        size=size,
        group=np.arange(count),
        node=np.arange(count),
        read_node=np.arange(count),
        ready=ready,
        free=free,
        variable=free,
        back=back,
    )


def replay(problem: OffloadProblem, schedule: OffloadSchedule) -> list[int]:
    """The peak of each piece, tensor by tensor."""
    level = problem.piece_bytes.tolist()
    for tensor, leave, fetch in zip(schedule.tensor, schedule.leave, schedule.fetch, strict=True):
        for piece in range(leave, fetch):
            level[piece] -= int(problem.size[tensor])
    return level


@settings(max_examples=150, deadline=None)
@given(problems(max_tensors=6), st.floats(0, 1), st.floats(0.2, 20), st.floats(0.2, 20))
def test_a_plan_keeps_its_limit_and_its_copies_fit_into_its_step(
    problem: OffloadProblem, share: float, d2h: float, h2d: float
) -> None:
    lowest, highest = least_peak_bytes(problem), int(problem.piece_bytes.max())
    limit = lowest + int(share * (highest - lowest))
    schedule = choose_tensors(problem, limit, bandwidths_from_rates(d2h, h2d))
    if schedule is None:
        return
    assert replay(problem, schedule) == schedule.level.tolist()
    assert schedule.peak_bytes <= limit
    assert (schedule.leave >= problem.free[schedule.tensor]).all()
    assert (schedule.fetch <= problem.back[schedule.tensor]).all()
    step_ns = problem.piece_ns[-1] + schedule.added_ns
    assert max(schedule.to_host_ns, schedule.to_device_ns) <= step_ns * (1 + 1e-9)


def brute_force(problem: OffloadProblem, limit: int) -> float | None:
    """The least added time over all sets of tensors, all waits of forward and all starts of the copies back in order.

    A tensor leaves in a chosen piece, for whose start the program waits, and its copy back is requested at the start of
    another. Written for a bus of one byte per nanosecond in each direction.
    """
    best: float | None = None
    count = len(problem.size)
    ranges = [
        [None, *((leave, fetch) for leave in range(problem.free[tensor], problem.back[tensor])
                 for fetch in range(max(leave + 1, count + 1), problem.back[tensor] + 1))]
        for tensor in range(count)
    ]  # fmt: skip
    for moments in product(*ranges):
        added = _run(problem, moments, limit)
        if added is not None and (best is None or added < best):
            best = added
    return best


def _run(problem: OffloadProblem, moments: tuple[tuple[int, int] | None, ...], limit: int) -> float | None:
    # Tensors are copied back in the order in which backward reads them, the last one first.
    fetches = [moment[1] for moment in moments if moment]
    if fetches != sorted(fetches, reverse=True):
        return None
    level = problem.piece_bytes.tolist()
    for tensor, moment in enumerate(moments):
        for piece in range(*(moment or (0, 0))):
            level[piece] -= int(problem.size[tensor])
    if max(level) > limit:
        return None
    out_free = in_free = delay = 0.0
    out_end: dict[int, float] = {}
    in_end: dict[int, float] = {}
    for piece in range(len(level)):
        now = problem.piece_ns[piece] + delay
        for tensor, moment in enumerate(moments):
            if moment and problem.ready[tensor] == piece:
                out_free = out_end[tensor] = max(out_free, now) + float(problem.size[tensor])
        for tensor, moment in enumerate(moments):
            if moment and moment[0] == piece:
                now = max(now, out_end[tensor])
        for tensor in sorted(range(count := len(moments)), key=lambda tensor: int(problem.back[tensor])):
            moment = moments[tensor]
            if moment and moment[1] == piece:
                in_free = in_end[tensor] = max(in_free, now) + float(problem.size[tensor])
        for tensor in range(count):
            if moments[tensor] and problem.back[tensor] == piece:
                now = max(now, in_end[tensor])
        delay = now - problem.piece_ns[piece]
    return delay


@settings(max_examples=12, deadline=None)
@given(problems(max_tensors=3), st.floats(0, 1))
def test_no_other_plan_adds_less_time(problem: OffloadProblem, share: float) -> None:
    lowest, highest = least_peak_bytes(problem), int(problem.piece_bytes.max())
    limit = lowest + int(share * (highest - lowest))
    schedule, best = choose_tensors(problem, limit, EQUAL), brute_force(problem, limit)
    assert (schedule is None) == (best is None)
    if schedule is not None and best is not None:
        assert schedule.added_ns == pytest.approx(best, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(problems(max_tensors=EXHAUSTIVE_GROUPS + 4), st.floats(0, 1))
def test_many_tensors_keep_the_limit_too(problem: OffloadProblem, share: float) -> None:
    lowest, highest = least_peak_bytes(problem), int(problem.piece_bytes.max())
    limit = lowest + int(share * (highest - lowest))
    schedule = choose_tensors(problem, limit, EQUAL)
    assert schedule is None or schedule.peak_bytes <= limit


def test_without_bandwidths_the_peak_depends_on_no_time() -> None:
    problem = OffloadProblem(
        piece_ns=np.array([0.0, 1, 2, 3]),
        piece_bytes=np.array([5, 15, 20]),
        piece_node=np.array([-1, 0, 0]),
        is_read=np.array([False, False, True]),
        size=np.array([10]),
        group=np.array([0]),
        node=np.array([0]),
        read_node=np.array([0]),
        ready=np.array([1]),
        free=np.array([1]),
        variable=np.array([1]),
        back=np.array([2]),
    )
    schedule = schedule_copies(problem, np.array([True]), 20, None)
    assert schedule is not None
    assert schedule.level.tolist() == [5, 5, 20]


def test_a_peak_that_cannot_be_reached_is_an_error_with_the_least_peak(tmp_path: Path) -> None:
    training = PROGRAMS[0].small(4)
    with memtrace.record(tmp_path / "run", model=training.model):
        train(training)
    with pytest.raises(MemtraceError, match=r"the least peak it can reach is "):
        plan_offload(memtrace.load(tmp_path / "run"), device="cpu", bandwidths=EQUAL, target_bytes=1000)
