"""Access intervals, swap candidates and data stalls by the clock of the GPU, on hand-made traces with known answers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis import access_intervals, access_intervals_table, analyze_access, measure_stalls
from memtrace.analysis.bandwidth import bandwidths_from_rates
from memtrace.analysis.device_clock import CLOCKS
from memtrace.analysis.swap import SwapCandidate
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of

MIB = 1 << 20
MS = 10**6
Rows = list[dict[str, Any]]


def access(kind: str, block: int, time_ns: int, call: int, device: str = "cuda:0") -> dict[str, Any]:
    return event(kind, block, time_ns, op_id=call, device=device)


def timed(call: int, start_ns: int, duration_ns: int, device: str | None = "cuda:0") -> dict[str, Any]:
    return {"op_id": call, "device": device, "start_ns": start_ns, "duration_ns": duration_ns}


def lengths(trace: Trace) -> list[tuple[int, str]]:
    intervals = access_intervals(trace)
    return [
        (ns, CLOCKS[code]) for ns, code in zip(intervals.duration_ns.tolist(), intervals.clock.tolist(), strict=True)
    ]


def late_gpu(**tables: Rows) -> Trace:
    """A block that is written, read and read again; the GPU does so much later than the host launches it."""
    events = [event("alloc", 0, 0, 8 * MIB, device="cuda:0"), access("write", 0, 10, 0), access("read", 0, 20, 1),
              access("read", 0, 30, 2)]  # fmt: skip
    return trace_of(events=events, ops=[op(number, "forward") for number in range(3)], **tables)


def test_intervals_run_from_the_end_of_a_write_to_the_start_of_a_read_on_the_gpu() -> None:
    trace = late_gpu(device_times=[timed(0, 1000, 500), timed(1, 9000, 100), timed(2, 9200, 100)])
    assert lengths(trace) == [(7500, "device"), (200, "device")]
    table = access_intervals_table(trace)
    assert table["start_ns"].tolist() == [1500, 9000] and table["clock"].tolist() == ["device", "device"]


def test_an_interval_with_an_end_that_was_not_timed_is_measured_between_launches() -> None:
    trace = late_gpu(device_times=[timed(0, 1000, 500), timed(1, 9000, 100)])
    assert lengths(trace) == [(7500, "device"), (10, "launch")]
    result = analyze_access(trace)
    assert result.num_intervals_by_clock == {"launch": 1, "device": 1}
    assert "1 interval on the GPU; 1 interval between launches" in result.clock_note


def test_without_device_times_every_answer_says_that_times_are_those_of_the_launch() -> None:
    result = analyze_access(late_gpu())
    assert lengths(late_gpu()) == [(10, "launch"), (10, "launch")]
    assert result.num_intervals_by_clock == {"launch": 2}
    assert "of the launch" in result.clock_note and "device_time=True" in result.clock_note


def test_blocks_of_the_cpu_keep_the_time_of_the_host() -> None:
    events = [event("alloc", 0, 0, 100), access("read", 0, 5, 0, "cpu"), access("read", 0, 25, 1, "cpu")]
    trace = trace_of(
        events=events, ops=[op(0, "forward"), op(1, "forward")], device_times=[timed(0, 700, 1), timed(1, 900, 1)]
    )
    assert lengths(trace) == [(20, "host")]
    assert analyze_access(trace).clock_note == "Times are host times."


def test_a_call_on_two_devices_has_the_time_of_the_block_s_device() -> None:
    events = [
        event("alloc", 0, 0, 100, device="cuda:0"), event("alloc", 1, 0, 100, device="cuda:1"),
        access("read", 0, 1, 0), access("read", 1, 1, 0, "cuda:1"),
        access("read", 0, 2, 1), access("read", 1, 2, 1, "cuda:1"),
    ]  # fmt: skip
    times = [timed(0, 100, 1, "cuda:1"), timed(0, 50, 1), timed(1, 170, 1, "cuda:1"), timed(1, 55, 1, None)]
    trace = trace_of(events=events, ops=[op(0, "forward"), op(1, "forward")], device_times=times)
    assert lengths(trace) == [(5, "device"), (70, "device")]


def test_a_block_is_a_swap_candidate_if_the_gpu_leaves_it_idle_for_long_enough() -> None:
    costs = bandwidths_from_rates(8, 8)  # GB/s: 2.1 ms for 8 MiB there and back
    idle = late_gpu(device_times=[timed(0, 0, 1000), timed(1, 3 * MS, 100), timed(2, 4 * MS, 100)])
    (candidate,) = analyze_access(idle, costs).candidates
    assert isinstance(candidate, SwapCandidate)
    assert (candidate.num_intervals, candidate.median_ns, candidate.clock) == (1, 3 * MS - 1000, "device")
    assert analyze_access(late_gpu(), costs).candidates == ()


@st.composite
def timed_accesses(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Accesses of two blocks on a GPU and one on the CPU, and device times of some of the operator calls."""
    devices = ["cuda:0", "cuda:0", "cpu"]
    events = [event("alloc", number, 0, 100, device=device) for number, device in enumerate(devices)]
    now = 0
    for call in range(draw(st.integers(0, 12))):
        for block in draw(st.lists(st.integers(0, 2), max_size=3, unique=True)):
            now += draw(st.integers(0, 50))
            events.append(access(draw(st.sampled_from(["read", "write"])), block, now, call, devices[block]))
    calls = draw(st.lists(st.integers(0, 12), unique=True))
    return events, [timed(call, draw(st.integers(0, 9999)), draw(st.integers(0, 99))) for call in calls]


