"""Threads that the program starts: what is recorded of them, and what the trace says of the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import memtrace
from memtrace.analysis import find_wasted_memory
from memtrace.analysis.blocks import blocks
from memtrace.format.schema import CATEGORIES
from memtrace.recording.options import ObserverKind
from memtrace.trace import Trace


def train(width: int) -> None:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(32, width)).sum().backward()
        optimizer.step()
    assert _get_current_dispatch_mode_stack() == []


def run_in_threads(*programs: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run(program: Callable[[], object]) -> None:
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def record(path: Path, observer: ObserverKind, *programs: Callable[[], object]) -> Trace:
    with memtrace.record(path, observer=observer) as recording:
        run_in_threads(*programs)
    return memtrace.load(recording.path)


def accesses_of(trace: Trace, category: str, width: int) -> int:
    """Accesses of the blocks of a category that have the size of the weights of a thread's first layer."""
    table, events = blocks(trace), trace.columns("events", "kind", "block_id")
    chosen = (table.category == CATEGORIES.index(category)) & (table.size == 4 * width * width)
    assert chosen.any()
    return int(chosen[events["block_id"][(events["kind"] == 2) | (events["kind"] == 3)]].sum())


def test_the_dispatch_observer_records_module_calls_and_backward_passes_of_threads(tmp_path: Path) -> None:
    trace = record(tmp_path / "run.memtrace", "dispatch", lambda: train(64), lambda: train(96))
    for width in (64, 96):
        assert accesses_of(trace, "parameter", width) >= 3
        activations = blocks(trace).size == 4 * 32 * width
        assert (blocks(trace).category[activations] == CATEGORIES.index("activation")).any()
    assert trace.manifest.coverage.unseen_accesses == ("threads",)
    assert [note for note in trace.manifest.coverage.notes if "of the threads" in note]
    (waste,) = find_wasted_memory(trace).devices
    assert "threads of the program" in waste.skipped_patterns[0].reason
    assert waste.findings == ()


def test_a_backward_operator_has_the_module_of_its_own_thread(tmp_path: Path) -> None:
    """Every thread numbers its autograd nodes by itself, so numbers of different threads coincide."""
    barrier = threading.Barrier(2)

    def forward_and_backward(width: int) -> None:
        layer = nn.Linear(width, width) if width == 64 else nn.Sequential(nn.Linear(width, width))
        barrier.wait()
        loss = layer(torch.ones(8, width)).sum()
        barrier.wait()  # both have the nodes of the same numbers
        loss.backward()

    trace = record(
        tmp_path / "run.memtrace", "dispatch", lambda: forward_and_backward(64), lambda: forward_and_backward(96)
    )
    ops = trace.ops
    backward = ops[(ops.phase == "backward") & ops.module.notna()]
    modules = backward.groupby("thread").module.agg(lambda names: {trace.name(int(name)) for name in names})
    assert sorted(map(sorted, modules)) == [["Linear"], ["Sequential.0"]]


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_modes_of_a_thread_stay_as_they_are(observer: ObserverKind, tmp_path: Path) -> None:
    class Silent(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    def work() -> None:
        layer, counter = nn.Linear(8, 8), FlopCounterMode(display=False)
        with counter, Silent() as silent:
            stack = _get_current_dispatch_mode_stack()
            layer(torch.ones(4, 8)).sum().backward()
            assert _get_current_dispatch_mode_stack() == stack
            assert stack[-1] is silent
        with pytest.raises(RuntimeError):
            layer(torch.ones(4, 9))
        assert _get_current_dispatch_mode_stack() == []
        assert counter.get_total_flops() > 0

    trace = record(tmp_path / "run.memtrace", observer, work)
    assert trace.manifest.coverage.unseen_accesses == (("threads",) if observer == "dispatch" else ())


def test_a_recording_without_threads_has_no_note(tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.memtrace", observer="dispatch") as recording:
        train_here = nn.Linear(8, 8)
        train_here(torch.ones(4, 8)).sum().backward()
    assert memtrace.load(recording.path).manifest.coverage.unseen_accesses == ()
