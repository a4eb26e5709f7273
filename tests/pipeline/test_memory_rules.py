"""The memory rules against values that were computed by hand."""

from __future__ import annotations

import pytest

from memtrace.pipeline.costs import StageCosts
from memtrace.pipeline.memory_rules import (
    PAPER,
    TORCH,
    KeptOutputs,
    MemoryModel,
    in_flight_changes,
    torch_pipelining_model,
)
from memtrace.pipeline.schedules.actions import parse_action
from memtrace.pipeline.schedules.registry import build_schedule
from memtrace.pipeline.simulation.simulator import simulate_schedule
from memtrace.pipeline.simulation.worker_memory import WorkerMemory, simulate_memory

FIRST = StageCosts(
    forward_s=1,
    input_backward_s=1,
    weight_backward_s=1,
    parameter_bytes=1000,
    gradient_bytes=1000,
    optimizer_bytes=2000,
    activation_bytes=100,
    output_bytes=10,
    unsaved_output_bytes=4,
    batch_bytes=7,
)
LAST = StageCosts(
    forward_s=1,
    input_backward_s=1,
    weight_backward_s=1,
    parameter_bytes=500,
    gradient_bytes=500,
    optimizer_bytes=1000,
    activation_bytes=200,
    input_bytes=10,
    model_output_bytes=30,
    unsaved_model_output_bytes=20,
    loss_bytes=1,
    optimizer_temporary_bytes=50,
    largest_optimizer_temporary_bytes=60,
)


def simulate_two_stages(model: MemoryModel, *, recompute: bool = False) -> list[WorkerMemory]:
    """GPipe over two stages with two micro-batches: F0 F1 B0 B1 on both workers."""
    return simulate_memory(simulate_schedule(build_schedule("gpipe", 2, 2), [FIRST, LAST], recompute=recompute), model)


def test_papers_count_weights_and_activations_in_flight() -> None:
    first, last = simulate_two_stages(PAPER)
    assert first.weight_bytes.tolist() == [4000] * 12
    # Levels after: start, both ends of F0, F1, B0 and B1, and three points at the end of the step.
    assert first.activation_bytes.tolist() == [0, 100, 100, 200, 200, 200, 100, 100, 0, 0, 0, 0]
    assert last.activation_peak_bytes == 400


def test_boundaries_count_the_received_input_the_output_and_its_gradient() -> None:
    first, last = simulate_two_stages(MemoryModel(boundaries=True))
    # Two micro-batches with activations and unsaved output; B0 adds the gradient of the output.
    assert first.activation_peak_bytes == 2 * (100 + 4) + 10
    assert last.activation_peak_bytes == 2 * (200 + 10)


def test_recomputation_keeps_only_inputs_between_forward_and_backward() -> None:
    _, last = simulate_two_stages(PAPER, recompute=True)
    assert last.activation_bytes.tolist() == [0, 210, 10, 220, 20, 220, 10, 210, 0, 0, 0, 0]


def test_the_first_backward_allocates_gradients_that_the_end_of_the_step_frees() -> None:
    first, last = simulate_two_stages(TORCH)
    assert first.weight_bytes.tolist() == [3000] * 6 + [4000] * 5 + [3000]
    # The optimizer runs at the last but one point.
    assert last.temporary_bytes.tolist() == [0] * 10 + [50 + 60, 0]


@pytest.mark.parametrize(("kept", "previous", "merged"), [("none", 0, 0), ("microbatches", 0, 60), ("merged", 60, 60)])
def test_torch_pipelining_keeps_buffers_messages_and_outputs(kept: KeptOutputs, previous: int, merged: int) -> None:
    first, last = simulate_two_stages(torch_pipelining_model(TORCH, "ScheduleGPipe", kept))
    # Buffers for the gradients of two messages and for the batch of two micro-batches; buffers for two inputs.
    assert first.weight_bytes[0] == 3000 + 2 * (10 + 7)
    assert last.weight_bytes[0] == 1500 + 2 * 10 + previous
    # After both backwards: two sent gradients of the input, two losses, and the kept outputs.
    assert last.activation_bytes[8] == 2 * (10 + 1) + merged
    # At the end of the step the messages are freed and the outputs are merged.
    assert (last.activation_bytes[9], last.temporary_bytes[9]) == (2 * 1 + merged, merged)


def test_1f1b_of_torch_keeps_only_the_last_sent_message() -> None:
    first, last = simulate_two_stages(torch_pipelining_model(TORCH, "Schedule1F1B", "none"))
    # The first worker keeps one sent output, the last worker one sent gradient and the losses.
    assert first.activation_bytes[8] == 10
    assert last.activation_bytes[8] == 10 + 2 * 1


def test_a_halved_backward_frees_half_of_the_activations_rounded_down() -> None:
    schedule = build_schedule("chimera", 2, 2, method="halving")
    stages = [StageCosts(forward_s=1, input_backward_s=1, weight_backward_s=1, activation_bytes=101)] * 2
    memory = simulate_memory(simulate_schedule(schedule, stages))[0]
    assert sorted(set(memory.activation_bytes.tolist())) == [0, 51, 101, 152, 202]


def test_a_microbatch_is_in_flight_until_its_input_backward_or_second_half_ends() -> None:
    actions = [parse_action(text) for text in ("F0.0", "F0.1", "B0.0a", "B0.0b", "I0.1", "W0.1")]
    begins, ends = in_flight_changes(actions)
    assert begins.tolist() == [1, 1, 0, 0, 0, 0]
    assert ends.tolist() == [0, 0, 0, -1, -1, 0]