@settings(max_examples=200, deadline=None)
@given(timed_accesses())
def test_intervals_equal_brute_force(rows: tuple[Rows, Rows]) -> None:
    events, times = rows
    trace = trace_of(events=events, ops=[op(number, "forward") for number in range(13)], device_times=times)
    by_call = {row["op_id"]: row for row in times}
    expected = []
    for block in range(3):
        accesses = [row for row in events if row["block_id"] == block and row["kind"] in ("read", "write")]
        for pair in pairwise(accesses):
            moments, clock = [row["time_ns"] for row in pair], "host" if block == 2 else "launch"
            if block < 2 and all(row["op_id"] in by_call for row in pair):
                clock = "device"
                calls = [by_call[row["op_id"]] for row in pair]
                moments = [
                    call["start_ns"] + (call["duration_ns"] if row["kind"] == "write" else 0)
                    for call, row in zip(calls, pair, strict=True)
                ]
            expected.append((max(moments[1] - moments[0], 0), clock))
    assert lengths(trace) == expected


# Data stalls: two steps of 100 ns on the host, each of which waits for 60 ns and then launches one operator.


def waiting(*device_times: dict[str, Any], device: str = "cuda:0") -> Trace:
    waits = [{"kind": "data_wait", "start_ns": start, "duration_ns": 60} for start in (0, 100)]
    events = [event("alloc", 0, 0, 100, device=device)]
    for call, time_ns in ((0, 70), (1, 170)):
        events.append(access("read", 0, time_ns, call, device))
    ops = [op(0, "forward") | {"start_ns": 70}, op(1, "forward") | {"start_ns": 170}]
    spans = [step(0, 0, 100), step(1, 100, 100), *waits]
    return trace_of(events=events, ops=ops, spans=spans, device_times=list(device_times))


def test_a_wait_costs_only_the_time_in_which_the_gpu_has_nothing_to_do() -> None:
    result = measure_stalls(waiting(timed(0, 75, 70), timed(1, 175, 40)))
    assert result.clock == "device"
    # The first step ends on the GPU at 145, in the wait of the second (100 to 160); that one ends at 215.
    assert [(row.duration_ns, row.data_wait_ns, row.host_wait_ns) for row in result.steps] == [
        (145, 60, 60),
        (70, 15, 60),
    ]
    assert result.wait_share == pytest.approx(75 / 215)
    assert result.clock_note.startswith("Times are device times")


def test_a_wait_that_the_gpu_spends_working_costs_nothing() -> None:
    result = measure_stalls(waiting(timed(0, 75, 200), timed(1, 275, 10)))
    assert [row.data_wait_ns for row in result.steps] == [60, 0]


def test_an_idle_gpu_waits_as_long_as_the_host() -> None:
    result = measure_stalls(waiting(timed(0, 71, 1), timed(1, 171, 1)))
    assert [(row.duration_ns, row.data_wait_ns) for row in result.steps] == [(100, 60), (100, 60)]


@pytest.mark.parametrize(("device", "note"), [("cuda:0", "device_time=True"), ("cpu", "Times are host times.")])
def test_stalls_without_device_times_are_host_times(device: str, note: str) -> None:
    result = measure_stalls(waiting(device=device))
    assert result.clock == "host" and note in result.clock_note
    assert [(row.duration_ns, row.data_wait_ns, row.host_wait_ns) for row in result.steps] == [(100, 60, 60)] * 2


def test_stalls_are_host_times_if_a_step_has_no_timed_operator() -> None:
    result = measure_stalls(waiting(timed(0, 75, 70)))
    assert result.clock == "host" and "not every step" in result.clock_note


def test_a_breakdown_uses_device_times_only_if_all_recordings_have_them() -> None:
    recorded = waiting(timed(0, 75, 70), timed(1, 175, 40))
    by_device = measure_stalls(recorded, synthetic=recorded, cached=recorded).breakdown
    mixed = measure_stalls(recorded, synthetic=waiting(), cached=recorded).breakdown
    assert by_device is not None and by_device.clock == "device"
    assert mixed is not None and (mixed.clock, mixed.cold_ns) == ("host", 100)
