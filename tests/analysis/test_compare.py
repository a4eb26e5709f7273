"""Several runs side by side: which ranks and devices are compared, what differs, and steps on one axis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.aligned_curves import aligned_curve, aligned_step_peaks, step_positions
from memtrace.analysis.blocks import blocks
from memtrace.analysis.compare import compare_runs, interval_quantiles, label_paths, match_runs, unique_labels
from memtrace.analysis.diff import compare_traces
from memtrace.analysis.intervals import access_intervals, device_intervals
from memtrace.analysis.peak import find_peak, requested_bytes
from memtrace.analysis.steps import device_step_peaks, step_columns
from memtrace.errors import TraceError
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace, load
from tests.builders import event, op, step, trace_of

MIB = 1 << 20


def sized_trace(sizes: list[int], *, device: str = "cpu", step_ns: int = 100, first_step: int = 0) -> Trace:
    """A trace with one step for each size, in which a block of that size is allocated, used twice and freed."""
    events, ops, spans = [], [], []
    for number, size in enumerate(sizes):
        start = number * step_ns
        for place, kind in enumerate(("alloc", "write", "read", "free")):
            time = start + (1 + place) * step_ns // 6
            block_size = size if kind in ("alloc", "free") else None
            events.append(event(kind, number, time, block_size, device=device, op_id=4 * number + place))
            ops.append(op(4 * number + place, "forward"))
        spans.append(step(first_step + number, start, step_ns))
    return trace_of(events=events, ops=ops, spans=spans)


def job(traces: dict[int, Trace]) -> Trace:
    """A trace of several ranks."""
    sources = {rank: trace._source.with_manifest(replace(trace.manifest, rank=rank)) for rank, trace in traces.items()}
    return Trace(None, sources)


MOVED_SITES = [
    {"id": 0, "kind": "frame", "text": "/x/model.py\t3\tforward"},
    {"id": 1, "kind": "stack", "frames": [0]},
    {"id": 2, "kind": "frame", "text": "/x/model.py\t9\tforward"},
    {"id": 3, "kind": "stack", "frames": [2]},
    {"id": 4, "kind": "frame", "text": "/x/other.py\t5\tloss"},
    {"id": 5, "kind": "stack", "frames": [4]},
]
STACKS = (1, 3, 5)


def trace_of_sites(sizes: list[tuple[int, int]]) -> Trace:
    """A trace whose blocks are all live at once: pairs of the index of a stack and a size."""
    events = [event("alloc", number, number, size, op_id=number) for number, (_, size) in enumerate(sizes)]
    ops = [op(number, "forward", stack=STACKS[stack]) for number, (stack, _) in enumerate(sizes)]
    labels = [
        {"block_id": number, "category": ("parameter", "activation")[size % 2]}
        for number, (_, size) in enumerate(sizes)
    ]
    return trace_of(events=events, ops=ops, labels=labels, names=MOVED_SITES)


BLOCKS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 99)), min_size=1, max_size=8)


@settings(max_examples=20, deadline=None)
@given(BLOCKS, BLOCKS)
def test_differences_of_two_runs_are_those_of_diff(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    traces = trace_of_sites(before), trace_of_sites(after)
    compared = compare_runs(match_runs(traces, ("a", "b")))
    changes = {
        (change.grouping, change.name): (change.kind, change.before_bytes, change.after_bytes, change.change_bytes)
        for change in compare_traces(*traces).changes
        if change.measure == "live_at_peak"
    }
    assert {
        (group.grouping, group.name): (group.kind, *group.bytes_by_run, group.change_bytes) for group in compared.groups
    } == changes


@settings(max_examples=20, deadline=None)
@given(st.lists(BLOCKS, min_size=2, max_size=5))
def test_bytes_of_each_run_are_the_sums_over_its_blocks_at_the_peak(runs: list[list[tuple[int, int]]]) -> None:
    compared = compare_runs(match_runs([trace_of_sites(sizes) for sizes in runs], [str(n) for n in range(len(runs))]))
    by_category = {group.name: group.bytes_by_run for group in compared.groups if group.grouping == "category"}
    for name, parity in (("parameter", 0), ("activation", 1)):
        expected = tuple(sum(size for _, size in sizes if size % 2 == parity) or None for sizes in runs)
        if name in by_category:
            assert by_category[name] == expected
        else:
            assert len(set(expected)) == 1
    assert [run.peak_bytes for run in compared.runs] == [sum(size for _, size in sizes) for sizes in runs]
    # A site that moved keeps its row, whatever line it has: no bytes are lost or counted twice.
    for grouping in ("module", "site"):
        groups = [group for group in compared.groups if group.grouping == grouping]
        for number, sizes in enumerate(runs):
            equal = sum(size for _, size in sizes) - sum(group.bytes_by_run[number] or 0 for group in groups)
            assert equal >= 0
            assert equal == sum(size for _, size in runs[0]) - sum(group.bytes_by_run[0] or 0 for group in groups)


def test_a_site_that_moves_in_every_run_stays_one_site() -> None:
    runs = [trace_of_sites([(stack, 10 + stack)]) for stack in (0, 1)]
    (site,) = [g for g in compare_runs(match_runs(runs, ("a", "b"))).groups if g.grouping == "site"]
    assert (site.name, site.kind, site.bytes_by_run) == ("x/model.py:9 forward", "grew", (10, 11))


def test_runs_that_hold_the_same_differ_in_nothing(gpt_trace: Path) -> None:
    compared = compare_runs(match_runs([load(gpt_trace), load(gpt_trace)]))
    assert compared.groups == ()
    assert [run.label for run in compared.runs] == ["run (1)", "run (2)"]


def test_key_figures_are_those_of_the_analyses(gpt_trace: Path) -> None:
    trace = load(gpt_trace)
    (run, _) = compare_runs(match_runs([trace, trace], ("a", "b"))).runs
    live = find_peak(trace, "cpu").live
    table = blocks(trace)
    assert run.peak_bytes == sum(run.bytes_by_category.values()) == table.size[live].sum()
    activations = live[table.category[live] == CATEGORIES.index("activation")]
    assert run.bytes_by_category["activation"] == table.size[activations].sum()
    rows = device_intervals(trace, "cpu")
    assert run.num_intervals == len(rows)
    assert run.median_interval_ns == round(np.median(access_intervals(trace).duration_ns[rows]))
    assert run.median_step_peak_bytes == np.median(step_columns(trace).peak_bytes[2:])


def test_the_rank_with_the_highest_peak_that_all_jobs_have_is_compared() -> None:
    first = job({0: sized_trace([10]), 1: sized_trace([90]), 2: sized_trace([99])})
    second = job({0: sized_trace([20]), 1: sized_trace([30])})
    assert [run.rank for run in match_runs([first, second])] == [1, 1]
    assert [run.rank for run in match_runs([first, second, sized_trace([5])])] == [1, 1, 0]
    assert [run.rank for run in match_runs([first, second], rank=0)] == [0, 0]
    assert "trace (1): rank 1 of 3, trace (2): rank 1 of 2." in compare_runs(match_runs([first, second])).notes


def test_jobs_without_a_common_rank_are_compared_by_their_fullest_ranks() -> None:
    first = job({0: sized_trace([10]), 1: sized_trace([90])})
    second = job({2: sized_trace([40]), 3: sized_trace([30])})
    assert [run.rank for run in match_runs([first, second])] == [1, 2]


def test_an_accelerator_is_compared_with_the_device_that_trains_in_the_other_run() -> None:
    gpu, other_gpu, cpu = (sized_trace([10], device=device) for device in ("cuda:0", "cuda:3", "cpu"))
    assert [run.device for run in match_runs([gpu, gpu])] == ["cuda:0", "cuda:0"]
    runs = match_runs([gpu, other_gpu, cpu], ("a", "b", "c"))
    assert [run.device for run in runs] == ["cuda:0", "cuda:3", "cpu"]
    (note,) = compare_runs(runs).notes
    assert note.startswith("The runs have no accelerator in common: a is compared by cuda:0")


def test_a_device_that_a_run_lacks_is_an_error_that_names_the_run() -> None:
    with pytest.raises(TraceError, match=r"second: the trace has no device cuda:0. It has cpu"):
        match_runs([sized_trace([1], device="cuda:0"), sized_trace([1])], ("first", "second"), device="cuda:0")
    with pytest.raises(TraceError, match="empty: the trace has no memory events"):
        match_runs([trace_of(), sized_trace([1])], ("empty", "full"))


def test_labels_are_the_shortest_ends_of_paths_that_differ() -> None:
    assert label_paths([Path("/a/b8.memtrace"), Path("/b/b16.memtrace")]) == ("b8", "b16")
    assert label_paths([Path("/a/run.memtrace"), Path("/b/run.memtrace")]) == ("a/run", "b/run")
    assert label_paths([Path("/a/x.memtrace"), Path("/a/x.memtrace")]) == ("x (1)", "x (2)")
    assert unique_labels(["a", "b", "a"]) == ("a (1)", "b", "a (2)")


def test_equal_steps_lie_side_by_side_whatever_they_last() -> None:
    slow, fast = sized_trace([10, 20, 30], step_ns=6000), sized_trace([1, 2, 3], step_ns=60)
    curves = [aligned_curve(run, 1000) for run in match_runs([slow, fast], ("slow", "fast"))]
    assert curves[0]["step_position"].tolist() == pytest.approx(curves[1]["step_position"].tolist())
    assert np.floor(curves[0]["step_position"]).tolist() == [0, 0, 1, 1, 2, 2]
    assert curves[0]["time_ns"].tolist() != curves[1]["time_ns"].tolist()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=6),
    st.lists(st.integers(-20, 400), min_size=1),
)
def test_positions_on_the_axis_of_steps_keep_the_order_of_times(steps: list[tuple[int, int]], times: list[int]) -> None:
    gaps, lengths = np.array(steps).T
    start = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(lengths[:-1])])
    number = np.arange(len(steps)) + 3
    time = np.sort(times)
    position = step_positions(time, number, start, lengths)
    inside = ~np.isnan(position)
    assert inside.tolist() == ((time >= start[0]) & (time <= start[-1] + lengths[-1])).tolist()
    assert (np.diff(position[inside]) >= 0).all()
    for place in range(len(steps)):
        of_step = (time >= start[place]) & (time < start[place] + lengths[place])
        assert (np.floor(position[of_step]) == number[place]).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=3, max_size=60), st.integers(2, 20))
def test_bounded_curves_keep_the_highest_peak(sizes: list[int], max_points: int) -> None:
    (run, _) = match_runs([sized_trace(sizes)] * 2)
    assert aligned_curve(run, max_points)["bytes"].max() == max(sizes)
    peaks = aligned_step_peaks(run, max_points)
    assert peaks["peak_bytes"].max() == max(sizes)
    assert (np.array(sizes)[peaks["step"]] == peaks["peak_bytes"]).all()


def test_step_peaks_of_one_device_ignore_the_others() -> None:
    events = [event("alloc", 0, 10, 5, device="cpu"), event("alloc", 1, 20, 7, device="cuda:0")]
    trace = trace_of(events=events, spans=[step(0, 0, 15), step(1, 15, 30)])
    assert device_step_peaks(trace, "cpu").tolist() == [5, 5]
    assert device_step_peaks(trace, "cuda:0").tolist() == [0, 7]


def test_interval_quantiles_are_lengths_of_intervals(gpt_trace: Path) -> None:
    (run, _) = match_runs([load(gpt_trace)] * 2)
    lengths = access_intervals(run.trace).duration_ns[device_intervals(run.trace, "cpu")]
    quantiles = interval_quantiles(run, 101)
    assert (quantiles[0], quantiles[-1]) == (lengths.min(), lengths.max())
    assert np.isin(quantiles, lengths).all()
    share_below = [(lengths <= length).mean() for length in quantiles]
    assert share_below == pytest.approx(np.linspace(0, 1, 101), abs=0.03)


def test_the_live_bytes_of_a_curve_are_exact(gpt_trace: Path) -> None:
    (run, _) = match_runs([load(gpt_trace)] * 2)
    live = requested_bytes(run.trace, "cpu")
    curve = aligned_curve(run, 500)
    assert set(curve["bytes"]) <= set(live.bytes.tolist())
    assert len(curve) <= 500
