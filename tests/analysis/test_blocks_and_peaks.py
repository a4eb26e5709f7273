"""Analysis against brute force on small random traces; for each category a case that fits and a near miss."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.blocks import blocks
from memtrace.analysis.growth import GrowthSource, measure_growth
from memtrace.analysis.leaks import find_leaks
from memtrace.analysis.peak import find_peak, live_blocks_at, requested_bytes
from memtrace.analysis.steps import step_columns
from memtrace.analysis.summary import summarize
from memtrace.analysis.timeline import compute_timeline, select_plot_points
from memtrace.format.schema import CATEGORIES
from tests.builders import event, op, step, trace_of


@st.composite
def histories(draw):
    """Return rows of events: blocks are allocated (or older), read, written, and some are freed."""
    rows, live, time, number = [], [], 0, 0
    for _ in range(draw(st.integers(1, 40))):
        time += draw(st.integers(0, 5))
        action = draw(st.sampled_from(["alloc", "alloc", "baseline", "free", "read", "write"]))
        if action in ("alloc", "baseline"):
            rows.append(event(action, number, time, draw(st.integers(1, 1000)), address=number * 4096))
            live.append((number, rows[-1]["size"]))
            number += 1
        elif live:
            place = draw(st.integers(0, len(live) - 1))
            block, size = live[place]
            rows.append(event(action, block, time, size if action == "free" else None))
            if action == "free":
                live.pop(place)
    return rows


def levels(rows):
    """Return the live bytes at the start and after each row, by definition."""
    now = sum(row["size"] for row in rows if row["kind"] == "baseline")
    found = [now]
    for row in rows:
        now += row["size"] if row["kind"] == "alloc" else -row["size"] if row["kind"] == "free" else 0
        found.append(now)
    return found


@settings(max_examples=200, deadline=None)
@given(histories())
def test_peak_live_bytes_and_counts_are_those_of_brute_force(rows):
    if not any(row["kind"] in ("alloc", "baseline") for row in rows):
        return
    trace = trace_of(events=rows)
    expected = levels(rows)
    found = find_peak(trace, "cpu")
    assert found.requested.bytes == max(expected)
    assert found.allocated is not None
    assert found.allocated.bytes == max(expected)
    assert found.end_bytes == expected[-1]
    at = found.requested.event + 1
    assert expected[at] == max(expected)
    # The blocks that are live at the peak sum up to it.
    assert blocks(trace).size[found.live].sum() == max(expected)
    table = blocks(trace)
    for block in range(len(table)):
        mine = [row for row in rows if row["block_id"] == block]
        assert table.num_reads[block] == sum(row["kind"] == "read" for row in mine)
        assert table.num_writes[block] == sum(row["kind"] == "write" for row in mine)
        accesses = [row["time_ns"] for row in mine if row["kind"] in ("read", "write")]
        assert table.first_access_ns[block] == (accesses[0] if accesses else -1)
        assert table.last_access_ns[block] == (accesses[-1] if accesses else -1)


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(0, 120))
def test_live_at_returns_blocks_that_were_allocated_and_not_freed(rows, time):
    if not any(row["kind"] in ("alloc", "baseline") for row in rows):
        return
    trace = trace_of(events=rows)
    expected = {row["block_id"] for row in rows if row["kind"] == "baseline"}
    for row in rows:
        if row["time_ns"] > time:
            break
        if row["kind"] == "alloc":
            expected.add(row["block_id"])
        elif row["kind"] == "free":
            expected.discard(row["block_id"])
    assert set(live_blocks_at(trace, "cpu", time).index) == expected


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(4, 30))
def test_a_timeline_is_exact_at_its_points_and_keeps_the_peak(rows, points):
    if not any(row["kind"] in ("alloc", "free") for row in rows):
        return
    trace = trace_of(events=rows)
    table = compute_timeline(trace, "cpu", points)
    expected = levels(rows)
    for row in table.itertuples():
        assert row.requested == expected[row.event + 1] == row.allocated
        assert sum(getattr(row, category) for category in CATEGORIES) == row.requested
    assert table.requested.max() == requested_bytes(trace, "cpu").bytes.max()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(2, 50))
def test_plot_points_are_ascending_and_include_the_maximum(values, points):
    kept = select_plot_points(np.array(values), points)
    assert max(values) == max(values[place] for place in kept)
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= max(points, 2)


@settings(max_examples=100, deadline=None)
@given(histories(), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_columns_of_steps_agree_with_brute_force(rows, lengths):
    if not any(row["kind"] in ("alloc", "baseline") for row in rows):
        return
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).tolist()
    spans = [step(index, start, length) for index, (start, length) in enumerate(zip(starts, lengths, strict=True))]
    found = step_columns(trace_of(events=rows, spans=spans))
    expected = levels(rows)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        inside = [place for place, row in enumerate(rows) if start <= row["time_ns"] < start + length]
        before = sum(row["time_ns"] < start for row in rows)
        assert found.num_allocs[index] == sum(rows[place]["kind"] == "alloc" for place in inside)
        assert found.allocated_bytes[index] == sum(rows[p]["size"] for p in inside if rows[p]["kind"] == "alloc")
        assert found.peak_bytes[index] == max(expected[before : before + len(inside) + 1])
        assert found.live_end_bytes[index] == expected[before + len(inside)]


OPS = [op(0, "forward"), op(1, "backward"), op(2, "other"), op(3, "forward"), op(4, "backward", recompute=True)]
CASES = {
    "activation": [event("alloc", 0, 1, 8, op_id=0), event("read", 0, 2, op_id=1), event("free", 0, 3, 8, op_id=1)],
    "activation, recomputed": [event("alloc", 0, 1, 8, op_id=4), event("read", 0, 2, op_id=1), event("free", 0, 3, 8)],
    "temporary, not read in backward": [
        event("alloc", 0, 1, 8, op_id=0), event("read", 0, 2, op_id=3), event("free", 0, 3, 8, op_id=3)
    ],
    "unknown, outlives its phase": [
        event("alloc", 0, 1, 8, op_id=0), event("read", 0, 2, op_id=3), event("free", 0, 3, 8, op_id=2)
    ],
    "workspace": [event("alloc", 0, 1, 8, op_id=0), event("free", 0, 2, 8, op_id=0)],
    "temporary, freed by the next operator": [event("alloc", 0, 1, 8, op_id=0), event("free", 0, 2, 8, op_id=3)],
    "input": [event("alloc", 0, 1, 8, op_id=2), event("read", 0, 2, op_id=0), event("free", 0, 3, 8, op_id=1)],
    "input, from outside": [event("alloc", 0, 1, 8), event("read", 0, 2, op_id=0), event("free", 0, 3, 8, op_id=2)],
    "unknown, never read": [event("alloc", 0, 1, 8, op_id=2), event("free", 0, 3, 8, op_id=1)],
    "unknown, older than the recording": [event("baseline", 0, 1, 8), event("read", 0, 2, op_id=0)],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_categories_by_use(case):
    found = blocks(trace_of(events=CASES[case], ops=OPS))
    assert CATEGORIES[found.category[0]] == case.partition(",")[0]


def test_the_strongest_label_wins():
    labels = [
        {"block_id": 0, "category": "input"},
        {"block_id": 0, "category": "parameter", "name": 7},
        {"block_id": 0, "category": "gradient"},
    ]
    found = blocks(trace_of(events=CASES["activation"], ops=OPS, labels=labels))
    assert CATEGORIES[found.category[0]] == "parameter"
    assert found.name[0] == 7


def growing(kept: int, steps: int = 8) -> list[dict[str, object]]:
    rows, number = [], 0
    for index in range(steps):
        rows.append(event("alloc", number, 10 * index, 500))
        rows.append(event("alloc", number + 1, 10 * index + 1, 100))
        rows.append(event("free", number, 10 * index + 5, 500))
        if index >= kept:
            rows.append(event("free", number + 1, 10 * index + 6, 100))
        number += 2
    return rows


@pytest.mark.parametrize(("kept", "slope"), [(8, 100), (2, 0), (0, 0)])
def test_growth_counts_what_every_step_keeps_and_not_warm_up(kept, slope):
    trace = trace_of(events=growing(kept), spans=[step(index, 10 * index, 10) for index in range(8)])
    found = measure_growth(trace)
    assert found is not None
    assert found.bytes_per_step == slope
    assert bool(found.sources) == (slope > 0)


def test_growth_is_the_sum_of_the_leaks_even_if_freed_at_the_end():
    rows = [event("alloc", n, 30 * n, 900) for n in range(4)]
    rows += [event("alloc", 9, 119, 1), *(event("free", n, 120, 900) for n in range(4))]
    trace = trace_of(events=rows, spans=[step(n, 10 * n, 10) for n in range(12)])
    found = measure_growth(trace)
    assert found is not None
    assert found.bytes_per_step == round(find_leaks(trace).bytes_per_step) > 250
    assert found.sources == (GrowthSource("no stack (unknown)", found.bytes_per_step),)


def test_growth_is_unknown_with_few_steps():
    assert measure_growth(trace_of(events=growing(8, 3), spans=[step(i, 10 * i, 10) for i in range(3)])) is None


def test_each_device_has_its_own_peak_and_reserved_bytes_follow_from_segments():
    rows = [
        event("segment_alloc", None, 0, 4096, device="cuda:0", allocated_size=None),
        event("alloc", 0, 1, 100, device="cuda:0", allocated_size=512),
        event("alloc", 1, 1, 7),
        event("free", 0, 2, 100, device="cuda:0", allocated_size=512),
        event("alloc", 2, 3, 200, device="cuda:0", allocated_size=None),
    ]
    trace = trace_of(events=rows)
    cpu, cuda = find_peak(trace, "cpu"), find_peak(trace, "cuda:0")
    assert (cpu.requested.bytes, cpu.reserved) == (7, None)
    assert cuda.requested.bytes == 200
    assert cuda.allocated is None
    assert cuda.reserved is not None
    assert cuda.reserved.bytes == 4096


def test_the_summary_is_json_and_has_no_reserved_bytes_on_a_cpu() -> None:
    result = summarize(trace_of(events=CASES["activation"], ops=OPS))
    output = json.loads(json.dumps(asdict(result), allow_nan=False))
    assert list(output)[:2] == ["rank", "coverage"] and output["out_of_memory"] == []
    assert output["steps"]["num_steps"] == 0
    (device,) = output["devices"]
    assert device["peak"]["reserved_bytes"] is None
    assert device["peak"]["by_category"] == {"activation": 8}


def test_an_empty_trace_has_a_summary() -> None:
    assert summarize(trace_of(events=[])).devices == ()


def test_reading_needs_neither_torch_nor_pandas(tmp_path):
    import subprocess

    modules = "{'torch', 'pandas'} & set(sys.modules)"
    program = f"import sys; import memtrace.analysis.summary, memtrace.cli; sys.exit(bool({modules}))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("functions", "expected_site"),
    [
        (
            ["c10::malloc", "at::_ops::sum::redispatch(int)", "at::_ops::sum_to::call(int)", "__clone"],
            "aten::sum_to (torch)",
        ),
        (["at::_ops::mm::call(int)", "torch::autograd::generated::MmBackward0::apply(int)"], "MmBackward0 (autograd)"),
        (["c10::malloc", "__clone"], "alloc.cpp:0 c10::malloc"),
    ],
)
def test_a_stack_without_user_code_is_named_by_the_innermost_torch_operator(functions, expected_site):
    names = [{"id": number, "kind": "frame", "text": f"alloc.cpp\t0\t{name}"} for number, name in enumerate(functions)]
    stack = {"id": 9, "kind": "stack", "frames": list(range(len(functions)))}
    assert allocation_site(trace_of(events=[event("alloc", 0, 0, 8)], names=[*names, stack]), 9) == expected_site
