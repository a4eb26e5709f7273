"""Recorded pipeline actions, stages and workers of small hand-made traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from memtrace.cli import cli
from memtrace.dashboards.page import render

from memtrace.analysis.rank_clocks import clock_shift_ns
from memtrace.errors import MemtraceError, TraceError
from memtrace.format.manifest import ClockOffset, Manifest
from memtrace.pipeline.costs import LayerCosts
from memtrace.pipeline.layer_costs import MeasuredLayers
from memtrace.pipeline.measured import measure_pipeline
from memtrace.pipeline.memory_rules import PAPER
from memtrace.pipeline.prediction import infer_first_layers, predict_recorded_pipeline
from memtrace.pipeline.recorded import recorded_actions, recorded_schedule
from memtrace.pipeline.schedules.registry import build_schedule
from memtrace.trace import Trace
from tests.builders import event, op, trace_of, with_manifest


def rank_trace(actions: list[tuple[str, int, int]], rank: int = 0, **tables: Any) -> Trace:
    """A trace of one rank with these actions (text, start, end); ``tables`` are further rows."""
    texts = list(dict.fromkeys(text for text, _, _ in actions))
    names = [{"id": 100 + number, "kind": "range", "text": text} for number, text in enumerate(texts)]
    spans = [
        {
            "kind": "action",
            "name": 100 + texts.index(text),
            "start_ns": start,
            "duration_ns": end - start,
            "index": None,
        }
        for text, start, end in actions
    ]
    spans += [
        {"kind": "range", "name": 1, "start_ns": start, "duration_ns": end - start, "index": None}
        for start, end in tables.get("steps", [])
    ]
    trace = trace_of(
        events=tables.get("events", [event("alloc", 0, 0, 8)]),
        ops=tables.get("ops", [op(0, "forward", name=0)]),
        names=names + tables.get("names", []),
        spans=spans,
        labels=tables.get("labels", []),
    )
    return with_manifest(trace, rank=rank)


def job(*ranks: Trace) -> Trace:
    """One trace of several ranks."""
    return Trace(None, {number: rank._source for number, rank in enumerate(ranks)})


def unit_time_trace(name: str, workers: int, microbatches: int, steps: int) -> Trace:
    """``steps`` steps of a schedule in which every action takes one slot (10 ns)."""
    table = build_schedule(name, workers, microbatches)
    ranks = []
    for worker, (row, slots) in enumerate(zip(table.rows, table.slots, strict=True)):
        marks = [
            (
                str(action),
                10 * (slot + number * (table.num_slots + 2)),
                10 * (slot + number * (table.num_slots + 2)) + 10,
            )
            for number in range(steps)
            for slot, action in zip(slots, row, strict=True)
        ]
        ranks.append(rank_trace(marks, worker))
    return job(*ranks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "chimera", "gems", "zb-h1", "dualpipe-v"])
def test_the_recorded_schedule_equals_the_one_that_ran(name: str) -> None:
    table = build_schedule(name, 4, 8)
    schedule = recorded_schedule(recorded_actions(unit_time_trace(name, 4, 8, steps=3)))
    assert schedule.rows == table.rows
    assert schedule.placement == table.placement
    assert schedule.num_microbatches == 8


def test_data_parallel_pipelines_have_one_schedule_and_every_rank_is_compared() -> None:
    """Ranks 0 to 3 and ranks 4 to 7 run the same stages."""
    once = unit_time_trace("1f1b", 4, 8, steps=2)
    both = job(*(once.rank(rank) for rank in (0, 1, 2, 3, 0, 1, 2, 3)))
    table = build_schedule("1f1b", 4, 8)
    assert recorded_schedule(recorded_actions(both)).rows == table.rows
    layers = [LayerCosts(name="x", forward_s=1, backward_s=1, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0,
                    activation_bytes=1, output_bytes=1)] * 4  # fmt: skip
    costs = MeasuredLayers(layers, PAPER, None, 1)
    comparison = predict_recorded_pipeline(both, costs, first_layers=[0, 1, 2, 3]).comparison
    assert [worker.predicted_in_flight for worker in comparison.workers] == [4, 3, 2, 1, 4, 3, 2, 1]
    assert [worker.measured_in_flight for worker in comparison.workers] == [4, 3, 2, 1, 4, 3, 2, 1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_measured_bubbles_and_microbatches_in_flight_equal_those_of_the_schedule(name: str) -> None:
    table = build_schedule(name, 4, 8)
    measured = measure_pipeline(unit_time_trace(name, 4, 8, steps=2))
    busy = np.array([len(row) for row in table.rows])
    assert [worker.bubble_ratio for worker in measured.workers] == pytest.approx(list(1 - busy / table.num_slots))
    for worker, row in zip(measured.workers, table.rows, strict=True):
        level = np.cumsum([{"F": 1, "B": -1, "I": -1, "W": 0}[action.kind] for action in row])
        assert worker.in_flight_peak == level.max()


def test_neighbouring_ranges_of_the_same_action_count_as_one() -> None:
    rank_actions = recorded_actions(
        job(rank_trace([("F0.0", 0, 4), ("F0.0", 5, 8), ("B0.0", 9, 12), ("F0.0", 20, 24)]))
    )[0]
    assert [str(action) for action in rank_actions.actions] == ["F0.0", "B0.0", "F0.0"]
    assert list(rank_actions.start_ns) == [0, 9, 20]
    assert list(rank_actions.end_ns) == [8, 12, 24]
    assert list(rank_actions.step) == [0, 0, 1]
    assert list(rank_actions.in_flight()) == [1, 1, 1, 0, 1, 1]


def test_a_halved_microbatch_is_in_flight_until_its_second_half_ends() -> None:
    rank_actions = recorded_actions(job(rank_trace([("F0.0", 0, 4), ("B0.0a", 5, 6), ("B0.0b", 7, 8)])))[0]
    assert list(rank_actions.in_flight()) == [1, 1, 1, 1, 1, 0]


def test_stage_bytes_of_a_hand_made_trace() -> None:
    """Activations are what a forward receives and allocates, without temporaries, weights and later allocations."""
    events = [
        event("baseline", 0, 0, 64),  # weight of stage 0, read by it
        event("baseline", 1, 0, 32),  # weight of stage 1
        event("alloc", 10, 11, 5),  # allocated before the first action: belongs to no stage
        event("read", 0, 22, op_id=0),
        event("alloc", 11, 23, 100, op_id=0),
        event("alloc", 12, 24, 7, op_id=0),
        event("free", 12, 25, 7),
        event("alloc", 13, 31, 40),  # the message to stage 1, after the first forward
        event("read", 1, 42, op_id=1),
        event("alloc", 14, 43, 200, op_id=1),
        event("alloc", 15, 62, 64),  # gradient of the weight of stage 0
        event("free", 14, 53, 200),
        event("free", 13, 54, 40),
        event("free", 11, 64, 100),
    ]
    events.sort(key=lambda row: row["time_ns"])
    trace = rank_trace(
        [("F0.0", 20, 30), ("F1.0", 40, 45), ("B1.0", 50, 55), ("B0.0", 60, 70)],
        events=events,
        ops=[op(0, "forward", name=0), op(1, "forward", name=0)],
        names=[{"id": 0, "kind": "operator", "text": "aten::mm"}, {"id": 1, "kind": "tensor", "text": "a.weight"},
               {"id": 2, "kind": "tensor", "text": "b.weight"}],
        labels=[{"block_id": 0, "category": "parameter", "name": 1}, {"block_id": 1, "category": "parameter", "name": 2},
                {"block_id": 15, "category": "gradient", "name": 1}],
    )  # fmt: skip
    first, second = measure_pipeline(job(trace)).stages
    assert (first.parameter_bytes, second.parameter_bytes) == (64, 32)
    assert (first.gradient_bytes, second.gradient_bytes) == (64, 0)
    assert (first.activation_bytes, second.activation_bytes) == (100, 240)
    assert (first.forward_ns, first.backward_ns) == (10, 10)


@pytest.mark.parametrize(("merged", "expected"), [(None, "none"), ((28, 29), "microbatches"), ((28, 58), "merged")])
def test_model_outputs_kept_by_torch_are_detected(merged: tuple[int, int] | None, expected: str) -> None:
    """Merged outputs are allocated after the last action of a step and freed during or after the next step."""
    events = [event("alloc", 0, 21, 8), event("alloc", 1, 26, 8), event("free", 1, 27, 8)]
    if merged is not None:
        events += [event("alloc", 2, merged[0], 8), event("free", 2, merged[1] + 5, 8)]
    events += [event("alloc", number, time, 8) for number, time in ((3, 45), (4, 54), (5, 90))]
    events.sort(key=lambda row: row["time_ns"])
    trace = rank_trace(
        [("F0.0", 20, 22), ("B0.0", 23, 25), ("F0.0", 50, 52), ("B0.0", 53, 55)],
        events=events,
        names=[{"id": 1, "kind": "range", "text": "torch.distributed.pipelining.ScheduleGPipe"}],
        steps=[(15, 30), (45, 60)],
    )
    assert measure_pipeline(job(trace)).kept_outputs == expected


def test_clock_shift_uses_the_measured_offset_else_the_wall_clocks() -> None:
    measured_clock = Manifest(clock=ClockOffset(offset_ns=-70), t0_epoch_ns=1000)
    reference = Manifest(clock=ClockOffset(offset_ns=0), t0_epoch_ns=900)
    assert clock_shift_ns(measured_clock, reference) == -70
    assert clock_shift_ns(Manifest(t0_epoch_ns=1000), reference) == 100
    assert clock_shift_ns(Manifest(), reference) == 0


def test_traces_without_a_complete_pipeline_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"rec\.stage"):
        measure_pipeline(job(rank_trace([])))
    with pytest.raises(TraceError, match="no recorded actions of pipeline stage 1"):
        recorded_schedule(recorded_actions(job(rank_trace([("F0.0", 0, 1), ("F2.0", 2, 3)]))))
    invalid = job(rank_trace([("F0.0", 0, 1), ("sideways", 2, 3)]))
    with pytest.raises(TraceError, match="sideways"):
        measure_pipeline(invalid)
    assert "Pipeline schedule" not in render(invalid)
    shown = CliRunner().invoke(cli, ["pipeline", str(tmp_path / "nothing")])
    assert isinstance(shown.exception, TraceError)


@pytest.mark.parametrize("first_layers", [[0, 2, 1, 3], [0, 1, 1, 2], [1, 2, 3, 4], [0, 1, 2, 9]])
def test_invalid_partitions_are_rejected(first_layers: list[int]) -> None:
    trace = unit_time_trace("1f1b", 4, 8, steps=2)
    layers = [LayerCosts(name="x", forward_s=1, backward_s=1, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0,
                    activation_bytes=1, output_bytes=1)] * 5  # fmt: skip
    with pytest.raises(MemtraceError, match="must begin with 0 and ascend to at most 4"):
        predict_recorded_pipeline(trace, MeasuredLayers(layers, PAPER, None, 1), first_layers=first_layers)


def test_missing_ranks_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = unit_time_trace("1f1b", 4, 8, steps=2)
    whole = job(*(with_manifest(whole.rank(rank), world_size=5) for rank in whole.ranks))
    assert measure_pipeline(whole).missing_ranks == (4,)
    monkeypatch.setattr("memtrace.trace.load", lambda path, **options: whole)
    assert "Missing ranks: 4" in CliRunner().invoke(cli, ["pipeline", str(tmp_path)]).output
    refused = CliRunner().invoke(cli, ["pipeline", str(tmp_path), "--schedule", "gpipe"])
    assert "need --predict" in str(refused.exception)


def test_the_partition_is_inferred_from_the_parameters_of_the_stages() -> None:
    def layer(parameter_bytes: int) -> LayerCosts:
        return LayerCosts(name="x", forward_s=1, backward_s=1, parameter_bytes=parameter_bytes, gradient_bytes=0,
                     optimizer_bytes=0, activation_bytes=1, output_bytes=1)  # fmt: skip

    events = [event("baseline", 0, 0, 30), event("read", 0, 1, op_id=0)]
    labels = [{"block_id": 0, "category": "parameter", "name": 1}]
    names = [{"id": 1, "kind": "tensor", "text": "w"}]
    ranks = [rank_trace([(f"F{stage}.0", 0, 5)], stage, events=events, labels=labels, names=names) for stage in (0, 1)]
    measured = measure_pipeline(job(*ranks))
    assert infer_first_layers(measured, [layer(10), layer(20), layer(0), layer(30)]) == [0, 2]
    with pytest.raises(MemtraceError, match="give the partition"):
        infer_first_layers(measured, [layer(10), layer(25), layer(25)])
    with pytest.raises(MemtraceError, match="more layers"):
        infer_first_layers(measured, [layer(30), layer(30), layer(1)])
