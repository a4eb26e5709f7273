"""Recordings against ground truth: torch's own profiler, the live tensors, and training without a recording."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace
from tests.programs.tasks import TASKS, Task, make_step
from tests.recording.helpers import live_bytes, part_written, record_steps

all_tasks = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
both_observers = pytest.mark.parametrize("observer", ["native", "dispatch"])


@dataclass(frozen=True)
class TrainedTask:
    """Three steps of a task, trained without and with a recording from the same seed."""

    losses: list[torch.Tensor]
    recorded_losses: list[torch.Tensor]
    trace: Trace


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Task], str], TrainedTask]:
    """Trains a task under an observer, once per session."""

    @cache
    def train(task: Callable[[], Task], observer: str) -> TrainedTask:
        torch.manual_seed(1)
        step = make_step(task())
        losses = [step() for _ in range(3)]
        torch.manual_seed(1)
        step = make_step(task())
        path = tmp_path_factory.mktemp(task.__name__) / "run.memtrace"
        with memtrace.record(path, observer=observer):
            recorded_losses = [step() for _ in range(3)]
        return TrainedTask(losses, recorded_losses, memtrace.load(path))

    return train


@all_tasks
@both_observers
def test_results_are_bitwise_those_without_recording(
    trained: Callable[[Callable[[], Task], str], TrainedTask], task: Callable[[], Task], observer: str
) -> None:
    result = trained(task, observer)
    assert all(torch.equal(a, b) for a, b in zip(result.losses, result.recorded_losses, strict=True))


@all_tasks
def test_both_observers_record_the_same_blocks(
    trained: Callable[[Callable[[], Task], str], TrainedTask], task: Callable[[], Task]
) -> None:
    """The same sizes, categories, reads and writes, except for the differences in the docstring of DispatchObserver."""
    native, dispatch = (describe_blocks(trained(task, observer).trace) for observer in ("native", "dispatch"))
    assert native.lasting == dispatch.lasting
    assert not dispatch.temporary - native.temporary


@dataclass(frozen=True)
class BlockDescriptions:
    """Blocks without those that differ between the observers: sums of gradients and biases."""

    lasting: Counter[object]
    """Blocks with a category that outlives an operator: allocating operator, size, category, reads, writes."""
    temporary: Counter[object]
    """Other blocks: allocating operator, size."""


def describe_blocks(trace: Trace) -> BlockDescriptions:
    table, lasting, temporary = blocks(trace), Counter[object](), Counter[object]()
    for row in np.flatnonzero((table.alloc_event >= 0) & (table.op_name >= 0) & (table.size > 8)):
        name, size = trace.name(int(table.op_name[row])), int(table.size[row])
        category = CATEGORIES[table.category[row]]
        if name.startswith(("aten::empty", "aten::add")):
            continue
        if category in ("temporary", "workspace", "unknown"):
            temporary[name, size] += 1
        else:
            lasting[name, size, category, int(table.num_reads[row]), int(table.num_writes[row])] += 1
    return BlockDescriptions(lasting, temporary)


@all_tasks
def test_allocations_are_those_of_torch_profiler(task: Callable[[], Task], tmp_path: Path) -> None:
    trained_task = task()
    # The number of a step can determine its sizes, so the profiled and the recorded step have the same number.
    step = make_step(Task(trained_task.model, lambda _: trained_task.loss(0)))
    step()
    profiled_sizes = profile_memory(step, tmp_path)
    trace = record_steps(step, tmp_path / "run.memtrace", num_steps=1)
    events = trace.events
    recorded_sizes = Counter(events[events.kind == "alloc"]["size"].tolist())
    assert recorded_sizes == Counter(size for size in profiled_sizes if size > 0)
    # The profiler leaves out frees of blocks that are older than the profile.
    allocated = set(events[events.kind == "alloc"].block_id)
    changes = events[events.kind.isin(["alloc", "free"]) & events.block_id.isin(allocated)]
    signed_sizes = np.where(changes.kind == "alloc", changes["size"], -changes["size"]).astype(int)
    assert np.cumsum(signed_sizes).max() == np.cumsum(profiled_sizes).max()
    assert signed_sizes.tolist() == profiled_sizes


def profile_memory(step: Callable[[], object], folder: Path) -> list[int]:
    """Sizes of the allocations (positive) and frees (negative) of one step, from torch.profiler."""
    state = torch.get_rng_state()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    torch.set_rng_state(state)
    path = folder / "profile.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]


@both_observers
def test_labelled_bytes_are_the_sums_over_live_tensors(observer: str, tmp_path: Path) -> None:
    class Labelled(nn.Sequential):
        pass

    model = Labelled(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()

    trace = record_steps(step, tmp_path / "run.memtrace", observer=observer)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    assert live_bytes(trace, "parameter", "Labelled") == storage_bytes([*model.parameters(), *model.buffers()])
    assert live_bytes(trace, "gradient", "Labelled") == storage_bytes(gradients)
    assert live_bytes(trace, "optimizer_state", "Labelled") == storage_bytes(state)


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def test_backward_operators_have_the_module_and_stack_of_their_forward_operators(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    trace = record_steps(lambda: model(torch.randn(4, 64)).sum().backward(), tmp_path / "run.memtrace", num_steps=1)
    ops = trace.ops
    names = ops.name.fillna(0).map(lambda name: trace.name(int(name)))
    (tanh,) = ops[(ops.phase == "backward") & (names == "aten::tanh_backward")].itertuples()
    assert trace.name(int(tanh.module)) == "Sequential.1"
    assert any("activation.py" in frame.file for frame in trace.frames(int(tanh.stack)))


@both_observers
def test_accesses_of_a_view_count_for_its_base(observer: str, tmp_path: Path) -> None:
    """Making a view is no access."""
    base = torch.zeros(1013)

    def use_view() -> None:
        view = base[10:20].view(2, 5)
        view.add_(1)
        view.sum()

    table = blocks(record_steps(use_view, tmp_path / "run.memtrace", num_steps=1, observer=observer))
    (row,) = np.flatnonzero(table.size == 4052)
    assert (table.num_reads[row], table.num_writes[row]) == (2, 1)


def test_fake_tensors_trace_a_model_larger_than_the_machine(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Large(nn.Sequential):
        pass

    with FakeTensorMode(), memtrace.record(tmp_path / "run.memtrace") as recording:
        model = Large(*(nn.Linear(65536, 65536, bias=False) for _ in range(8)))
        model(torch.randn(16, 65536)).sum().backward()
    trace = memtrace.load(recording.path)
    assert trace.manifest.source.observer == "dispatch"
    assert find_peak(trace, "cpu").requested.bytes > 8 * 65536**2 * 4 * 2
    assert live_bytes(trace, "parameter", "Large") == 8 * 65536**2 * 4


def test_numpy_memory_is_live_from_its_first_access_to_its_free(tmp_path: Path) -> None:
    model = nn.Linear(1000, 2)
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.02) as recording:
        for _ in range(3):
            with part_written(recording):
                model(torch.from_numpy(np.random.default_rng(0).random((7, 1000), np.float32))).sum()
    table = blocks(memtrace.load(recording.path))
    is_batch = table.size == 28000
    assert is_batch.sum() == 3
    assert (table.alloc_event[is_batch] >= 0).all()
    assert (table.free_event[is_batch] >= 0).sum() >= 2


def test_compiled_models_train_the_same(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = torch.randn(4, 16)
    plain = compiled(batch)
    with memtrace.record(tmp_path / "run.memtrace"):
        traced = compiled(batch)
        traced.sum().backward()
    assert torch.equal(plain, traced)
