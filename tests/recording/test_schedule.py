"""Schedules: what is recorded of the chosen steps, against a recording of all steps, and that the rest costs nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.allocator.plan import plan_allocator
from memtrace.analysis.attribution import op_column, step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.findings import find_wasted_memory
from memtrace.analysis.gaps import find_gaps
from memtrace.analysis.intervals import access_intervals
from memtrace.analysis.leaks import find_leaks
from memtrace.analysis.steps import step_columns
from memtrace.errors import MemtraceError
from memtrace.format.schema import CATEGORIES, EVENT_KINDS
from memtrace.recording.observers.dispatch_observer import DispatchObserver
from memtrace.trace import Trace
from tests.programs.tasks import make_step, mlp

Program = Callable[[], Callable[[], torch.Tensor]]
Schedule = Callable[[int], object]


def leaking() -> Callable[[], torch.Tensor]:
    """A step that keeps a tensor of 4 KiB of every step."""
    step, kept = make_step(mlp()), []

    def leak() -> torch.Tensor:
        kept.append(torch.ones(1024))
        return step()

    return leak


def train(path: Path, num_steps: int, program: Program = lambda: make_step(mlp()), **options: Any) -> list[float]:
    torch.manual_seed(0)
    step = program()
    with memtrace.record(path, **options):
        return [float(step().detach()) for _ in range(num_steps)]


def chosen(steps: set[int]) -> Schedule:
    return lambda step: step in steps


def recorded(trace: Trace) -> list[int]:
    numbers: list[int] = step_rows(trace).number.tolist()
    return numbers


def contents(trace: Trace, step: int) -> Counter[tuple[object, ...]]:
    """What a step did: each event with its kind, operator, bytes, and the category of its block.

    What is older than the recording belongs to other tests too: it is listed, and freed, at any time.
    """
    steps = step_rows(trace)
    place = steps.number.tolist().index(step)
    rows = np.arange(steps.first_row[place], steps.end_row[place])
    events, table = trace.columns("events", "kind", "block_id", "op_id", "size"), blocks(trace)
    block, op = events["block_id"][rows], events["op_id"][rows]
    names = [trace.name(int(name)) if name >= 0 else None for name in op_column(trace, op, "name")]
    category = [CATEGORIES[code] for code in table.category[block]]
    # The free of a block that an earlier step allocated: how the block was used there is not known to both.
    is_own = (table.step[block] == step).tolist()
    is_older = (table.alloc_event[block] < 0).tolist()
    kinds = [EVENT_KINDS[code] for code in events["kind"][rows]]
    sizes = table.size[block].tolist()
    return Counter(
        (kind, name, size, label if own or label in ("parameter", "gradient", "optimizer_state") else None)
        for kind, name, size, label, own, older in zip(kinds, names, sizes, category, is_own, is_older, strict=True)
        if kind != "baseline" and not (kind == "free" and older)
    )


def live_bytes_at(trace: Trace, row: int) -> int:
    """Bytes of the blocks that are live before a row and were allocated since the recording began.

    What is older belongs to other tests too, whose garbage may be freed at any time.
    """
    table = blocks(trace)
    is_live = (
        (table.alloc_event >= 0) & (table.alloc_event < row) & ((table.free_event < 0) | (table.free_event >= row))
    )
    return int(table.size[is_live].sum())


def live_at_starts(trace: Trace) -> dict[int, int]:
    steps = step_rows(trace)
    rows = zip(steps.number.tolist(), steps.first_row.tolist(), strict=True)
    return {number: live_bytes_at(trace, row) for number, row in rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("whole") / "run.memtrace"
    train(path, 12)
    return memtrace.load(path)


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_the_chosen_steps_are_those_of_a_whole_recording(observer: str, whole: Trace, tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    losses = train(tmp_path / "some", 12, schedule=schedule, observer=observer)
    assert losses == train(tmp_path / "all", 12, observer=observer)
    some, every = memtrace.load(tmp_path / "some"), memtrace.load(tmp_path / "all")
    assert recorded(some) == [3, 4, 7, 8]
    for step in recorded(some):
        assert contents(some, step) == contents(every, step)
    starts = live_at_starts(every)
    assert live_at_starts(some) == {step: starts[step] for step in recorded(some)}
    steps, all_steps = step_columns(some), step_columns(every)
    # Above the bytes that are live in the end: other tests may leave garbage behind, which is older than both.
    np.testing.assert_array_equal(
        steps.peak_bytes - steps.live_end_bytes, (all_steps.peak_bytes - all_steps.live_end_bytes)[recorded(some)]
    )
    assert some.manifest.coverage.program_steps == 12


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.sets(st.integers(0, 11)), marks=st.booleans())
def test_any_schedule_records_its_steps_and_the_live_blocks_at_their_starts(
    steps: set[int], marks: bool, whole: Trace, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace", schedule=chosen(steps)) as recording:
        for _ in range(12):
            float(step().detach())
            if marks:
                recording.step()
    trace = memtrace.load(recording.path)
    assert recorded(trace) == sorted(steps)
    starts = live_at_starts(whole)
    if not marks:  # marked steps begin and end elsewhere
        assert live_at_starts(trace) == {number: starts[number] for number in sorted(steps)}
        for number in steps:
            assert contents(trace, number) == contents(whole, number)
    assert not find_gaps(trace).cut_rows(step_rows(trace).first_row, step_rows(trace).end_row - 1).any()
    # Whatever happened in the gaps, all that is live in the end is known.
    ends = trace.num_rows("events"), whole.num_rows("events")
    assert live_bytes_at(trace, ends[0]) == live_bytes_at(whole, ends[1])


def test_every_records_the_first_two_steps_and_each_multiple(tmp_path: Path) -> None:
    train(tmp_path / "run.memtrace", 12, every=5)
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert recorded(trace) == [0, 1, 5, 10]
    coverage = compute_coverage(trace)
    assert (coverage.num_steps, coverage.program_steps) == (4, 12)
    assert coverage.gaps_ns > 0
    assert any("4 of 12 steps were recorded (every=5)" in note for note in coverage.notes)


def test_a_step_of_several_optimizers_is_recorded_whole(tmp_path: Path) -> None:
    models = [torch.nn.Linear(16, 16) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    with memtrace.record(tmp_path / "run.memtrace", schedule=chosen({0, 1, 3, 6})):
        for _ in range(8):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(4, 16)).sum().backward()
                optimizer.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert set(recorded(trace)) >= {0, 1, 3, 6}
    assert set(recorded(trace)) <= {0, 1, 2, 3, 6}  # the end of the first round is known in the second one
    num_reads = dict(zip(recorded(trace), step_columns(trace).num_reads.tolist(), strict=True))
    assert num_reads[1] == num_reads[3] == num_reads[6]


def test_steps_of_a_loader_and_marked_beginnings_follow_the_schedule(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "loader", every=3) as recording:
        for _ in recording.steps(range(7)):
            step()
    assert recorded(memtrace.load(recording.path)) == [0, 1, 3, 6]
    with memtrace.record(tmp_path / "marks", every=3) as recording:
        for _ in range(7):
            validation = torch.ones(512)
            recording.begin_step()
            step()
            recording.step()
            del validation
    trace = memtrace.load(recording.path)
    assert recorded(trace) == [0, 1, 3, 6]
    # Between two steps, only the one before is known; validation before a recorded step belongs to the gap.
    assert find_gaps(trace).contain_rows(step_rows(trace).first_row[2:] - 1).all()


def test_nothing_is_installed_between_the_recorded_steps(tmp_path: Path) -> None:
    step, call = make_step(mlp()), torch.nn.Module._wrapped_call_impl
    originals = call.__code__, torch.nn.Module.__init__.__code__
    for observer in ("native", "dispatch"):
        with memtrace.record(tmp_path / observer, schedule=chosen({1}), observer=observer) as recording:
            step()
            assert recording.is_recording
            assert call.__code__ is not originals[0]
            step()
            assert not recording.is_recording
            assert (call.__code__, torch.nn.Module.__init__.__code__) == originals
            assert not any(isinstance(mode, DispatchObserver) for mode in
                           torch.utils._python_dispatch._get_current_dispatch_mode_stack())  # fmt: skip


def test_blocks_are_told_apart_although_their_address_is_used_again_in_a_gap(tmp_path: Path) -> None:
    """Blocks of one size, freed and allocated again while nothing is observed, get the same addresses."""
    kept: list[torch.Tensor] = []
    with memtrace.record(tmp_path / "run.memtrace", schedule=chosen({0, 2})) as recording:
        kept.extend(torch.ones(256) for _ in range(20))
        recording.step()
        addresses = {tensor.data_ptr() for tensor in kept}
        kept.clear()
        kept.extend(torch.ones(256) for _ in range(20))
        is_used_again = bool(addresses & {tensor.data_ptr() for tensor in kept})
        recording.step()
        for tensor in kept:
            tensor.add_(1)
        recording.step()
    trace = memtrace.load(recording.path)
    table, gaps = blocks(trace), find_gaps(trace)
    assert is_used_again
    ours = np.flatnonzero((table.size == 1024) & (table.alloc_event >= 0))
    in_gap = gaps.contain_rows(table.alloc_event[ours])
    assert (int((~in_gap).sum()), int(in_gap.sum())) == (20, 20)
    assert gaps.contain_rows(table.free_event[ours[~in_gap]]).all()
    assert (table.free_event[ours[in_gap]] < 0).all()
    assert (table.num_writes[ours[in_gap]] == 1).all()


def test_growth_is_measured_in_steps_of_the_program(tmp_path: Path) -> None:
    train(tmp_path / "some", 101, leaking, every=10)
    train(tmp_path / "all", 30, leaking)
    sampled, whole = (find_leaks(memtrace.load(tmp_path / name)) for name in ("some", "all"))
    assert whole.bytes_per_step == pytest.approx(4096)
    assert sampled.bytes_per_step == pytest.approx(4096, rel=0.01)


def test_no_interval_and_no_finding_is_measured_across_a_gap(tmp_path: Path) -> None:
    held: list[torch.Tensor] = []

    def program() -> Callable[[], torch.Tensor]:
        step = make_step(mlp())

        def hold() -> torch.Tensor:
            held[:] = [torch.ones(1 << 18)]  # its use, in the step after this one, is seldom seen
            return step()

        return hold

    train(tmp_path / "run.memtrace", 12, program, every=4)
    trace = memtrace.load(tmp_path / "run.memtrace")
    intervals = access_intervals(trace)
    assert len(intervals) > 0
    assert not find_gaps(trace).cut_rows(intervals.first_event, intervals.second_event).any()
    findings = find_wasted_memory(trace).devices[0].findings
    assert not [finding for finding in findings if finding.wasted_bytes >= 1 << 20 and "leak" in finding.pattern]


def test_a_schedule_that_fails_ends_the_recording_of_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(step: int) -> bool:
        if step == 2:
            raise ValueError("no such step")
        return True

    assert train(tmp_path / "run.memtrace", 5, schedule=failing) == train(tmp_path / "all", 5)
    assert recorded(memtrace.load(tmp_path / "run.memtrace")) == [0, 1]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert "from step 2 on" in caplog.text


def test_a_schedule_is_asked_once_about_each_step(tmp_path: Path) -> None:
    asked: list[int] = []

    def schedule(step: int) -> bool:
        asked.append(step)
        return step % 2 == 0

    train(tmp_path / "run.memtrace", 6, schedule=schedule)
    assert asked == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0 is out of range"),
        ({"every": 2, "schedule": bool}, "exclude each other"),
        ({"schedule": 7}, "schedule is a int"),
    ],
)
def test_options_of_schedules_are_checked(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match=message):
        memtrace.record(tmp_path / "run.memtrace", **options)


def test_the_last_recorded_steps_are_kept(tmp_path: Path) -> None:
    train(tmp_path / "run.memtrace", 40, every=4, last_steps=2)
    numbers = recorded(memtrace.load(tmp_path / "run.memtrace"))
    assert numbers[-2:] == [32, 36]
    assert len(numbers) <= 4


def test_a_recording_inside_a_scheduled_one_is_whole(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "outer", schedule=chosen({1})):
        for _ in range(3):
            step()
        with memtrace.record(tmp_path / "inner") as inner:
            for _ in range(3):
                step()
            assert inner.is_recording
        for _ in range(3):
            step()
    assert len(recorded(memtrace.load(tmp_path / "inner"))) == 3
    assert 1 in recorded(memtrace.load(tmp_path / "outer"))


def test_an_interrupt_in_a_pause_or_a_resumption_leaves_the_program_as_it_was(tmp_path: Path) -> None:
    class Interrupt(BaseException):
        pass

    code = torch.nn.Module._wrapped_call_impl.__code__
    for point in range(0, 40, 4):
        calls = 0

        def interrupting(frame: Any, event: str, argument: object, point: int = point) -> Any:
            nonlocal calls
            if event == "call" and frame.f_code.co_filename.endswith(("pauses.py", "step_windows.py", "background.py")):
                calls += 1
                if calls == point:
                    sys.settrace(None)
                    raise Interrupt
            return None

        step = make_step(mlp())
        with memtrace.record(tmp_path / f"{point}", schedule=chosen({0, 2, 4})):
            for number in range(8):
                if number == 1:
                    sys.settrace(interrupting)
                with suppress(Interrupt):
                    step()
            sys.settrace(None)
        assert torch.nn.Module._wrapped_call_impl.__code__ is code
        assert {0, 4} <= set(recorded(memtrace.load(tmp_path / f"{point}"))) | {4 if calls >= point else -1}


def test_a_forked_child_of_a_paused_recording_is_not_recorded(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch, memtrace\n"
        "with memtrace.record(sys.argv[1], schedule=lambda step: step == 0) as recording:\n"
        "    model = torch.nn.Linear(4, 4); optimizer = torch.optim.SGD(model.parameters())\n"
        "    for _ in range(3):\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
        "    if os.fork() == 0:\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); os._exit(int(recording.is_recording))\n"
        "    assert os.wait()[1] == 0\n"
    )
    trace = tmp_path / "run.memtrace"
    subprocess.run([sys.executable, "-c", program, trace], check=True, timeout=120)
    assert recorded(memtrace.load(trace)) == [0]


def test_the_allocator_is_not_replayed_without_the_allocations_of_the_gaps(tmp_path: Path) -> None:
    train(tmp_path / "run.memtrace", 8, every=4)
    trace = memtrace.load(tmp_path / "run.memtrace")
    with pytest.raises(MemtraceError, match="lacks the allocations between the recorded steps"):
        plan_allocator(trace)
