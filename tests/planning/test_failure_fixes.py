"""Fixes for out-of-memory errors of made-up GPUs: of every cause, with hand-counted bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrace
from memtrace.analysis.oom import OutOfMemory, explain_out_of_memory
from memtrace.format.manifest import DeviceInfo
from memtrace.planning.unfinished_step import estimate_checkpointing
from memtrace.planning.unfinished_update import estimate_update
from memtrace.planning.verdict import Verdict, find_verdict
from memtrace.trace import Trace
from tests.builders import event, op, trace_of, with_manifest

MIB = 1 << 20
DEVICE_BYTES = 1024 * MIB
ZEROS, STACK = 1, 2
"""Names of an operator, and of its call stack in an optimizer."""
NAMES: list[dict[str, Any]] = [
    {"id": ZEROS, "kind": "operator", "text": "aten::zeros_like"},
    {"id": STACK, "kind": "stack", "frames": [3, 4, 5]},
    {"id": 3, "kind": "frame", "text": "torch/optim/adam.py\t10\tAdam._init_group"},
    {"id": 4, "kind": "frame", "text": "torch/optim/optimizer.py\t5\twrapper"},
    {"id": 5, "kind": "frame", "text": "/home/me/train.py\t9\tmain"},
]


class Gpu:
    """Makes a trace of a GPU of 1 GiB, one segment for each block."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.labels: list[dict[str, Any]] = []
        self.reserved_bytes = 0
        self.num_blocks = 0

    def operator(self, phase: str, **more: Any) -> int:
        self.ops.append(op(len(self.ops), phase, **more))
        return len(self.ops) - 1

    def alloc(self, num_mib: int, phase: str, label: str | None = None, **more: Any) -> int:
        block, number = self.num_blocks, self.operator(phase, **more)
        place = {"device": "cuda:0", "address": self.reserved_bytes, "stream": 0, "pool": 0}
        self.events.append(event("segment_alloc", None, len(self.events), num_mib * MIB, **place))
        self.events.append(event("alloc", block, len(self.events), num_mib * MIB, op_id=number, **place))
        if label:
            self.labels.append({"block_id": block, "category": label})
        self.reserved_bytes += num_mib * MIB
        self.num_blocks += 1
        return block

    def free(self, block: int) -> None:
        alloc = next(row for row in self.events if row["kind"] == "alloc" and row["block_id"] == block)
        place = {name: alloc[name] for name in ("device", "address", "stream", "pool")}
        self.events.append(event("free", block, len(self.events), alloc["size"], **place))

    def fail(self, num_mib: int, phase: str, outside_mib: int = 0, **more: Any) -> Trace:
        number = self.operator(phase, **more)
        free_bytes = DEVICE_BYTES - self.reserved_bytes - outside_mib * MIB
        place = {"device": "cuda:0", "stream": 0, "pool": 0, "device_free": free_bytes, "op_id": number}
        self.events.append(event("oom", None, len(self.events), num_mib * MIB, **place))
        before = [("reserved", 0), ("device_used", 0)]
        counters = [{"time_ns": 0, "device": "cuda:0", "name": name, "value": value} for name, value in before]
        trace = trace_of(events=self.events, ops=self.ops, labels=self.labels, counters=counters,
                         names=NAMES)  # fmt: skip
        return with_manifest(trace, devices={"cuda:0": DeviceInfo(total_bytes=DEVICE_BYTES)})


def only_failure(trace: Trace) -> OutOfMemory:
    (failure,) = explain_out_of_memory(trace)
    return failure


def first_fix(verdict: Verdict) -> str:
    return verdict.fixes[0].what


def test_memory_of_another_process_is_the_first_thing_to_get_back() -> None:
    gpu = Gpu()
    gpu.alloc(300, "other", "parameter")
    trace = gpu.fail(400, "forward", outside_mib=600)
    verdict = find_verdict(trace)
    assert only_failure(trace).cause == "outside memory"
    assert "600 MiB were in use outside torch's allocator" in verdict.sentences[1]
    assert "the request needed 276 MiB of them" in verdict.sentences[1]
    (fix,) = verdict.fixes
    assert "Stop the other processes on cuda:0" in fix.what and fix.saved_bytes == 600 * MIB and fix.is_enough


def test_a_request_that_exceeds_the_device_is_a_matter_of_its_shape() -> None:
    gpu = Gpu()
    gpu.alloc(100, "other", "parameter")
    trace = gpu.fail(4096, "forward")
    verdict = find_verdict(trace)
    assert only_failure(trace).cause == "request too large"
    assert "it was 3.00 GiB too large" in verdict.sentences[1]
    assert first_fix(verdict).startswith("Check the shape of the tensor") and verdict.fixes[0].is_enough is None


