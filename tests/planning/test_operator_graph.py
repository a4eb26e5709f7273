"""The time of a step on its operator graph, against the recorded time and against graphs worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.analysis.event_codes import PHASE
from memtrace.planning import plan_whatif
from memtrace.planning.operator_graph import build_graph, fuse_optimizer, is_compute_bound, use_half_precision
from memtrace.planning.plan import StepCost
from memtrace.planning.recorded_step import RecordedStep, choose_step
from memtrace.planning.whatif_changes import Autocast, FuseOptimizer, ScaleBandwidth, ScaleBatch
from memtrace.trace import Trace
from tests.builders import event, step, trace_of
from tests.programs.changed import Setup, record_training

NAMES = {1: "aten::addmm", 2: "aten::relu", 3: "aten::_fused_step", 4: "c10d::allreduce_"}


def graph_trace(ops: list[dict[str, Any]], kernels: list[dict[str, Any]] = [], length: int = 1000) -> Trace:  # noqa: B006
    """A trace of one step with these operator calls, one event each, and device times."""
    device = "cuda:0" if kernels else "cpu"
    events = [event("baseline", 0, 0, 8, device=device), event("baseline", 1, 0, 8, device=device)]
    events += [event("read", row.pop("block", 0), row["start_ns"], op_id=row["op_id"], device=device) for row in ops]
    return trace_of(
        events=events,
        ops=[{"phase": "forward", "recompute": False, "thread": 0, **row} for row in ops],
        device_times=[{"device": device, **kernel} for kernel in kernels],
        spans=[step(0, 0, length)],
        names=[{"id": number, "kind": "operator", "text": text} for number, text in NAMES.items()],
    )


def call(number: int, name: int, start: int, duration: int, **more: Any) -> dict[str, Any]:
    return {"op_id": number, "name": name, "start_ns": start, "duration_ns": duration, **more}


def only_step(trace: Trace, length: int = 1000) -> RecordedStep:
    return RecordedStep(0, 0, trace.num_rows("events"), 0, length, StepCost(16, length))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    setup = Setup("gpt", optimizer="adamw", implementation="for-loop")
    return record_training(setup, tmp_path_factory.mktemp("graph") / "run.memtrace")


def test_an_unchanged_graph_takes_as_long_as_the_recorded_step(recorded: Trace) -> None:
    chosen = choose_step(recorded, "cpu")
    graph = build_graph(recorded, chosen)
    assert len(graph) > 100
    assert graph.simulate() == chosen.duration_ns
    assert (graph.gap_ns >= 0).all()


def test_a_fused_optimizer_takes_what_its_operators_compute_without_the_gaps(recorded: Trace) -> None:
    chosen = choose_step(recorded, "cpu")
    graph = build_graph(recorded, chosen)
    update = graph.phase == PHASE["optimizer"]
    assert update.sum() > 20
    assert graph.simulate() - fuse_optimizer(graph).simulate() == int(graph.gap_ns[update].sum())
    result = plan_whatif(recorded, [FuseOptimizer()])
    assert result.predicted.step_ns is not None and result.recorded.step_ns is not None
    assert result.predicted.step_ns < result.recorded.step_ns


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=40))
def test_any_recording_of_threads_is_reproduced(rows: list[tuple[int, int, int]]) -> None:
    times, ops = dict.fromkeys(range(4), 0), []
    clock = 0
    for number, (wait, duration, thread) in enumerate(rows):
        # Threads take turns or overlap, but a thread runs one call at a time, and calls begin in order.
        clock = max(clock, times[thread]) + wait
        ops.append(call(number, 1 + number % 3, clock, duration, thread=thread, block=number % 2))
        times[thread] = clock + duration
    length = max(times.values()) + 5
    trace = graph_trace(ops, length=length)
    graph = build_graph(trace, only_step(trace, length))
    assert graph.simulate() == length
    start, end = graph.simulate_tasks()
    assert start == graph.start_ns.tolist()
    assert end == (graph.start_ns + graph.duration_ns).tolist()
    # Shorter tasks never make a step longer.
    assert graph.scale(np.ones(len(graph), bool), 0.5).simulate() <= length


def test_backward_on_another_thread_delays_what_comes_after_it() -> None:
    # The first thread waits from 100 to 400 while the second computes.
    ops = [call(0, 1, 0, 100), call(1, 1, 120, 260, thread=1, phase="backward"), call(2, 2, 400, 100)]
    trace = graph_trace(ops)
    graph = build_graph(trace, only_step(trace))
    assert graph.simulate() == 1000
    assert graph.scale(graph.phase == PHASE["backward"], 2).simulate() == 1260
    assert graph.remove(graph.phase == PHASE["backward"]).simulate() == 1000 - 260 - 20


def test_a_step_that_waits_for_the_device_is_as_fast_as_its_kernels() -> None:
    # Three launches of 10; kernels of 300 in a row; the last call waits for them.
    ops = [call(number, 1, 20 * number, 10) for number in range(3)] + [call(3, 2, 60, 900)]
    kernels = [{"op_id": number, "start_ns": 5 + 300 * number, "duration_ns": 300} for number in range(3)]
    trace = graph_trace(ops, kernels)
    graph = build_graph(trace, only_step(trace))
    assert int(graph.is_device.sum()) == 3
    assert graph.simulate() == 1000
    assert use_half_precision(trace, graph).simulate() == 1000 - 600
    # Faster calls on the host do not help: the device is the bottleneck.
    assert graph.scale(~graph.is_device & (graph.waits_for < 0), 0.1).simulate() == 1000
    # Kernels that take no time leave what the host does.
    assert graph.remove(graph.is_device).simulate() < 200


def test_kernels_that_the_host_cannot_launch_fast_enough_gain_nothing() -> None:
    # The host needs 100 for each launch, the kernels 10: halving the kernels changes only the last.
    ops = [call(number, 2, 100 * number, 100) for number in range(9)]
    kernels = [{"op_id": number, "start_ns": 100 * number + 50, "duration_ns": 10} for number in range(9)]
    trace = graph_trace(ops, kernels, length=900)
    graph = build_graph(trace, only_step(trace, 900))
    assert use_half_precision(trace, graph).simulate() == graph.simulate() == 900


def test_kernels_of_two_streams_overlap() -> None:
    ops = [call(0, 1, 0, 10), call(1, 2, 10, 10), call(2, 2, 30, 500)]
    kernels = [
        {"op_id": 0, "start_ns": 5, "duration_ns": 400},
        {"op_id": 1, "start_ns": 15, "duration_ns": 100},
    ]
    trace = graph_trace(ops, kernels, length=600)
    graph = build_graph(trace, only_step(trace, 600))
    assert graph.simulate() == 600
    short = graph.scale(graph.is_device & (graph.op_id == 1), 0.1)
    assert short.simulate() == 600
    long = graph.scale(graph.is_device & (graph.op_id == 0), 0.5)
    assert long.simulate() == 400


@pytest.mark.parametrize(
    ("name", "is_bound"),
    [
        ("aten::addmm", True),
        ("aten::mm.out", True),
        ("aten::convolution_backward", True),
        ("aten::_scaled_dot_product_flash_attention", True),
        ("aten::add.Tensor", False),
        ("aten::native_layer_norm", False),
        ("aten::mul", False),
    ],
)
def test_products_and_convolutions_are_compute_bound(name: str, is_bound: bool) -> None:
    assert is_compute_bound(name) is is_bound


def test_faster_links_shorten_collectives_alone() -> None:
    ops = [call(0, 1, 0, 100), call(1, 4, 100, 600), call(2, 2, 700, 300)]
    trace = graph_trace(ops)
    result = plan_whatif(trace, [ScaleBandwidth(3)])
    assert result.recorded.step_ns == 1000 and result.predicted.step_ns == 600


def test_times_are_unknown_where_kernels_were_not_timed(recorded: Trace) -> None:
    # On a CPU, half precision has no such effect; on a GPU, the host's times are not those of the kernels.
    assert plan_whatif(recorded, [Autocast("bfloat16")]).predicted.step_ns is None
    scaled = plan_whatif(recorded, [ScaleBatch(2)])
    assert scaled.predicted.step_ns is not None and scaled.recorded.step_ns is not None
    assert scaled.recorded.step_ns < scaled.predicted.step_ns <= 2 * scaled.recorded.step_ns
    ops = [call(0, 1, 0, 100)]
    gpu = trace_of(
        events=[event("baseline", 0, 0, 8, device="cuda:0"), event("read", 0, 0, op_id=0, device="cuda:0")],
        ops=[{"phase": "forward", "recompute": False, "thread": 0, **row} for row in ops],
        spans=[step(0, 0, 1000)],
        names=[{"id": 1, "kind": "operator", "text": "aten::addmm"}],
    )
    assert plan_whatif(gpu, [ScaleBatch(2)]).predicted.step_ns is None
