"""What would have helped a step that ran out of memory.

Plans start from a recorded step. A program that runs out of memory in its first step has none, but the module calls
that had returned by then show what they kept, the optimizer shows what its state takes, and the failed request shows
what room was left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.block_accesses import group_accesses_by_block, has_accesses
from memtrace.analysis.block_groups import module_pattern
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.analysis.oom import OutOfMemory
from memtrace.analysis.operators import op_column
from memtrace.analysis.peak import live_after
from memtrace.format.arrays import Array
from memtrace.planning.module_calls import ModuleCalls, find_module_calls
from memtrace.planning.whatif_optimizer import OPTIMIZERS
from memtrace.trace import Trace

MIN_CALLS: Final = 2
"""Least calls that make modules the layers of a stack."""
MAX_MICRO_BATCHES: Final = 64
"""Largest number of micro-batches that is worth proposing."""
GRADIENTS_IN_BACKWARD: Final = 2
"""Gradients of the largest tensor of a layer that its backward holds at once: of a result and of an operand."""
_GROWING: Final = ("activation", "input", "temporary", "workspace")
"""Categories that grow with the batch."""


@dataclass(frozen=True)
class CheckpointEstimate:
    """What the layers of a stack keep that checkpointing each of them would not."""

    modules: str
    """The layers, such as ``GPT.blocks.*``."""
    num_calls: int
    """Calls that had returned, and that backward had not reached, when the allocation failed."""
    num_layers: int | None
    """Number of these layers in the model; None: unknown."""
    kept_bytes: int
    """Bytes that these calls kept, without their outputs, which the next layer reads."""
    saved_bytes: int
    """The same for all layers of the model where memory ran out in forward, else ``kept_bytes``."""
    layer_bytes: int
    """Most bytes that one of the calls kept, its output included."""
    output_bytes: int
    """Most bytes of an output of one of the calls."""
    is_enough: bool | None
    """Whether forward and backward would have run with checkpointing, beside gradients and optimizer state; None:
    unknown."""


@dataclass(frozen=True)
class BatchEstimate:
    """The largest share of the batch with which the step would have passed the allocation that failed."""

    share: float
    """Of the batch, from 0 to 1."""
    num_micro_batches: int
    """Least power of two by which the batch can be divided."""
    saved_bytes: int
    """Bytes by which that lowers what is live when the allocation failed."""
    is_whole_step: bool
    """Whether what follows the failed allocation is counted as well; otherwise more may be needed."""


def estimate_checkpointing(trace: Trace, failure: OutOfMemory) -> CheckpointEstimate | None:
    """Return the layers whose checkpointing would have saved most when an allocation failed; None: no layers were run.

    Args:
        trace: A single-rank recording.
        failure: The failed allocation.
    """
    waiting = _waiting_blocks(trace, failure)
    if not len(waiting):
        return None
    calls, finished = _finished_calls(trace, failure)
    kept = {call: _kept_by_call(trace, calls, call, waiting) for call in finished}
    stacks: defaultdict[str, list[int]] = defaultdict(list)
    for call in finished:
        pattern = module_pattern(trace.name(int(calls.module[call])))
        if pattern is not None and "*" in pattern and len(kept[call]):
            stacks[pattern].append(call)
    sizes = blocks(trace).size
    output_of = {
        call: _output_bytes(trace, calls, call, kept[call]) for of_stack in stacks.values() for call in of_stack
    }
    saved = {
        pattern: sum(int(sizes[kept[call]].sum()) - output_of[call] for call in of_stack)
        for pattern, of_stack in stacks.items()
        if len(of_stack) >= MIN_CALLS
    }
    if not any(saved.values()):
        return None
    best = max(saved, key=lambda pattern: saved[pattern])
    layers = [kept[call] for call in stacks[best]]
    layer_bytes = max(int(sizes[layer].sum()) for layer in layers)
    output_bytes = max(output_of[call] for call in stacks[best])
    num_layers = _num_layers(trace, best)
    to_come = max((num_layers or 0) - len(layers), 0) if failure.phase == "forward" else 0
    return CheckpointEstimate(
        best,
        len(layers),
        num_layers,
        saved[best],
        saved[best] + to_come * (layer_bytes - output_bytes),
        layer_bytes,
        output_bytes,
        _layers_fit(trace, failure, saved[best], to_come, layer_bytes, output_bytes, _backward_bytes(trace, layers)),
    )


def _backward_bytes(trace: Trace, layers: list[Array]) -> int:
    """Return what the backward of a layer allocates beside what the layer keeps: gradients of its largest tensors."""
    sizes = blocks(trace).size
    return GRADIENTS_IN_BACKWARD * max(int(sizes[layer].max()) for layer in layers)


def _layers_fit(
    trace: Trace,
    failure: OutOfMemory,
    kept_bytes: int,
    to_come: int,
    layer_bytes: int,
    output_bytes: int,
    backward_bytes: int,
) -> bool | None:
    """Return whether forward and backward find room if each layer keeps its output alone; None: unknown."""
    if failure.room is None or failure.cause != "capacity":
        return None
    if failure.phase != "forward":
        return failure.room.is_covered_by(kept_bytes)
    # One layer at a time is computed as a whole, again in backward: first beside the outputs of all layers, at last
    # beside the gradients of all parameters.
    beside = max(to_come * output_bytes, _gradients_to_come(failure)) + state_to_come(trace, failure)
    needed = beside + layer_bytes + output_bytes + backward_bytes
    return needed <= (failure.device_free_bytes or 0) + kept_bytes


def state_to_come(trace: Trace, failure: OutOfMemory) -> int:
    """Return the bytes of the state that an optimizer creates in its first step, where that has not begun; else 0.

    The optimizer is taken to be Adam: its state is larger than that of most others.
    """
    trains = failure.phase == "backward" or (failure.phase == "forward" and failure.likely_activation_bytes > 0)
    held = failure.live_bytes_by_category
    phases = op_column(trace, trace.columns("events", "op_id")["op_id"][: failure.event], "phase")
    has_stepped = bool((phases == PHASE["optimizer"]).any())
    has_state = not trains or has_stepped or held.get("optimizer_state", 0) > 0
    return 0 if has_state else OPTIMIZERS["adam"].state * held.get("parameter", 0)


def _gradients_to_come(failure: OutOfMemory) -> int:
    held = failure.live_bytes_by_category
    return max(held.get("parameter", 0) - held.get("gradient", 0), 0)


def estimate_batch(trace: Trace, failure: OutOfMemory, layers: CheckpointEstimate | None) -> BatchEstimate | None:
    """Return the share of the batch that would have fitted; None: unknown, or no batch is small enough.

    What the batch holds when the allocation failed is compared with the room for it; layers that had not run yet are
    counted as well, and so are the gradients, which exist from the second micro-batch on, and the optimizer's state,
    which exists from the second step on.

    Args:
        trace: A single-rank recording.
        failure: The failed allocation.
        layers: The estimate of ``estimate_checkpointing`` for it.
    """
    if failure.room is None or failure.cause != "capacity" or failure.phase not in ("forward", "backward"):
        return None
    table = blocks(trace)
    live = live_after(table, trace.devices.index(failure.device), failure.event)
    in_passes = np.isin(table.phase[live], [PHASE["forward"], PHASE["backward"]])
    growing = np.isin(table.category[live], [CATEGORY[name] for name in _GROWING])
    growing |= (table.category[live] == CATEGORY["unknown"]) & in_passes
    batch_bytes = int(table.size[live[growing]].sum()) + failure.asked_bytes
    if layers is not None and layers.num_layers is not None and failure.phase == "forward":
        batch_bytes += max(layers.num_layers - layers.num_calls - 1, 0) * layers.layer_bytes
    if layers is not None and failure.phase == "forward":
        batch_bytes += _backward_bytes(trace, [live[table.waits_for_backward[live]]])
    trains = failure.phase == "backward" or failure.likely_activation_bytes > 0
    to_come = _gradients_to_come(failure) + state_to_come(trace, failure) if trains else 0
    fixed_bytes = failure.live_bytes - int(table.size[live[growing]].sum()) + to_come
    # What is reserved and unused may be in pieces: it is not counted as room.
    room = failure.live_bytes + (failure.device_free_bytes or 0) - fixed_bytes
    share = room / max(batch_bytes, 1)
    if not 1 / MAX_MICRO_BATCHES <= share < 1:
        return None
    count = 1 << int(np.ceil(np.log2(1 / share)))
    is_whole_step = failure.phase == "backward" or (layers is not None and layers.num_layers is not None)
    return BatchEstimate(share, count, batch_bytes - batch_bytes // count, is_whole_step)


def _waiting_blocks(trace: Trace, failure: OutOfMemory) -> Array:
    """Return the activations that waited for backward, in order of allocation."""
    table = blocks(trace)
    live = live_after(table, trace.devices.index(failure.device), failure.event)
    found = live[table.waits_for_backward[live]]
    return found[np.argsort(table.alloc_event[found])]


def _rows_reached_by_backward(trace: Trace, failure: OutOfMemory) -> Array:
    """Return the rows, in order, at which the blocks were allocated that backward had read before the failure."""
    table, accesses = blocks(trace), group_accesses_by_block(trace)
    alloc_event = table.alloc_event[accesses.block]
    in_backward = op_column(trace, accesses.op, "phase") == PHASE["backward"]
    is_read = in_backward & accesses.is_read & (accesses.event > alloc_event) & (accesses.event <= failure.event)
    return np.unique(alloc_event[is_read & (table.phase[accesses.block] == PHASE["forward"])])


def _finished_calls(trace: Trace, failure: OutOfMemory) -> tuple[ModuleCalls, list[int]]:
    """Return the module calls of the forward that failed, or whose backward did.

    Also those of them that had returned and that backward had not reached.
    """
    time_ns = trace.columns("events", "time_ns")["time_ns"]
    begin = _start_of_forward(trace, failure.event)
    calls = find_module_calls(trace, int(time_ns[begin]), int(time_ns[failure.event]))
    reached = _rows_reached_by_backward(trace, failure)
    is_reached = np.searchsorted(reached, calls.first_row) < np.searchsorted(reached, calls.end_row)
    return calls, np.flatnonzero((calls.end_row <= failure.event) & ~is_reached).tolist()


def _start_of_forward(trace: Trace, failure_row: int) -> int:
    """Return the row after the last backward or optimizer operator before the forward pass of the failed step."""
    phase = op_column(trace, trace.columns("events", "op_id")["op_id"][:failure_row], "phase")
    forward = np.flatnonzero(phase == PHASE["forward"])
    before = phase[: int(forward[-1]) if len(forward) else 0]
    other = np.flatnonzero(np.isin(before, [PHASE["backward"], PHASE["optimizer"]]))
    return int(other[-1]) + 1 if len(other) else 0


def _kept_by_call(trace: Trace, calls: ModuleCalls, call: int, waiting: Array) -> Array:
    """Return the activations that a call made, in order."""
    alloc_event = blocks(trace).alloc_event
    first, end = np.searchsorted(alloc_event[waiting], [calls.first_row[call], calls.end_row[call]])
    return waiting[first:end]


def _output_bytes(trace: Trace, calls: ModuleCalls, call: int, kept: Array) -> int:
    """Return the bytes of what a call made and did not read itself: its output, if that was kept.

    Without recorded accesses, the last block of the call is taken to be the output.
    """
    accesses, table = group_accesses_by_block(trace), blocks(trace)
    if not has_accesses(trace):
        return int(table.size[kept[-1]])
    output = 0
    for block in kept.tolist():
        of_block = slice(accesses.offset[block], accesses.offset[block + 1])
        rows = accesses.event[of_block]
        is_later = accesses.op[of_block] != accesses.op[of_block][:1]
        if not (accesses.is_read[of_block] & is_later & (rows < calls.end_row[call])).any():
            output += int(table.size[block])
    return output


def _num_layers(trace: Trace, pattern: str) -> int | None:
    """Return how many modules match a pattern, by the names of the parameters; None: they have no names."""
    labels = trace.columns("labels", "name")["name"]
    root, _, inside = pattern.partition(".")  # names of parameters begin with the class of the model, or inside it
    layer = re.escape(inside).replace(r"\*", r"\d+")
    expression = re.compile(rf"(?:{re.escape(root)}\.)?({layer})\.")
    names = (trace.name(int(number)) or "" for number in np.unique(labels[labels >= 0]))
    found = {match.group(1) for match in map(expression.match, names) if match}
    return len(found) or None