def test_unused_memory_in_pieces_is_fragmentation() -> None:
    gpu = Gpu()
    sizes = [100, 50] * 6
    blocks = [gpu.alloc(size, "other") for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        if size == 50:
            gpu.free(block)
    trace = gpu.fail(200, "forward")
    assert only_failure(trace).cause == "fragmentation"
    assert "No memory was missing: 300 MiB of the reserved memory were unused" in find_verdict(trace).sentences[1]
    assert "free blocks of at most 50.0 MiB" in find_verdict(trace).sentences[1]


def test_a_little_unused_memory_is_not_fragmentation() -> None:
    gpu = Gpu()
    gpu.alloc(980, "other", "parameter")
    gpu.free(gpu.alloc(20, "other"))
    trace = gpu.fail(40, "other")
    assert only_failure(trace).cause == "capacity"
    assert "16.0 MiB were missing; a request of 24.0 MiB would have fitted." in find_verdict(trace).sentences[1]


def forward_and_backward(*, reads_first: bool) -> tuple[Trace, list[int]]:
    gpu = Gpu()
    gpu.alloc(100, "other", "parameter")
    gpu.alloc(200, "other", "optimizer_state")
    kept = [gpu.alloc(200, "forward", sequence_nr=number) for number in range(3)]
    if reads_first:
        number = gpu.operator("backward", sequence_nr=2)
        gpu.events.append(event("read", kept[2], len(gpu.events), device="cuda:0", op_id=number))
    return gpu.fail(200, "backward", sequence_nr=2), kept


@pytest.mark.parametrize("reads_first", [True, False])
def test_backward_that_runs_out_of_memory_leaves_likely_activations(reads_first: bool) -> None:
    trace, _ = forward_and_backward(reads_first=reads_first)
    failure = only_failure(trace)
    assert failure.phase == "backward" and failure.live_bytes_by_category["activation"] == 600 * MIB
    assert failure.likely_activation_bytes == (400 if reads_first else 600) * MIB
    sentences = " ".join(find_verdict(trace).sentences)
    assert "ran out of memory in backward" in sentences
    assert "activations hold 67 % (likely: memory ran out before backward had read them)" in sentences


def test_the_batch_that_fits_leaves_room_for_gradients() -> None:
    trace, _ = forward_and_backward(reads_first=False)
    # 1,024 MiB without parameters, state and gradients are 624; the batch needs 600, and 200 that failed.
    (fix,) = [fix for fix in find_verdict(trace).fixes if "micro-batch" in fix.what]
    assert "about 78 % of the batch fits at once" in fix.what and "2 micro-batches" in fix.what
    assert fix.saved_bytes == 400 * MIB and fix.is_enough


def test_no_fix_of_an_interrupted_step_removes_what_backward_needs() -> None:
    for reads_first in (True, False):
        verdict = find_verdict(forward_and_backward(reads_first=reads_first)[0])
        assert not any(
            "no_grad" in fix.what or "nused" in fix.what or "ate dealloc" in fix.what for fix in verdict.fixes
        )


def first_update(state_mib: int, failed_mib: int) -> Trace:
    gpu = Gpu()
    for number in range(4):
        gpu.alloc(50, "other", "parameter", sequence_nr=number)
    for number in range(4):
        gpu.alloc(50, "backward", "gradient", sequence_nr=number)
    for _ in range(state_mib // 50):
        gpu.alloc(50, "optimizer", name=ZEROS, stack=STACK)
    while DEVICE_BYTES - gpu.reserved_bytes > 40 * MIB:
        gpu.alloc(20, "other")  # something else fills the device
    return gpu.fail(failed_mib, "optimizer", name=ZEROS, stack=STACK)


def test_the_first_update_of_an_optimizer_needs_more_than_the_request_that_failed() -> None:
    trace = first_update(state_mib=200, failed_mib=50)
    failure = only_failure(trace)
    estimate = estimate_update(trace, failure)
    assert failure.phase == "optimizer" and failure.live_bytes_by_category["optimizer_state"] == 200 * MIB
    assert estimate is not None and estimate.optimizer == "adam"
    assert estimate.state_bytes == 400 * MIB and estimate.missing_state_bytes == 200 * MIB
    assert estimate.temporary_bytes == 200 * MIB and not estimate.fused_is_enough
    assert estimate.missing_bytes == 400 * MIB - failure.room.available_bytes if failure.room else False
    sentences = " ".join(find_verdict(trace).sentences)
    assert "The optimizer keeps 400 MiB of state, of which 200 MiB did not exist yet" in sentences


def test_a_fused_update_is_enough_where_only_temporary_tensors_are_missing() -> None:
    trace = first_update(state_mib=400, failed_mib=50)
    fixes = {fix.paste: fix for fix in find_verdict(trace).fixes}
    (fused,) = [fix for paste, fix in fixes.items() if paste and paste.startswith("fused=True")]
    assert fused.is_enough and fused.saved_bytes == 200 * MIB and fused.cost == "none"
    assert find_verdict(trace).fixes[0] is fused


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return hidden


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + torch.empty(1 << 56, dtype=torch.uint8)


class Stack(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(Layer(64) for _ in range(6)), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            if number == 3:
                x = FailsInBackward.apply(x)
        return x


def record_backward(path: Path, *, checkpointed: bool) -> Trace:
    model = Stack(checkpointed=checkpointed)
    x = torch.randn(8192, 64)
    with memtrace.record(path), pytest.raises(RuntimeError):
        model(x).sum().backward()
    return memtrace.load(path)


def test_checkpointing_saves_in_an_interrupted_backward_what_is_promised(tmp_path: Path) -> None:
    """Backward has passed two of the six layers when it fails: only the other four are counted."""
    plain = record_backward(tmp_path / "plain.memtrace", checkpointed=False)
    saving = record_backward(tmp_path / "saving.memtrace", checkpointed=True)
    failure, less = only_failure(plain), only_failure(saving)
    assert failure.phase == "backward"
    estimate = estimate_checkpointing(plain, failure)
    assert estimate is not None and estimate.modules == "Stack.layers.*"
    assert (estimate.num_calls, estimate.num_layers) == (4, 6)
    assert estimate.saved_bytes == pytest.approx(failure.live_bytes - less.live_bytes, rel=0.05)
