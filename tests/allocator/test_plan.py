"""From a trace to the answer: its shape, its tables and figures, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from memtrace.cli.plan import command
from memtrace.dashboards import allocator as figures

from memtrace.allocator.infer_rules import reproduce
from memtrace.allocator.plan import case_of, plan_allocator, plan_device, settings_table
from memtrace.allocator.program import run
from memtrace.allocator.requests import Requests, devices_to_plan, read_device
from memtrace.allocator.settings import MIB, Settings
from memtrace.allocator.states import reserved_over_time, segment_lifetimes, state_at_peak
from memtrace.allocator.what_if import Case, outcome, predict, sweep_settings
from memtrace.errors import MemtraceError
from memtrace.trace import Trace
from tests.allocator.recorded import cut
from tests.allocator.test_golden import CASES, history
from tests.allocator.test_handmade import failed, refused
from tests.builders import trace_of

TRAINING = next(case for case in CASES if case.name == "training-0")


def cpu_trace(steps: int = 3) -> Trace:
    """A CPU recording: one older block, and in each step 30 MiB, 3 MiB and 100 bytes; the last stays."""
    events: list[dict[str, Any]] = [{"kind": "baseline", "block_id": 0, "size": 5 * MIB}]
    for step in range(steps):
        first = 1 + 3 * step
        sizes = (30 * MIB, 3 * MIB, 100)
        events += [{"kind": "alloc", "block_id": first + i, "size": size} for i, size in enumerate(sizes)]
        events += [{"kind": "write", "block_id": first}, {"kind": "free", "block_id": first, "size": sizes[0]}]
        events += [{"kind": "free", "block_id": first + 1, "size": sizes[1]}]
    return trace_of(events=[{"time_ns": i, "device": "cpu", **event} for i, event in enumerate(events)])


def test_a_cpu_recording_is_an_estimate_of_a_gpu() -> None:
    trace = cpu_trace()
    assert devices_to_plan(trace) == ("cpu",)
    requests = read_device(trace, "cpu")
    assert isinstance(requests, Requests)
    assert requests.program.num_older == 1
    (plan,) = plan_allocator(trace)
    assert plan.replay is None
    assert any("cuBLAS" in note and "not included" in note for note in plan.notes)
    # 5 older MiB and 3 share a segment of 20, 30 have their own, the small ones one of 2.
    assert plan.predictions[0].settings == Settings()
    assert plan.predictions[0].peak_reserved_bytes == (20 + 30 + 2) * MIB
    assert plan.predictions[0].peak_allocated_bytes == (5 + 3 + 30) * MIB + 3 * 512
    row = plan.as_dict()
    assert row["replay"] is None and row["num_older_blocks"] == 1


def test_blocks_of_no_bytes_and_unknown_blocks_are_passed_over() -> None:
    rows = [
        {"time_ns": 0, "device": "cpu", "kind": "alloc", "block_id": 0, "size": 0},
        {"time_ns": 1, "device": "cpu", "kind": "free", "block_id": 0, "size": 0},
        {"time_ns": 2, "device": "cpu", "kind": "free", "block_id": 7, "size": 64},
    ]
    (plan,) = plan_allocator(trace_of(events=rows))
    assert plan.predictions[0].peak_reserved_bytes == 0


def test_the_documented_shape() -> None:
    plan = plan_device(refused(0))
    row = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert set(row) == {
        "device",
        "replay",
        "num_older_blocks",
        "capacity",
        "failed_requests_bytes",
        "settings",
        "best",
        "notes",
    }
    assert set(row["replay"]) >= {
        "allocations", "allocations_exact", "segment_events", "segment_events_exact", "peak_reserved_bytes",
        "recorded_peak_reserved_bytes", "final_blocks_match",
    }  # fmt: skip
    assert row["capacity"] == {
        "given_bytes": None, "low_bytes": 70 * MIB, "high_bytes": 90 * MIB - 1, "estimate_bytes": None,
    }  # fmt: skip
    first = row["settings"][0]
    assert set(first) >= {"setting", "peak_reserved_bytes", "spread_bytes", "fits", "num_retries", "num_segments"}
    assert (first["setting"], first["is_recorded"], first["fits"], first["num_retries"]) == ("default", True, True, 1)
    assert first["peak_reserved_bytes"] <= 70 * MIB, "within the capacity where it fits"


def test_a_partial_history_is_compared_with_itself_laid_out_afresh() -> None:
    whole = history(TRAINING)
    plan = plan_device(cut(whole, len(whole) // 2))
    assert plan.num_older_blocks > 0
    assert any("mid-run" in note for note in plan.notes)
    assert plan.baseline is plan.predictions[0]
    rows = settings_table([plan])
    assert rows["change_bytes"][0] == 0
    assert (rows["change_bytes"] == rows["peak_reserved_bytes"] - rows["peak_reserved_bytes"][0]).all()


def test_fits_is_whether_the_peak_is_within_the_capacity() -> None:
    prepared, _ = reproduce(history(TRAINING))
    free = predict(case_of(prepared), sweep_settings(case_of(prepared)))
    assert all(one.fits is None for one in free), "no refusal and no capacity: nothing to say"
    peaks = sorted(one.peak_reserved_bytes for one in free)
    capacity = peaks[len(peaks) // 2]
    told = predict(case_of(prepared, capacity), [one.settings for one in free])
    assert {one.fits for one in told} == {True, False}
    for one in told:
        assert one.fits == (one.peak_reserved_bytes <= capacity)
        assert one.fits == (one.num_ooms == 0)


def test_a_memory_fraction_needs_a_capacity() -> None:
    case = Case(reproduce(history(TRAINING))[0].program, Settings())
    with pytest.raises(MemtraceError, match="capacity"):
        predict(case, [Settings.parse("per_process_memory_fraction:0.5")])
    names = {one.name for one in sweep_settings(case)}
    assert not any("fraction" in name for name in names)
    with_capacity = sweep_settings(Case(case.program, Settings(), capacity=1 << 30))
    assert any("garbage" in one.name and "fraction" in one.name for one in with_capacity)


def test_orders_of_addresses_only_matter_before_torch_2_13() -> None:
    prepared, _ = reproduce(history(TRAINING))
    peaks = {
        outcome(case_of(prepared), Settings(), order).peak_reserved for order in ("ascending", "descending", "random")
    }
    assert len(peaks) == 1


def test_tables_for_the_figures() -> None:
    recorded = history(TRAINING)
    prepared, result = reproduce(recorded)
    segments = segment_lifetimes(prepared)
    assert segments["from_ns"].notna().all(), "it begins with nothing"
    held = segments[segments["to_ns"].isna()]
    assert held["size_bytes"].sum() == recorded.segments.size.sum()
    state = state_at_peak(prepared)
    assert state["size_bytes"].sum() == result.peak_reserved_bytes
    curve = reserved_over_time(case_of(prepared), Settings(), recorded.time_ns)
    assert curve["reserved_bytes"].max() == result.peak_reserved_bytes
    assert curve["reserved_bytes"].iloc[-1] == recorded.segments.size.sum()
    moments = recorded.reserved()
    at = np.searchsorted(recorded.time_ns, curve["time_ns"].to_numpy())
    assert moments[np.minimum(at, len(moments) - 1)].max() == result.peak_reserved_bytes


def test_the_state_of_a_partial_history_at_its_start() -> None:
    whole = history(TRAINING)
    part = cut(whole, len(whole) // 2)
    segments = segment_lifetimes(reproduce(part)[0])
    assert segments["from_ns"].isna().any()
    assert len(reproduce(part)[0].program.malloc_entries) > 0


def test_figures_draw() -> None:
    recorded = history(TRAINING)
    prepared, _ = reproduce(recorded)
    segments = figures.segments_figure(segment_lifetimes(prepared), 0, int(recorded.time_ns[-1]))
    state = figures.state_figure(state_at_peak(prepared))
    sweep = figures.sweep_figure(settings_table([plan_device(recorded)]), capacity=1 << 30)
    curve = reserved_over_time(case_of(prepared), Settings(), recorded.time_ns)
    reserved = figures.reserved_figure({"default": curve})
    assert {trace.name for trace in segments.data} == {"large segments", "small segments"}
    assert {trace.name for trace in state.data} == {"live", "free"}
    assert len(sweep.data) == 2 and len(sweep.data[0].y) == len(plan_device(recorded).predictions)
    assert reserved.data[0].y.max() * (1 << 30) == curve["reserved_bytes"].max()
    assert all(len(figure.to_json()) < 1_000_000 for figure in (segments, state, sweep, reserved))


def test_the_page_shows_them_for_a_gpu_alone() -> None:
    for build in (figures.segments_section, figures.state_section, figures.sweep_section):
        assert build(cpu_trace(), "cpu") is None
        drawn = build(recorded_tables(), "cuda:0")
        assert drawn is not None and len(drawn.data) > 0
    note = figures.sweep_section(recorded_tables(), "cuda:0").layout.meta["note"]
    assert "2 of 2 allocations replay at their recorded address" in note


def recorded_tables() -> Trace:
    """The hand-made out-of-memory as a trace with its segments, as a reader gives it."""
    made = failed()
    kinds = ["segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free", "segment_free", "oom"]
    blocks = [None, 0, None, 1, 0, 0, None, None]
    rows = [
        {"time_ns": i, "kind": kind, "device": "cuda:0", "block_id": blocks[i], "size": int(made.size[i]), "stream": 0,
         "address": None if kind == "oom" else int(made.address[i]), "pool": 0,
         "allocated_size": 2 * MIB if blocks[i] == 1 else None,
         "device_free": 49 * MIB if kind == "oom" else None}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    segment = {"device": "cuda:0", "address": int(made.segments.address[0]), "size": 20 * MIB, "stream": 0, "pool": 0,
               "small": False, "expandable": False}  # fmt: skip
    return trace_of(events=rows, segments=[segment])


def test_a_trace_with_segments_is_replayed() -> None:
    (plan,) = plan_allocator(recorded_tables(), [Settings.parse("expandable_segments:True")], capacity=69 * MIB)
    assert plan.replay is not None and plan.replay.is_exact and plan.replay.final_blocks_match
    assert plan.failed_requests == (50 * MIB,)
    assert [(one.settings.name, one.fits) for one in plan.predictions] == [
        ("default", False), ("expandable_segments:True", True),
    ]  # fmt: skip


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def call(trace: Trace, *words: str) -> Result:
        monkeypatch.setattr("memtrace.trace.load", lambda path: trace)
        return CliRunner().invoke(command, ["allocator", str(tmp_path), *words])

    return call


def test_the_command_prints_an_estimate(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--capacity", "24GiB")
    assert result.exit_code == 0, result.output
    assert "the allocator left no history here" in result.output
    assert "52 MiB" in result.output and "yes" in result.output
    assert "not included" in result.output


def test_the_command_prints_json(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--setting", "max_split_size_mb:64", "--json")
    (device,) = json.loads(result.output)["devices"]
    assert [row["setting"] for row in device["settings"]] == ["default", "max_split_size_mb:64"]
    assert device["settings"][1]["ready_line"] == "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"


def test_sweep_and_settings_together(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--setting", "max_split_size_mb:77", "--sweep", "--capacity", "1G", "--json")
    names = [row["setting"] for row in json.loads(result.output)["devices"][0]["settings"]]
    assert names[:2] == ["default", "max_split_size_mb:77"]
    assert any(name.startswith("garbage_collection") for name in names) and len(names) == len(set(names))


def test_the_command_names_what_would_have_fitted(invoke: Any) -> None:
    result = invoke(recorded_tables(), "--capacity", str(69 * MIB))
    assert "4 of 4 segment events" in result.output
    assert "replay exact: 2 of 2 allocations" in result.output
    assert "would have fitted under: expandable_segments:True" in result.output
    assert "to try: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in result.output


def test_the_command_names_what_might_have_fitted(invoke: Any) -> None:
    """Between the ends of the capacity that the trace tells: not sure, yet better than the recorded setting."""
    result = invoke(recorded_tables(), "--setting", "expandable_segments:True")
    assert "; about 69.0 MiB, by what was free when a request failed" in " ".join(result.output.split())
    assert "fitted under: none of these; at the larger capacity: expandable_segments:True" in result.output
    assert "expandable_segments:True (it fits at the larger capacity only)" in result.output


def test_where_nothing_fits_nothing_is_to_be_kept(invoke: Any) -> None:
    result = invoke(recorded_tables(), "--capacity", "30MiB")
    assert "no setting tried here fits; " in result.output
    assert "keep what you have" not in result.output


def test_a_refusing_fraction_is_no_saving(invoke: Any) -> None:
    """What does not fit is shown with what it would take, not with what it was allowed."""
    result = invoke(recorded_tables(), "--capacity", "30MiB", "--json")
    rows = {row["setting"]: row for row in json.loads(result.output)["devices"][0]["settings"]}
    collected = rows["garbage_collection_threshold:0.6,per_process_memory_fraction:0.95"]
    assert not collected["fits"] and collected["num_ooms"] > 0
    assert collected["peak_reserved_bytes"] == rows["default"]["peak_reserved_bytes"]


def test_minds_of_settings(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--setting", "garbage_collection_threshold:0.6")
    assert "does nothing without per_process_memory_fraction" in result.output


@pytest.mark.parametrize(
    "words", [("--setting", "max_split_size_mb:20"), ("--setting", "per_process_memory_fraction:0.5")]
)
def test_settings_that_cannot_be_are_refused(invoke: Any, words: tuple[str, ...]) -> None:
    result = invoke(cpu_trace(), *words)
    assert isinstance(result.exception, MemtraceError)  # the message and exit code 2 are main's


@pytest.mark.parametrize("text", ["24", "24GiB", "24 GB", "1.5G", "twelve", "-3", "0", "3XB"])
def test_capacities_are_read_as_people_write_them(invoke: Any, text: str) -> None:
    result = invoke(cpu_trace(), f"--capacity={text}", "--json", "--setting", "default")
    if text in ("twelve", "-3", "0", "3XB"):
        assert result.exit_code == 2 and "invalid size" in result.output
        return
    expected = {"24": 24, "24GiB": 24 << 30, "24 GB": 24 * 10**9, "1.5G": 3 << 29}[text]
    assert json.loads(result.output)["devices"][0]["capacity"]["given_bytes"] == expected


def test_running_a_program_gives_every_request_an_address() -> None:
    from memtrace.allocator.devices import InventedDevice
    from memtrace.allocator.model import Allocator

    requests = read_device(cpu_trace(), "cpu")
    assert isinstance(requests, Requests)
    addresses = run(requests.program, Allocator(Settings(), InventedDevice()))
    assert len(addresses) == 10 and (addresses > 0).all()
