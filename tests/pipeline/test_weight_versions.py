"""Weight versions of PipeDream and PipeDream-2BW: the rules, the tensors that keep them, and recordings of them."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import StageCosts
from memtrace.pipeline.memory_rules import TORCH
from memtrace.pipeline.recorded_versions import count_weight_versions
from memtrace.pipeline.schedules.actions import FORWARD
from memtrace.pipeline.schedules.registry import build_schedule
from memtrace.pipeline.schedules.schedule import TWO_BUFFERED, Schedule, parse_schedule
from memtrace.pipeline.schedules.validation import validate_schedule
from memtrace.pipeline.schedules.weight_versions import microbatches_per_update, version_changes, version_used
from memtrace.pipeline.simulation.simulator import simulate_schedule
from memtrace.pipeline.simulation.worker_memory import simulate_memory
from tests.builders import event, trace_of

WEIGHTS = Path(__file__).parents[2] / "examples" / "pipeline" / "weights.py"


@pytest.fixture(scope="module")
def weights_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_example_weights", WEIGHTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@st.composite
def asynchronous(draw: st.DrawFn) -> Schedule:
    """PipeDream, or PipeDream-2BW with some batches."""
    depth = draw(st.integers(1, 5))
    if draw(st.booleans()):
        return build_schedule("pipedream", depth, draw(st.integers(1, 12)))
    every = depth + draw(st.integers(0, 3))
    return build_schedule("pipedream-2bw", depth, every * draw(st.integers(1, 4)), update_every=every)


def make_module() -> nn.Module:
    """A stage whose gradients depend on its weights, with every kind of saved tensor."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.1, foreach=False)


def versions_of_row(schedule: Schedule, worker: int) -> Iterator[tuple[int, bool, int]]:
    """(micro-batch, whether it is a forward, version) of a worker's actions, from a list of all updates so far.

    Written without the module under test: the version of a micro-batch is chosen when its forward begins.
    """
    version_of: dict[int, int] = {}
    backwards = 0
    for action in schedule.rows[worker]:
        if action.kind == FORWARD:
            every = schedule.update_every
            batch = 0 if every is None else action.microbatch // every
            version_of[action.microbatch] = backwards if every is None else max(batch - 1, 0)
        else:
            backwards += 1
        yield action.microbatch, action.kind == FORWARD, version_of[action.microbatch]


@given(asynchronous(), st.data())
@settings(max_examples=60, deadline=None)
def test_kept_versions_give_the_weights_of_the_update_rule(
    weights_module: ModuleType, schedule: Schedule, data: st.DataObject
) -> None:
    """Every micro-batch computes with its version, and W(t+1) = update(W(t), gradient of that version), bitwise."""
    worker = data.draw(st.integers(0, schedule.num_workers - 1))
    module, expected = make_module(), make_module()
    kept = weights_module.StageWeights(
        module, make_optimizer(module), is_double_buffered=schedule.update == TWO_BUFFERED
    )
    optimizer, history = make_optimizer(expected), [copy.deepcopy(expected)]
    changes = version_changes(schedule, worker)
    inputs = torch.randn(schedule.num_microbatches, 2, 3, generator=torch.Generator().manual_seed(1))
    outputs: dict[int, torch.Tensor] = {}
    storages: list[int] = []
    for (microbatch, is_forward, version), is_update in zip(
        versions_of_row(schedule, worker), changes.is_update, strict=True
    ):
        if is_forward:
            outputs[microbatch] = kept.run(version, inputs[microbatch])
            assert torch.equal(outputs[microbatch], history[version](inputs[microbatch]))
            storages.append(num_storages(kept))
            continue
        outputs.pop(microbatch).sum().backward()
        kept.release(version)
        history[version](inputs[microbatch]).sum().backward()
        if is_update:
            kept.update(version)
            for parameter, used in zip(expected.parameters(), history[version].parameters(), strict=True):
                parameter.grad, used.grad = used.grad, None
            optimizer.step()
            history.append(copy.deepcopy(expected))
            history[-1].zero_grad()
            for parameter, correct in zip(module.parameters(), expected.parameters(), strict=True):
                assert torch.equal(parameter, correct)
        storages.append(num_storages(kept))
    assert kept.newest == schedule.num_microbatches // microbatches_per_update(schedule)
    # The tensors that exist are those that the memory rules count.
    num_parameters = len(list(module.parameters()))
    assert max(storages) == num_parameters * most_versions(schedule, worker)


