"""Memory from outside torch's allocators: NumPy arrays, shared memory, mapped files."""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.peak import find_peak
from memtrace.format.schema import CATEGORIES
from memtrace.recording.options import ObserverKind
from memtrace.trace import Trace
from tests.recording.helpers import MIB

FLUSH_LATE = 600.0
"""Seconds after which a recording writes its first part: nothing but the free itself can reveal that memory is free."""


def record(program: Callable[[], None], path: Path) -> Trace:
    with memtrace.record(path, flush_seconds=FLUSH_LATE):
        program()
    return memtrace.load(path)


def traced_numpy_bytes() -> int:
    """Bytes of the data of large NumPy arrays that are live. Small ones are those of the writer."""
    arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    sizes = [trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces]
    return sum(size for size in sizes if size >= MIB)


def test_the_peak_of_numpy_memory_is_that_of_tracemalloc(tmp_path: Path) -> None:
    rng, traced_bytes = np.random.default_rng(0), []
    sizes = rng.integers(1 * MIB, 3 * MIB, 40)

    def program() -> None:
        kept: list[torch.Tensor] = []
        before = traced_numpy_bytes()
        for size in sizes:
            kept.append(torch.from_numpy(np.zeros(size, np.uint8)))
            kept[-1].fill_(1)
            traced_bytes.append(traced_numpy_bytes() - before)
            del kept[: int(rng.integers(0, 3))]

    gc.collect()  # what other tests left behind must not be freed while it records
    tracemalloc.start()
    try:
        with memtrace.record(tmp_path / "run.memtrace", flush_seconds=FLUSH_LATE):
            program()
    finally:
        tracemalloc.stop()
    trace = memtrace.load(tmp_path / "run.memtrace")
    recorded = find_peak(trace, "cpu").requested.bytes - compute_coverage(trace).baseline_bytes
    # Each array has some bytes besides its data.
    assert recorded == pytest.approx(max(traced_bytes), rel=1e-3)


def shared() -> torch.Tensor:
    return torch.zeros(MIB // 4).share_memory_()


def mapped(path: Path) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(str(path / "weights.bin"), shared=True, nbytes=MIB)
    return torch.empty(0).set_(storage, 0, (MIB // 4,))  # type: ignore[call-overload]


def buffer() -> torch.Tensor:
    return torch.frombuffer(bytearray(MIB), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["shared", "mapped", "buffer", "array"])
def test_a_free_is_recorded_before_the_next_allocation(kind: str, tmp_path: Path) -> None:
    make: dict[str, Callable[[], torch.Tensor]] = {
        "shared": shared,
        "mapped": lambda: mapped(tmp_path),
        "buffer": buffer,
        "array": lambda: torch.from_numpy(np.zeros(MIB // 4, np.float32)),
    }

    def program() -> None:
        for _ in range(5):
            tensor = make[kind]()
            tensor.add_(1)
            del tensor
            torch.zeros(1000)

    trace = record(program, tmp_path / "run.memtrace")
    table = blocks(trace)
    is_add = np.array([name >= 0 and trace.name(int(name)) == "aten::add_.Tensor" for name in table.op_name])
    foreign = np.flatnonzero((table.size == MIB) & is_add)
    markers = table.alloc_event[np.flatnonzero(table.size == 4000)]
    assert len(foreign) == len(markers) == 5
    assert (table.free_event[foreign] >= 0).all()
    assert (table.free_event[foreign] < markers).all()


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    """torch recognises shared memory by its deleter."""
    tensor = torch.zeros(100).share_memory_()
    with memtrace.record(tmp_path / "run.memtrace"):
        tensor.add_(1)
        handle = tensor.untyped_storage()._share_filename_cpu_()  # type: ignore[attr-defined]
        again = torch.UntypedStorage._new_shared_filename_cpu(*handle)  # type: ignore[attr-defined]
        again.fill_(0)
    assert tensor.sum() == 0


def test_memory_that_a_label_sees_first_belongs_to_no_operator(tmp_path: Path) -> None:
    """It has the line, the step and the time at which the program first uses it."""

    def program() -> None:
        for _ in range(10):
            torch.zeros(1000)
        model = nn.Linear(500, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            batch = torch.from_numpy(np.ones((64, 500), np.float32))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(program, tmp_path / "run.memtrace")
    table = blocks(trace)
    batches = np.flatnonzero(table.size == 64 * 500 * 4)
    assert [CATEGORIES[category] for category in table.category[batches]] == ["input"] * 3
    assert (table.op_name[batches] < 0).all()
    assert table.step[batches].tolist() == [0, 1, 2]
    for stack in table.stack[batches]:
        lines = [frame.line for frame in trace.frames(int(stack)) if frame.function.endswith("program")]
        assert lines == [program.__code__.co_firstlineno + 7]


def test_frees_after_the_recording_do_no_harm(tmp_path: Path) -> None:
    freed = []

    class Array(np.ndarray):  # type: ignore[type-arg]
        def __del__(self) -> None:
            freed.append(self.nbytes)

    with memtrace.record(tmp_path / "run.memtrace"):
        tensor = torch.from_numpy(np.zeros(1000, np.float32).view(Array))
        tensor.add_(1)
    del tensor
    assert 4000 in freed


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_copies_of_storages_begin_where_they_are_made(observer: ObserverKind, tmp_path: Path) -> None:
    """deepcopy makes storages without asking torch's allocator: they are not older than the recording."""
    model = nn.Linear(257, 67)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer) as recording:
        before = torch.ones(1001)
        copied = copy.deepcopy(model.state_dict())
        after = torch.ones(1003)
        del copied
        last = torch.ones(1007)
    trace = memtrace.load(recording.path)
    events = trace.events[trace.events.kind.isin(["baseline", "alloc", "free"])]
    sizes = {model.weight.nbytes: "weight", before.nbytes: "before", after.nbytes: "after", last.nbytes: "last"}
    story = [f"{kind} {sizes[size]}" for kind, size in zip(events.kind, events["size"], strict=True) if size in sizes]
    assert story[:6] == [
        "baseline weight", "alloc before", "alloc weight", "alloc after", "free weight", "alloc last"
    ]  # fmt: skip
    table = blocks(trace)
    (copied_block,) = np.flatnonzero((table.size == model.weight.nbytes) & (table.stack >= 0))
    functions = [frame.function for frame in trace.frames(int(table.stack[copied_block]))]
    assert "test_copies_of_storages_begin_where_they_are_made" in functions


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_memory_that_autograd_alone_keeps_is_older_than_the_recording(observer: ObserverKind, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(67, 71), nn.Tanh(), nn.Linear(71, 1))
    model(torch.randn(8, 67)).sum().backward()  # the gradients have no Python objects
    loss = model(torch.randn(37, 67)).sum()
    with memtrace.record(tmp_path / "run.memtrace", observer=observer) as recording:
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    events = memtrace.load(recording.path).events
    older = events[events.kind == "baseline"]["size"].value_counts()
    weight_bytes, input_bytes, output_bytes = 4 * 67 * 71, 4 * 37 * 67, 4 * 37 * 71
    assert (older[weight_bytes], older[input_bytes], older[output_bytes]) == (2, 1, 1)
