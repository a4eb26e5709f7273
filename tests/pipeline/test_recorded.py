"""Recorded actions and what they amount to, on small traces made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from memtrace.cli import cli
from memtrace.dashboards.page import render

from memtrace.errors import MemtraceError, TraceError
from memtrace.pipeline.compare import compare, recorded_cut
from memtrace.pipeline.costs import Layer
from memtrace.pipeline.from_trace import TraceCosts
from memtrace.pipeline.measured import measured
from memtrace.pipeline.recorded import clock_shift_ns, recorded_actions, recorded_schedule
from memtrace.pipeline.schedules.registry import build
from memtrace.pipeline.simulation.memory import PAPER
from memtrace.trace import Trace
from tests.builders import event, op, trace_of, with_manifest


def rank_trace(actions: list[tuple[str, int, int]], rank: int = 0, **tables) -> Trace:
    """A rank with these actions (text, start, end) and one event at every time up to the last end."""
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
    made = trace_of(
        events=tables.get("events", [event("alloc", 0, 0, 8)]),
        ops=tables.get("ops", [op(0, "forward", name=0)]),
        names=names + tables.get("names", []),
        spans=spans,
        labels=tables.get("labels", []),
    )
    return with_manifest(made, rank=rank)


def job(*ranks: Trace) -> Trace:
    return Trace(None, {number: one._source for number, one in enumerate(ranks)})


def unit_time(name: str, workers: int, microbatches: int, steps: int) -> Trace:
    """The table of a schedule as if every action took one slot, ``steps`` times over."""
    table = build(name, workers, microbatches)
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


@pytest.mark.parametrize("name", ["gpipe", "dapple", "interleaved", "chimera", "gems", "zb-h1", "dualpipe-v"])
def test_the_schedule_that_ran_is_read_back(name: str) -> None:
    table = build(name, 4, 8)
    found = recorded_schedule(recorded_actions(unit_time(name, 4, 8, steps=3)))
    assert found.rows == table.rows
    assert found.placement == table.placement
    assert found.num_microbatches == 8


def test_pipelines_side_by_side_are_one_schedule_and_each_rank_is_compared() -> None:
    """Data parallelism: ranks 0 to 3 and 4 to 7 run the same stages."""
    once = unit_time("dapple", 4, 8, steps=2)
    both = job(*(once.rank(rank) for rank in (0, 1, 2, 3, 0, 1, 2, 3)))
    found = measured(both)
    table = build("dapple", 4, 8)
    assert recorded_schedule(found.ranks).rows == table.rows
    layers = [Layer(name="x", forward_s=1, backward_s=1, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0,
                    activation_bytes=1, output_bytes=1)] * 4  # fmt: skip
    compared = compare(found, TraceCosts(layers, PAPER, None, 1), cut=[0, 1, 2, 3])
    assert [one.predicted_in_flight for one in compared.workers] == [4, 3, 2, 1, 4, 3, 2, 1]
    assert [one.measured_in_flight for one in compared.workers] == [4, 3, 2, 1, 4, 3, 2, 1]


@pytest.mark.parametrize("name", ["gpipe", "dapple", "interleaved", "zb-h1"])
def test_bubbles_and_in_flight_are_those_of_the_table(name: str) -> None:
    table = build(name, 4, 8)
    found = measured(unit_time(name, 4, 8, steps=2))
    busy = np.array([len(row) for row in table.rows])
    assert [worker.bubble_share for worker in found.workers] == pytest.approx(list(1 - busy / table.num_slots))
    for worker, row in zip(found.workers, table.rows, strict=True):
        level = np.cumsum([{"F": 1, "B": -1, "I": -1, "W": 0}[action.kind] for action in row])
        assert worker.in_flight_peak == level.max()


def test_neighbouring_ranges_of_one_action_are_one() -> None:
    one = recorded_actions(job(rank_trace([("F0.0", 0, 4), ("F0.0", 5, 8), ("B0.0", 9, 12), ("F0.0", 20, 24)])))[0]
    assert [str(action) for action in one.actions] == ["F0.0", "B0.0", "F0.0"]
    assert list(one.start_ns) == [0, 9, 20]
    assert list(one.end_ns) == [8, 12, 24]
    assert list(one.round) == [0, 0, 1]
    assert list(one.in_flight()) == [1, 1, 1, 0, 1, 1]


def test_a_split_micro_batch_is_in_flight_until_its_second_half() -> None:
    one = recorded_actions(job(rank_trace([("F0.0", 0, 4), ("B0.0a", 5, 6), ("B0.0b", 7, 8)])))[0]
    assert list(one.in_flight()) == [1, 1, 1, 1, 1, 0]


def test_bytes_of_a_stage_by_hand() -> None:
    """Kept: received before the forward, and made in it; not what dies in it, nor weights, nor what comes later."""
    events = [
        event("baseline", 0, 0, 64),  # weight of stage 0, read by it
        event("baseline", 1, 0, 32),  # weight of stage 1
        event("alloc", 10, 11, 5),  # made before the first action: the program's own
        event("read", 0, 22, op_id=0),
        event("alloc", 11, 23, 100, op_id=0),
        event("alloc", 12, 24, 7, op_id=0),
        event("free", 12, 25, 7),
        event("alloc", 13, 31, 40),  # the message to stage 1, behind the first forward
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
    first, second = measured(job(trace)).stages
    assert (first.parameter_bytes, second.parameter_bytes) == (64, 32)
    assert (first.gradient_bytes, second.gradient_bytes) == (64, 0)
    assert (first.activation_bytes, second.activation_bytes) == (100, 240)
    assert (first.forward_ns, first.backward_ns) == (10, 10)


@pytest.mark.parametrize(("merged", "expected"), [(None, "gone"), ((28, 29), "kept"), ((28, 58), "held")])
def test_outputs_that_a_step_of_torch_returns(merged: tuple[int, int] | None, expected: str) -> None:
    """Made behind the last action, inside the step, and not freed by it: gone or not while the next step runs."""
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
    assert measured(job(trace)).outputs == expected


def test_clocks_by_what_was_measured_else_by_the_wall() -> None:
    measured_clock = {"clock": {"offset_ns": -70}, "t0_epoch_ns": 1000}
    reference = {"clock": {"offset_ns": 0}, "t0_epoch_ns": 900}
    assert clock_shift_ns(measured_clock, reference) == -70
    assert clock_shift_ns({"t0_epoch_ns": 1000}, reference) == 100
    assert clock_shift_ns({}, reference) == 0


def test_what_is_no_pipeline_or_not_all_of_one_is_refused(tmp_path) -> None:
    with pytest.raises(TraceError, match=r"rec\.stage"):
        measured(job(rank_trace([])))
    with pytest.raises(TraceError, match="lacks stages"):
        recorded_schedule(recorded_actions(job(rank_trace([("F0.0", 0, 1), ("F2.0", 2, 3)]))))
    nonsense = job(rank_trace([("F0.0", 0, 1), ("sideways", 2, 3)]))
    with pytest.raises(TraceError, match="sideways"):
        measured(nonsense)
    assert "Pipeline schedule" not in render(nonsense)
    shown = CliRunner().invoke(cli, ["pipeline", str(tmp_path / "nothing")])
    assert isinstance(shown.exception, TraceError)


@pytest.mark.parametrize("cut", [[0, 2, 1, 3], [0, 1, 1, 2], [1, 2, 3, 4], [0, 1, 2, 9]])
def test_a_cut_that_is_none_is_refused(cut: list[int]) -> None:
    found = measured(unit_time("dapple", 4, 8, steps=2))
    layers = [Layer(name="x", forward_s=1, backward_s=1, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0,
                    activation_bytes=1, output_bytes=1)] * 5  # fmt: skip
    with pytest.raises(MemtraceError, match="must begin with 0 and rise, below the 5 layers"):
        compare(found, TraceCosts(layers, PAPER, None, 1), cut=cut)


def test_ranks_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = unit_time("dapple", 4, 8, steps=2)
    whole = job(*(with_manifest(whole.rank(rank), world_size=5) for rank in whole.ranks))
    assert measured(whole).as_dict()["missing_ranks"] == [4]
    monkeypatch.setattr("memtrace.trace.load", lambda path: whole)
    assert "missing: rank 4 of the job" in CliRunner().invoke(cli, ["pipeline", str(tmp_path)]).output
    refused = CliRunner().invoke(cli, ["pipeline", str(tmp_path), "--schedule", "gpipe"])
    assert "are for --predict" in str(refused.exception)


def test_the_cut_that_was_run_is_found_by_parameters() -> None:
    def layer(parameter_bytes: int) -> Layer:
        return Layer(name="x", forward_s=1, backward_s=1, parameter_bytes=parameter_bytes, gradient_bytes=0,
                     optimizer_bytes=0, activation_bytes=1, output_bytes=1)  # fmt: skip

    events = [event("baseline", 0, 0, 30), event("read", 0, 1, op_id=0)]
    labels = [{"block_id": 0, "category": "parameter", "name": 1}]
    names = [{"id": 1, "kind": "tensor", "text": "w"}]
    ranks = [rank_trace([(f"F{stage}.0", 0, 5)], stage, events=events, labels=labels, names=names) for stage in (0, 1)]
    found = measured(job(*ranks))
    assert recorded_cut(found, [layer(10), layer(20), layer(0), layer(30)]) == [0, 2]
    with pytest.raises(MemtraceError, match="give the cut"):
        recorded_cut(found, [layer(10), layer(25), layer(25)])
    with pytest.raises(MemtraceError, match="more layers"):
        recorded_cut(found, [layer(30), layer(30), layer(1)])