def num_storages(kept: Any) -> int:
    """The number of tensors with memory of their own in all versions."""
    return len({tensor.data_ptr() for version in kept._versions for tensor in kept.parameters(version)})


def most_versions(schedule: Schedule, worker: int) -> int:
    stages = [StageCosts(forward_s=1, input_backward_s=1, weight_backward_s=1, parameter_bytes=1)] * schedule.num_stages
    return simulate_memory(simulate_schedule(schedule, stages))[worker].weight_peak_bytes


@given(st.integers(1, 6), st.integers(0, 20))
@settings(deadline=None)
def test_pipedream_uses_the_version_after_the_last_backward_of_the_stage(depth: int, extra: int) -> None:
    """Micro-batch k of stage s uses version max(k - (D - s) + 1, 0): D - s micro-batches are in flight."""
    schedule = build_schedule("pipedream", depth, 2 * depth + extra)
    for stage in range(depth):
        used = {m: version for m, forward, version in versions_of_row(schedule, stage) if forward}
        assert used == {m: max(m - (depth - stage) + 1, 0) for m in used}
        assert most_versions(schedule, stage) == depth - stage
        assert sum(version_changes(schedule, stage).is_update) == schedule.num_microbatches


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 4))
@settings(deadline=None)
def test_2bw_keeps_two_versions_and_updates_once_per_batch(depth: int, more: int, batches: int) -> None:
    every = depth + more
    schedule = build_schedule("pipedream-2bw", depth, every * batches, update_every=every)
    for stage in range(depth):
        changes = version_changes(schedule, stage)
        assert sum(changes.is_update) == sum(changes.begins_batch) == batches
        assert most_versions(schedule, stage) == 2
    for microbatch in range(every * batches):
        assert version_used(microbatch, every) in (microbatch // every - 1, 0)


def test_updates_hold_gradients_optimizer_temporaries_and_versions() -> None:
    """PipeDream over two stages and two micro-batches, computed by hand: F0 F1 B0 B1 and F0 B0 F1 B1."""
    stage = StageCosts(forward_s=1, input_backward_s=1, weight_backward_s=1, parameter_bytes=100, gradient_bytes=10,
                       optimizer_bytes=1000, activation_bytes=7, largest_optimizer_temporary_bytes=3,
                       first_backward_temporary_bytes=12, backward_temporary_bytes=2)  # fmt: skip
    first, last = simulate_memory(simulate_schedule(build_schedule("pipedream", 2, 2), [stage] * 2), TORCH)
    # After B0 version 0 is still in use by micro-batch 1: the update makes a second version. After B1 it writes in place
    # to the newest version, and version 0 is freed.
    points = [1100] * 6 + [1100 + 100 + 10, 1200] + [1200, 1100 + 10, 1100]
    assert first.weight_bytes.tolist() == [*points, 1100, 1100, 1100]
    assert last.weight_bytes.tolist() == [1100] * 4 + [1110, 1100] + [1100] * 3 + [1110, 1100] + [1100] * 3
    assert first.temporary_bytes.tolist() == [0] * 5 + [12, 3, 0, 12, 3, 0, 0, 0, 0]


def test_a_schedule_without_a_flush_has_one_pipeline() -> None:
    text = """
        schedule both
        stages 1
        microbatches 2
        update stash
        pipeline 0 0
        pipeline 1 0
        worker 0 | F0.0 B0.0 F0.1@1 B0.1@1
    """
    with pytest.raises(MemtraceError, match="update stash needs one pipeline, but there are 2"):
        validate_schedule(parse_schedule(text))


def test_recorded_versions_are_the_blocks_of_a_parameter_at_the_same_time() -> None:
    events = [event("baseline", 0, 0, 8), event("alloc", 1, 1, 8), event("free", 0, 2, 8), event("alloc", 2, 3, 8),
              event("alloc", 3, 4, 8), event("free", 1, 5, 8)]  # fmt: skip
    labels = [{"block_id": block, "category": "parameter", "name": 1} for block in range(4)]
    trace = trace_of(events=events, labels=labels, names=[{"id": 1, "kind": "tensor", "text": "w"}])
    assert count_weight_versions(trace) == 3
    assert count_weight_versions(trace_of(events=events)) == 0
