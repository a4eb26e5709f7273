"""Interrupts while a recording is entered or left: everything is undone, and the interrupt reaches the program.

MEMTRACE_FAULT_POINTS sets how many points each test tries (default 12).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer

import memtrace
from memtrace.recording.options import ObserverKind
from tests.programs.tasks import make_step, mlp
from tests.recording.helpers import NUM_FAULT_POINTS, wait_until


class Interrupt(BaseException):
    """What the signal handler of the program raises."""


def hooks() -> tuple[object, ...]:
    return (
        nn.Module.__call__,
        torch.autograd.graph._engine_run_backward,
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        torch._C._len_torch_dispatch_stack(),
    )


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def descriptors_in(folder: Path) -> list[str]:
    links = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(str(folder))]


@contextmanager
def everything_undone(folder: Path, observer: ObserverKind, step: Callable[[], object]) -> Iterator[None]:
    """Check that the ``with`` block leaves nothing behind, and that the next recording works."""
    before, threads, python_threads = hooks(), num_threads(), threading.active_count()
    yield
    assert hooks() == before
    assert descriptors_in(folder) == []
    assert threading.active_count() <= python_threads
    wait_until(lambda: num_threads() <= threads)
    with memtrace.record(folder / "next.memtrace", observer=observer) as recording:
        assert recording.is_recording
        assert recording.path.name == "next.memtrace"
        step()
    assert memtrace.load(recording.path).manifest.finished


class InterruptAtLine:
    """Raises Interrupt at the n-th line of memtrace that this thread runs.

    Observers are left out: a trace function, unlike a signal, can raise just before a ``with`` releases its lock.
    """

    def __init__(self, line: int) -> None:
        self.num_lines = 0
        self._line = line

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if "/memtrace/recording/" not in file or "/observers/" in file:
            return None
        self.num_lines += 1
        if self.num_lines == self._line:
            raise Interrupt
        return self.trace


def record_with_interrupt(path: Path, observer: ObserverKind, step: Callable[[], object], line: int) -> int:
    """Record one step; return how many lines of memtrace this thread ran until it left, or was interrupted."""
    tracer, previous = InterruptAtLine(line), sys.gettrace()
    recording = memtrace.record(path, observer=observer)
    try:
        sys.settrace(tracer.trace)
        with recording:
            step()
    finally:
        sys.settrace(previous)
    return tracer.num_lines


@contextmanager
def interrupt_that_arrives() -> Iterator[None]:
    """Check that the ``with`` block raises Interrupt, or that Python reports it: it drops what callbacks raise."""
    dropped: list[object] = []
    previous, sys.unraisablehook = sys.unraisablehook, lambda report: dropped.append(report.exc_type)
    try:
        yield
    except Interrupt:
        return
    finally:
        sys.unraisablehook = previous
    assert dropped == [Interrupt]


@pytest.mark.parametrize("observer", ["native", pytest.param("dispatch", marks=pytest.mark.slow)])
def test_an_exception_at_any_line_undoes_everything(observer: ObserverKind, tmp_path: Path) -> None:
    step = make_step(mlp())
    record_with_interrupt(tmp_path / "first.memtrace", observer, step, 0)
    num_lines = record_with_interrupt(tmp_path / "second.memtrace", observer, step, 0)
    for point in range(NUM_FAULT_POINTS):
        line = 1 + point * num_lines // NUM_FAULT_POINTS
        with everything_undone(tmp_path, observer, step), interrupt_that_arrives():
            record_with_interrupt(tmp_path / "interrupted.memtrace", observer, step, line)


@pytest.mark.parametrize("phase", ["enter", "leave"])
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
def test_a_signal_at_any_moment_undoes_everything(phase: str, tmp_path: Path) -> None:
    step = make_step(mlp())

    def record(delay_seconds: float) -> float:
        """Record one step, with a signal some time after the phase began; return how long the phase took."""
        recording = memtrace.record(tmp_path / "interrupted.memtrace")
        times = [time.perf_counter()]
        if phase == "enter":
            signal.setitimer(signal.ITIMER_REAL, delay_seconds)
        with recording:
            times.append(time.perf_counter())
            step()
            times.append(time.perf_counter())
            if phase == "leave":
                signal.setitimer(signal.ITIMER_REAL, delay_seconds)
        times.append(time.perf_counter())
        return times[1] - times[0] if phase == "enter" else times[3] - times[2]

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    duration = max(record(0) for _ in range(3))
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for point in range(NUM_FAULT_POINTS):
            with everything_undone(tmp_path, "native", step):
                try:
                    record(max(1e-6, duration * point / NUM_FAULT_POINTS))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_storm_of_signals_undoes_everything(tmp_path: Path) -> None:
    step, is_armed = make_step(mlp()), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_armed:
            raise Interrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with everything_undone(tmp_path, "native", step):
            try:
                is_armed = True
                with memtrace.record(tmp_path / "interrupted.memtrace"):
                    step()
            except Interrupt:
                is_armed = False
            is_armed = False
            # After many interrupts the rest of the recording ends on its own thread.
            wait_until(lambda: not sys.modules["memtrace_native"].status()["active"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            wait_until(lambda: descriptors_in(tmp_path) == [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_an_exit_stack_can_hold_a_recording(tmp_path: Path) -> None:
    from contextlib import ExitStack

    with ExitStack() as stack:
        recording = stack.enter_context(memtrace.record(tmp_path / "run.memtrace"))
        make_step(mlp())()
    assert memtrace.load(recording.path).manifest.finished


def test_control_c_while_recording_ends_in_a_whole_trace(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), memtrace.record(tmp_path / "run.memtrace"):
        make_step(mlp())()
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    assert memtrace.load(tmp_path / "run.memtrace").manifest.stop_reason == "KeyboardInterrupt left the recorded block"
