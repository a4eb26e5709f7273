"""Allocator plans of traces: results, tables, figures and the command."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from memtrace.cli.output import json_value
from memtrace.cli.plan import command
from memtrace.cli.plan_allocator import _capacity_line
from memtrace.dashboards import allocator as figures

from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.operations import run_operations
from memtrace.allocator.plan import DeviceAllocatorPlan, plan_allocator, plan_device, settings_table, workload_of
from memtrace.allocator.requests import RequestHistory, devices_to_plan, read_device_history
from memtrace.allocator.settings import MIB, AllocatorSettings
from memtrace.allocator.state_tables import block_map_at_peak, reserved_over_time
from memtrace.allocator.what_if import Workload, predict_settings, simulate_settings, sweep_settings
from memtrace.errors import MemtraceError
from memtrace.trace import Trace
from memtrace.units import choose_byte_unit
from tests.allocator.recorded import drop_first_entries
from tests.allocator.test_golden import CASES, history
from tests.allocator.test_handmade import failed_request, refused_request
from tests.builders import trace_of

TRAINING = next(case for case in CASES if case.name == "training-0")


def cpu_trace(steps: int = 3) -> Trace:
    """A CPU recording: one older block, and per step 30 MiB, 3 MiB and 100 bytes, of which the last is never freed."""
    events: list[dict[str, Any]] = [{"kind": "baseline", "block_id": 0, "size": 5 * MIB}]
    for step in range(steps):
        first = 1 + 3 * step
        sizes = (30 * MIB, 3 * MIB, 100)
        events += [{"kind": "alloc", "block_id": first + i, "size": size} for i, size in enumerate(sizes)]
        events += [{"kind": "write", "block_id": first}, {"kind": "free", "block_id": first, "size": sizes[0]}]
        events += [{"kind": "free", "block_id": first + 1, "size": sizes[1]}]
    return trace_of(events=[{"time_ns": i, "device": "cpu", **event} for i, event in enumerate(events)])


def test_a_cpu_recording_gives_an_estimate_for_a_gpu() -> None:
    trace = cpu_trace()
    assert devices_to_plan(trace) == ("cpu",)
    requests = read_device_history(trace, "cpu")
    assert isinstance(requests, RequestHistory)
    assert requests.operations.num_older == 1
    (plan,) = plan_allocator(trace).devices
    assert plan.replay is None
    assert any("cuBLAS" in note and "does not include" in note for note in plan.notes)
    # The older 5 MiB and 3 MiB share a segment of 20 MiB, 30 MiB have their own, small requests share one of 2 MiB.
    assert plan.predictions[0].setting == "default"
    assert plan.predictions[0].peak_reserved_bytes == (20 + 30 + 2) * MIB
    assert plan.predictions[0].peak_allocated_bytes == (5 + 3 + 30) * MIB + 3 * 512
    assert plan.num_older_blocks == 1


def test_empty_and_unknown_blocks_are_ignored() -> None:
    rows = [
        {"time_ns": 0, "device": "cpu", "kind": "alloc", "block_id": 0, "size": 0},
        {"time_ns": 1, "device": "cpu", "kind": "free", "block_id": 0, "size": 0},
        {"time_ns": 2, "device": "cpu", "kind": "free", "block_id": 7, "size": 64},
    ]
    (plan,) = plan_allocator(trace_of(events=rows)).devices
    assert plan.predictions[0].peak_reserved_bytes == 0


def test_command_result_has_the_fields_of_its_dataclass() -> None:
    plan = plan_device(refused_request(0))
    row = json_value(plan)
    assert row == json.loads(json.dumps(row, allow_nan=False))
    assert set(row) == {field.name for field in fields(DeviceAllocatorPlan)}
    assert row["capacity"] == {
        "stated_bytes": None, "low_bytes": 70 * MIB, "high_bytes": 90 * MIB - 1, "estimate_bytes": None,
        "device_bytes": None,
    }  # fmt: skip
    first = row["predictions"][0]
    assert (first["setting"], first["is_recorded"], first["fits"], first["num_retries"]) == ("default", True, True, 1)
    assert first["peak_reserved_bytes"] <= 70 * MIB, "where the workload fits, the peak is within the capacity"


def test_settings_are_compared_with_a_simulation_of_the_recorded_settings() -> None:
    whole = history(TRAINING)
    plan = plan_device(drop_first_entries(whole, len(whole) // 2))
    assert plan.num_older_blocks > 0
    assert any("mid-run" in note for note in plan.notes)
    assert plan.baseline is plan.predictions[0]
    rows = settings_table(plan)
    assert rows["change_bytes"][0] == 0
    assert (rows["change_bytes"] == rows["peak_reserved_bytes"] - rows["peak_reserved_bytes"][0]).all()


def test_a_setting_fits_where_its_peak_is_within_the_capacity() -> None:
    prepared, _ = reproduce_history(history(TRAINING))
    settings = sweep_settings(workload_of(prepared))
    unlimited = predict_settings(workload_of(prepared), settings)
    assert all(prediction.fits is None for prediction in unlimited), "without a capacity or a refusal it is unknown"
    peaks = sorted(prediction.peak_reserved_bytes for prediction in unlimited)
    capacity = peaks[len(peaks) // 2]
    limited = predict_settings(workload_of(prepared, capacity), settings)
    assert {prediction.fits for prediction in limited} == {True, False}
    for prediction in limited:
        assert prediction.fits == (prediction.peak_reserved_bytes <= capacity)
        assert prediction.fits == (prediction.num_ooms == 0)


def test_a_memory_fraction_requires_a_capacity() -> None:
    workload = Workload(reproduce_history(history(TRAINING))[0].operations, AllocatorSettings())
    with pytest.raises(MemtraceError, match="capacity"):
        predict_settings(workload, [AllocatorSettings.parse("per_process_memory_fraction:0.5")])
    names = {settings.name for settings in sweep_settings(workload)}
    assert not any("fraction" in name for name in names)
    with_capacity = sweep_settings(Workload(workload.operations, AllocatorSettings(), capacity=1 << 30))
    assert any("garbage" in settings.name and "fraction" in settings.name for settings in with_capacity)


def test_address_order_does_not_matter_in_torch_2_13() -> None:
    prepared, _ = reproduce_history(history(TRAINING))
    peaks = {
        simulate_settings(workload_of(prepared), AllocatorSettings(), order).peak_reserved
        for order in ("ascending", "descending", "random")
    }
    assert len(peaks) == 1


def test_tables_agree_with_the_history() -> None:
    recorded = history(TRAINING)
    prepared, result = reproduce_history(recorded)
    state = block_map_at_peak(prepared)
    assert state["size_bytes"].sum() == result.peak_reserved_bytes
    curve = reserved_over_time(workload_of(prepared), AllocatorSettings(), recorded.time_ns)
    assert curve["reserved_bytes"].max() == result.peak_reserved_bytes
    assert curve["reserved_bytes"].iloc[-1] == recorded.segments.size.sum()
    moments = recorded.reserved()
    at = np.searchsorted(recorded.time_ns, curve["time_ns"].to_numpy())
    assert moments[np.minimum(at, len(moments) - 1)].max() == result.peak_reserved_bytes


def test_figures_show_the_tables() -> None:
    recorded = history(TRAINING)
    prepared, _ = reproduce_history(recorded)
    state = figures.block_map_figure(block_map_at_peak(prepared))
    sweep = figures.sweep_figure(settings_table(plan_device(recorded)), capacity=1 << 30)
    curve = reserved_over_time(workload_of(prepared), AllocatorSettings(), recorded.time_ns)
    reserved = figures.reserved_figure({"default": curve})
    assert {trace.name for trace in state.data} == {"Live", "Free"}
    assert len(sweep.data) == 2 and len(sweep.data[0].y) == len(plan_device(recorded).predictions)
    divisor, unit = choose_byte_unit(int(curve["reserved_bytes"].max()))
    assert reserved.data[0].y.max() * divisor == curve["reserved_bytes"].max()
    assert reserved.layout.yaxis.title.text == f"Reserved memory ({unit})"
    assert all(len(figure.to_json()) < 1_000_000 for figure in (state, sweep, reserved))


def test_figures_exist_only_for_a_gpu() -> None:
    for build in (figures.state_section, figures.sweep_section):
        assert build(cpu_trace(), "cpu") is None
        drawn = build(out_of_memory_trace(), "cuda:0")
        assert drawn is not None and len(drawn.data) > 0
    note = figures.sweep_section(out_of_memory_trace(), "cuda:0").layout.meta["note"]
    assert "2 of 2 allocations replay at their recorded address" in note


def test_a_sweep_is_computed_once_per_trace_and_capacity() -> None:
    trace = out_of_memory_trace()
    first, again = plan_allocator(trace), plan_allocator(trace)
    assert first.devices[0] is again.devices[0]
    assert plan_allocator(trace, capacity=1 << 40).devices[0] is not first.devices[0]
    watched = plan_allocator(trace, progress=lambda: None)
    assert watched.devices[0].predictions == first.devices[0].predictions


def out_of_memory_trace() -> Trace:
    """The hand-made out-of-memory error as a trace with segments, as a reader returns it."""
    history = failed_request()
    kinds = ["segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free", "segment_free", "oom"]
    blocks = [None, 0, None, 1, 0, 0, None, None]
    rows = [
        {"time_ns": i, "kind": kind, "device": "cuda:0", "block_id": blocks[i], "size": int(history.size[i]), "stream": 0,
         "address": None if kind == "oom" else int(history.address[i]), "pool": 0,
         "allocated_size": 2 * MIB if blocks[i] == 1 else None,
         "device_free": 49 * MIB if kind == "oom" else None}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    segment = {"device": "cuda:0", "address": int(history.segments.address[0]), "size": 20 * MIB, "stream": 0, "pool": 0,
               "small": False, "expandable": False}  # fmt: skip
    return trace_of(events=rows, segments=[segment])


def test_a_trace_with_segments_is_replayed() -> None:
    settings = [AllocatorSettings.parse("expandable_segments:True")]
    (plan,) = plan_allocator(out_of_memory_trace(), settings, capacity=69 * MIB).devices
    assert plan.replay is not None and plan.replay.is_exact and plan.replay.final_blocks_match
    assert plan.failed_request_bytes == (50 * MIB,)
    assert [(prediction.setting, prediction.fits) for prediction in plan.predictions] == [
        ("default", False), ("expandable_segments:True", True),
    ]  # fmt: skip


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def call(trace: Trace, *words: str) -> Result:
        monkeypatch.setattr("memtrace.trace.load", lambda path, **options: trace)
        return CliRunner().invoke(command, ["allocator", str(tmp_path), *words])

    return call


def test_command_prints_an_estimate(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--capacity", "24GiB")
    assert result.exit_code == 0, result.output
    assert "the trace has no CUDA allocator history" in result.output
    assert "52.0 MiB" in result.output and "yes" in result.output
    assert "does not include the workspaces of cuBLAS" in " ".join(result.output.split())


def test_command_prints_json(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--setting", "max_split_size_mb:64", "--json")
    (device,) = json.loads(result.output)["devices"]
    assert [row["setting"] for row in device["predictions"]] == ["default", "max_split_size_mb:64"]
    assert device["predictions"][1]["environment_setting"] == "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"


def test_sweep_is_added_to_settings(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--setting", "max_split_size_mb:77", "--sweep", "--capacity", "1G", "--json")
    names = [row["setting"] for row in json.loads(result.output)["devices"][0]["predictions"]]
    assert names[:2] == ["default", "max_split_size_mb:77"]
    assert any(name.startswith("garbage_collection") for name in names) and len(names) == len(set(names))


def test_command_names_the_settings_that_would_have_fitted(invoke: Any) -> None:
    result = invoke(out_of_memory_trace(), "--capacity", str(69 * MIB))
    output = " ".join(result.output.split())
    assert "4 of 4 segment events predicted" in output
    assert "Replay: exact. 2 of 2 allocations at the recorded address" in output
    assert "The request that failed in the recording (50.0 MiB) fits with expandable_segments:True" in output
    assert "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the peak changes from" in result.output


def test_command_names_the_settings_that_might_have_fitted(invoke: Any) -> None:
    """The setting fits only at the upper bound of the capacity, which is better than the recorded setting."""
    result = invoke(out_of_memory_trace(), "--setting", "expandable_segments:True")
    text = " ".join(result.output.split())
    assert "About 69.0 MiB, from the free memory reported when a request failed." in text
    assert "fits with none of these settings for certain; only at the upper end of the capacity range with " in text
    assert "with expandable_segments:True" in text and "It fits only at the upper end of the capacity range." in text


def test_where_nothing_fits_the_smallest_peak_is_named(invoke: Any) -> None:
    result = invoke(out_of_memory_trace(), "--capacity", "30MiB")
    assert "None of these settings fits. The smallest peak is " in result.output
    assert "keep the recorded setting" not in result.output


def test_a_memory_fraction_that_makes_requests_fail_is_not_a_saving(invoke: Any) -> None:
    """A setting that does not fit is shown with the peak that it needs, not with its limit."""
    result = invoke(out_of_memory_trace(), "--capacity", "30MiB", "--json")
    rows = {row["setting"]: row for row in json.loads(result.output)["devices"][0]["predictions"]}
    with_fraction = rows["garbage_collection_threshold:0.6,per_process_memory_fraction:0.95"]
    assert not with_fraction["fits"] and with_fraction["num_ooms"] > 0
    assert with_fraction["peak_reserved_bytes"] == rows["default"]["peak_reserved_bytes"]


def test_garbage_collection_without_a_fraction_is_pointed_out(invoke: Any) -> None:
    result = invoke(cpu_trace(), "--setting", "garbage_collection_threshold:0.6")
    assert "has no effect without per_process_memory_fraction" in result.output


@pytest.mark.parametrize(
    "words", [("--setting", "max_split_size_mb:20"), ("--setting", "per_process_memory_fraction:0.5")]
)
def test_invalid_settings_are_errors(invoke: Any, words: tuple[str, ...]) -> None:
    result = invoke(cpu_trace(), *words)
    assert isinstance(result.exception, MemtraceError)  # main prints the message and exits with code 2


@pytest.mark.parametrize("text", ["24B", "24GiB", "24 GB", "1.5G", "24", "twelve", "-3", "0", "3XB"])
def test_capacities_are_parsed_with_binary_and_decimal_units(invoke: Any, text: str) -> None:
    result = invoke(cpu_trace(), f"--capacity={text}", "--json", "--setting", "default")
    if text in ("24", "twelve", "-3", "0", "3XB"):
        assert result.exit_code == 2 and "invalid size" in result.output
        return
    expected = {"24B": 24, "24GiB": 24 << 30, "24 GB": 24 * 10**9, "1.5G": 3 << 29}[text]
    assert json.loads(result.output)["devices"][0]["capacity"]["stated_bytes"] == expected


def test_every_request_gets_an_address() -> None:
    from memtrace.allocator.model import CachingAllocator
    from memtrace.allocator.simulated_devices import SyntheticDevice

    requests = read_device_history(cpu_trace(), "cpu")
    assert isinstance(requests, RequestHistory)
    placed = run_operations(requests.operations, CachingAllocator(AllocatorSettings(), SyntheticDevice()))
    addresses = placed.address
    assert len(addresses) == 10 and (addresses > 0).all()


def test_the_memory_of_the_device_bounds_an_unknown_capacity() -> None:
    plan = plan_device(replace(history(TRAINING), device_bytes=80 << 30))
    assert plan.capacity.device_bytes == 80 << 30 and plan.capacity.low_bytes is None
    assert _capacity_line(plan.capacity).startswith("Capacity: less than 80.0 GiB, the memory of the device")
