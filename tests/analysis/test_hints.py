"""Hints: what is worth changing, and the thresholds below which nothing is said."""

from __future__ import annotations

import pytest
from memtrace.dashboards.overview import build_overview

import memtrace
from memtrace.analysis import find_hints
from tests.analysis.short_traces import Act, trace_of_acts, trace_of_steps
from tests.builders import event, op, step, trace_of
from tests.conftest import DefectTraces


def test_growth_and_single_line_fixes_come_before_large_categories(defect_traces: DefectTraces) -> None:
    hints = find_hints(memtrace.load(defect_traces.defects))
    assert hints[0].what.startswith("Live memory grows by ") and "defects.py" in hints[0].why
    fixes = [hint for hint in hints if hint.saved_bytes is not None]
    assert list(hints[1:4]) == fixes
    assert fixes[0].what.startswith("Retained graph at ") and fixes[0].device == "cpu"
    assert any(hint.what.startswith("Optimizer state holds ") for hint in hints[4:])


def test_findings_are_left_out_on_request(defect_traces: DefectTraces) -> None:
    hints = find_hints(memtrace.load(defect_traces.defects), include_findings=False)
    assert hints and all(hint.saved_bytes is None for hint in hints)


def test_trace_without_growth_has_no_growth_hint() -> None:
    assert not any("grows" in hint.what for hint in find_hints(trace_of_steps(12, freed=True)))
    assert any("grows" in hint.what for hint in find_hints(trace_of_steps(12, freed=False)))


@pytest.mark.parametrize(("size", "is_large"), [(100, True), (99, False)])
def test_category_needs_a_tenth_of_the_peak(size: int, is_large: bool) -> None:
    events = [event("alloc", 0, 0, 1000 - size), event("alloc", 1, 1, size)]
    labels = [{"block_id": 0, "category": "parameter"}, {"block_id": 1, "category": "gradient"}]
    hints = [hint.what for hint in find_hints(trace_of(events=events, labels=labels))]
    assert any(what.startswith("Parameters hold 90 %") for what in hints)
    assert any(what.startswith("Gradients hold 10 %") for what in hints) == is_large


@pytest.mark.parametrize(("wait_ns", "is_long"), [(10, True), (9, False)])
def test_waiting_for_data_needs_a_tenth_of_the_time(wait_ns: int, is_long: bool) -> None:
    acts: list[Act] = [("alloc", 0, 0), ("read", 0, 1)]
    wait = {"kind": "data_wait", "start_ns": 0, "duration_ns": wait_ns}
    trace = trace_of_acts(acts, spans=[step(0, 0, 100), wait])
    assert any("waiting for data" in hint.what for hint in find_hints(trace)) == is_long


def test_page_prints_hints_of_the_run_and_of_its_device() -> None:
    events = [event("alloc", 0, 0, 1000, op_id=0), event("alloc", 1, 1, 500, op_id=1, device="cuda:0")]
    labels = [{"block_id": 0, "category": "parameter"}, {"block_id": 1, "category": "gradient"}]
    trace = trace_of(events=events, ops=[op(0, "forward"), op(1, "backward")], labels=labels)
    on_cpu, on_gpu = (build_overview(trace, device).hints for device in ("cpu", "cuda:0"))
    assert [hint.finding for hint in on_cpu] == ["Parameters hold 100 % of the peak (1,000 B)."]
    assert [hint.finding for hint in on_gpu] == ["Gradients hold 100 % of the peak (500 B)."]
