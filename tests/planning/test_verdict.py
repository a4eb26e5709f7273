"""The verdict: which device and rank it is about, its sentences, and fixes that really save what they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memtrace
from memtrace.analysis.findings import find_device_waste
from memtrace.planning.fix import NO_COST, Fix, describe_saving
from memtrace.planning.fixes import select_useful
from memtrace.planning.unfinished_step import estimate_checkpointing
from memtrace.planning.verdict import MAX_FIXES, choose_rank, find_verdict, judge_job, order_devices
from memtrace.trace import Trace
from tests.analysis.short_traces import trace_of_steps
from tests.builders import event, op, step, trace_of
from tests.conftest import DefectTraces

NUM_LAYERS, WIDTH, BATCH = 5, 64, 8192  # much more than other tests leave in memory


class Layer(torch.nn.Module):
    """Keeps four times the bytes of its output for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return hidden


class Stack(torch.nn.Module):
    """Runs out of memory after all of its layers."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x + torch.empty(1 << 56, dtype=torch.uint8)


def record_failure(path: Path, *, checkpointed: bool) -> Trace:
    model = Stack(checkpointed=checkpointed)
    x = torch.randn(BATCH, WIDTH)
    with memtrace.record(path), pytest.raises(RuntimeError):
        model(x)
    return memtrace.load(path)


def gpus_and_cpu(sizes: dict[str, int]) -> Trace:
    return trace_of(events=[event("alloc", n, n, size, device=name) for n, (name, size) in enumerate(sizes.items())])


def test_checkpointing_saves_what_the_verdict_on_an_unfinished_forward_promises(tmp_path: Path) -> None:
    plain = record_failure(tmp_path / "plain.memtrace", checkpointed=False)
    saving = record_failure(tmp_path / "saving.memtrace", checkpointed=True)
    failure = judge_job(plain).judged.out_of_memory[-1]
    estimate = estimate_checkpointing(plain, failure)
    assert estimate is not None and estimate.modules == "Stack.layers.*" and estimate.num_calls == NUM_LAYERS
    live = [judge_job(trace).judged.out_of_memory[-1].live_bytes for trace in (plain, saving)]
    assert estimate.saved_bytes == pytest.approx(live[0] - live[1], rel=0.02)
    (fix,) = find_verdict(plain).fixes
    assert "Stack.layers.*" in fix.what and fix.saved_bytes == estimate.saved_bytes
    assert "activations hold" in find_verdict(plain).sentences[1] and "(likely:" in find_verdict(plain).sentences[1]
    assert "cpu ran out of memory in forward: a request for 64.0 PiB" in find_verdict(plain).sentences[0]


def test_the_fixes_are_the_findings_that_save_most(defect_traces: DefectTraces) -> None:
    trace = memtrace.load(defect_traces.defects)
    verdict = find_verdict(trace)
    assert verdict.device == "cpu" and 1 <= len(verdict.fixes) <= MAX_FIXES
    saved = [fix.saved_bytes for fix in verdict.fixes]
    assert saved == sorted(saved, reverse=True)
    best = max(each.saved_bytes for each in find_device_waste(trace, "cpu").findings if each.is_single_line_fix)
    assert best in saved
    assert any(sentence.startswith("Live memory grows by ") for sentence in verdict.sentences)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"cpu": 900, "cuda:0": 8, "cuda:1": 50}, ["cuda:1", "cuda:0", "cpu"]),
        ({"cpu": 900}, ["cpu"]),
        ({"cuda:0": 60, "cuda:1": 50}, ["cuda:0", "cuda:1"]),
    ],
)
def test_gpus_come_before_the_cpu_and_the_highest_peak_first(sizes: dict[str, int], order: list[str]) -> None:
    assert order_devices(gpus_and_cpu(sizes)) == order


def test_the_device_that_failed_comes_first() -> None:
    rows = [event("alloc", 0, 0, 900, device="cuda:0"), event("oom", None, 1, 1 << 40, device="cuda:1")]
    trace = trace_of(events=rows)
    assert order_devices(trace) == ["cuda:1", "cuda:0"]
    assert find_verdict(trace).sentences[0].startswith("cuda:1 ran out of memory: a request for 1.00 TiB")


def test_a_trace_without_memory_has_a_verdict() -> None:
    trace = trace_of(ops=[op(0, "forward")])
    verdict = find_verdict(trace)
    assert verdict.device is None and verdict.fixes == () and choose_rank(trace) == 0


@pytest.mark.parametrize(("wait_ns", "is_long"), [(10, True), (9, False)])
def test_waiting_for_data_needs_a_tenth_of_the_time(wait_ns: int, is_long: bool) -> None:
    spans: list[dict[str, Any]] = [step(0, 0, 100), {"kind": "data_wait", "start_ns": 0, "duration_ns": wait_ns}]
    trace = trace_of(events=[event("alloc", 0, 0, 100), event("free", 0, 50)], spans=spans)
    assert any("waiting for data" in sentence for sentence in find_verdict(trace).sentences) == is_long


def test_growth_is_reported_where_steps_leave_memory_behind() -> None:
    sentences = {freed: find_verdict(trace_of_steps(12, freed=freed)).sentences for freed in (True, False)}
    assert not any("grows" in sentence for sentence in sentences[True])
    assert any("grows by 1,000 B per step" in sentence for sentence in sentences[False])


def test_a_saving_names_what_it_costs(tmp_path: Path) -> None:
    fix = find_verdict(record_failure(tmp_path / "run.memtrace", checkpointed=False)).fixes[0]
    assert describe_saving(fix).endswith("Cost: their forward runs twice.")


def test_a_fix_with_a_cost_is_left_out_where_a_free_one_saves_as_much() -> None:
    free = Fix("free", None, 100, NO_COST, None)
    dear, dearer = Fix("dear", None, 100, "slower", None), Fix("dearer", None, 101, "slower", None)
    assert select_useful([dear, free, dearer], None) == [free, dearer]
    assert select_useful([dear], None) == [dear]
