"""pprof and speedscope files: their sums are those of the trace."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, peak_by_category
from memtrace.exporters import export_trace
from memtrace.trace import Trace
from memtrace.units import format_bytes
from tests.dashboards.browser import launched_browser, needs_chromium, opened

SPEEDSCOPE: Final = "node_modules/speedscope/dist/release"
"""Folder of the app in the folder of tools: ``npm install speedscope``."""
SPEEDSCOPE_UNITS: Final = {"B": 1, "KB": 1024, "MB": 1024**2}

# Message, field, number, type (of descriptor.proto), whether it is repeated; from pprof's proto/profile.proto.
INT64, UINT64, BOOL, TEXT, MESSAGE = 3, 4, 8, 9, 11
FIELDS = [
    ("Profile", "sample_type", 1, "ValueType", True),
    ("Profile", "sample", 2, "Sample", True),
    ("Profile", "mapping", 3, "Mapping", True),
    ("Profile", "location", 4, "Location", True),
    ("Profile", "function", 5, "Function", True),
    ("Profile", "string_table", 6, TEXT, True),
    ("Profile", "time_nanos", 9, INT64, False),
    ("Profile", "duration_nanos", 10, INT64, False),
    ("Profile", "default_sample_type", 14, INT64, False),
    ("ValueType", "type", 1, INT64, False),
    ("ValueType", "unit", 2, INT64, False),
    ("Sample", "location_id", 1, UINT64, True),
    ("Sample", "value", 2, INT64, True),
    ("Sample", "label", 3, "Label", True),
    ("Label", "key", 1, INT64, False),
    ("Label", "str", 2, INT64, False),
    ("Mapping", "id", 1, UINT64, False),
    ("Mapping", "has_functions", 7, BOOL, False),
    ("Location", "id", 1, UINT64, False),
    ("Location", "mapping_id", 2, UINT64, False),
    ("Location", "line", 4, "Line", True),
    ("Line", "function_id", 1, UINT64, False),
    ("Line", "line", 2, INT64, False),
    ("Function", "id", 1, UINT64, False),
    ("Function", "name", 2, INT64, False),
    ("Function", "filename", 4, INT64, False),
]


def read_profile(path: Path) -> Any:
    """Parse a pprof file with the message that pprof publishes."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="memtrace_test", syntax="proto3")
    messages = {name: file.message_type.add(name=name) for name in dict.fromkeys(each[0] for each in FIELDS)}
    for message, name, number, kind, is_repeated in FIELDS:
        field = messages[message].field.add(name=name, number=number, label=3 if is_repeated else 1)
        field.type = kind if isinstance(kind, int) else MESSAGE
        if isinstance(kind, str):
            field.type_name = f".memtrace_test.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    profile = message_factory.GetMessageClass(pool.FindMessageTypeByName("memtrace_test.Profile"))()
    profile.ParseFromString(gzip.decompress(path.read_bytes()))
    return profile


def churn_bytes(trace: Trace, device: str) -> int:
    """Bytes of the blocks that are freed in their step, block by block."""
    table, steps = blocks(trace), trace.spans[trace.spans["kind"] == "step"]
    total = 0
    for begin, end, code, size in zip(table.alloc_ns, table.free_ns, table.device, table.size, strict=True):
        inside = (steps["start_ns"] <= begin) & (begin < steps["start_ns"] + steps["duration_ns"])
        if begin >= 0 and end >= 0 and inside.any() and trace.devices[code] == device:
            start, length = steps[inside].iloc[0][["start_ns", "duration_ns"]]
            total += int(size) if end < start + length else 0
    return total


def expected_bytes(trace: Trace, device: str) -> dict[str, int]:
    table = blocks(trace)
    is_new = (table.device == trace.devices.index(device)) & (table.alloc_event >= 0)
    return {
        "peak": find_peak(trace, device).requested.bytes,
        "alloc": int(table.size[is_new].sum()),
        "churn": churn_bytes(trace, device),
    }


def test_the_sums_of_a_pprof_profile_are_those_of_the_trace(trace: Trace, tmp_path: Path) -> None:
    profile = read_profile(export_trace(trace, tmp_path / "a.pb.gz", format="pprof"))
    texts = list(profile.string_table)
    types = [(texts[each.type], texts[each.unit]) for each in profile.sample_type]
    assert types == [(f"{name}_{what}", unit) for name in ("peak", "alloc", "churn")
                     for what, unit in (("objects", "count"), ("space", "bytes"))]  # fmt: skip
    assert texts[0] == "" and texts[profile.default_sample_type] == "peak_space"
    values = np.array([list(sample.value) for sample in profile.sample])
    labels = [{texts[label.key]: texts[label.str] for label in sample.label} for sample in profile.sample]
    for device in trace.devices:
        of_device = np.array([label["device"] == device for label in labels])
        sums = dict(zip((name for name, _ in types), values[of_device].sum(axis=0).tolist(), strict=True))
        expected = expected_bytes(trace, device)
        assert {name: sums[f"{name}_space"] for name in expected} == expected
        assert sums["peak_objects"] == len(find_peak(trace, device).live)
        for group in peak_by_category(trace, device):
            is_member = of_device & np.array([label["category"] == group.name for label in labels])
            assert values[is_member, 1].sum() == group.bytes


def test_samples_of_a_pprof_profile_have_the_frames_of_the_stack_innermost_first(trace: Trace, tmp_path: Path) -> None:
    profile = read_profile(export_trace(trace, tmp_path / "a.pb.gz", format="pprof"))
    texts = list(profile.string_table)
    functions = {each.id: (texts[each.name], texts[each.filename]) for each in profile.function}
    locations = {
        each.id: (*functions[each.line[0].function_id], each.line[0].line)
        for each in profile.location
        if each.mapping_id == profile.mapping[0].id
    }
    stacks = {tuple(locations[number] for number in sample.location_id) for sample in profile.sample}
    assert (("Net.forward", "/home/user/model.py", 12), ("train", "/home/user/train.py", 40)) in stacks
    assert (("<lambda>", '/home/user/a "b"\\c.py', 7), ("train", "/home/user/train.py", 40)) in stacks
    assert (("[allocated before the recording]", "", 0),) in stacks


def test_pprof_prints_the_peak(trace: Trace, tmp_path: Path, tool: Any) -> None:
    path = export_trace(trace, tmp_path / "a.pb.gz", format="pprof", measures=("peak",))
    command = [tool("pprof"), "-top", "-unit=B", "-nodefraction=0", path]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    total = sum(find_peak(trace, device).requested.bytes for device in trace.devices)
    assert "Type: peak_space" in output and f"of {total}B total" in output


def test_the_profiles_of_a_speedscope_file_have_the_sums_of_the_trace(trace: Trace, tmp_path: Path) -> None:
    path = export_trace(trace, tmp_path / "a.json", format="speedscope", measures=("churn", "peak", "allocations"))
    document = json.loads(path.read_text(encoding="utf-8"))
    profiles = iter(document["profiles"])
    for measure in ("churn", "peak", "alloc"):
        for device in trace.devices:
            profile = next(profiles)
            assert profile["endValue"] == sum(profile["weights"]) == expected_bytes(trace, device)[measure]
            assert len(profile["samples"]) == len(profile["weights"]) == len(set(map(tuple, profile["samples"])))
    assert next(profiles, None) is None
    frames = document["shared"]["frames"]
    stacks = [[frames[number]["name"] for number in stack] for stack in document["profiles"][2]["samples"]]
    assert ["train", "Net.forward"] in stacks


def test_speedscope_files_match_the_published_schema(trace: Trace, tmp_path: Path, tool: Any) -> None:
    schema = json.loads(tool(f"{SPEEDSCOPE}/file-format-schema.json").read_text(encoding="utf-8"))
    path = export_trace(trace, tmp_path / "a.json", format="speedscope")
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), schema)


def self_bytes(page: Any) -> tuple[float, float]:
    """Sum the column "Self" of speedscope's table of functions.

    Returns:
        The sum in bytes, and how far it can be from the exact one because the app rounds each cell to two decimals.
    """
    # The list of profiles, which is in the page too, has cells without tabs between them.
    rows = [row.split("\t") for row in page.locator("tr").all_inner_texts() if "\t" in row]
    assert rows[0] == ["Total", "Self", "Symbol Name"]
    cells = [row[1].split() for row in rows[1:]]
    units = [SPEEDSCOPE_UNITS[unit] for _, unit, _ in cells]
    return sum(float(cell[0]) * unit for cell, unit in zip(cells, units, strict=True)), 0.005 * sum(units)


@needs_chromium
def test_the_speedscope_app_shows_the_sums_of_the_trace(trace: Trace, tmp_path: Path, tool: Any) -> None:
    pytest.importorskip("playwright", reason="playwright is not installed")
    path = export_trace(trace, tmp_path / "a.json", format="speedscope")
    titles = {"peak": "Peak memory", "alloc": "Allocations", "churn": "Churn (allocated and freed in one step)"}
    profiles = list(itertools.product(titles, trace.devices))
    with launched_browser() as browser, opened(browser, tool(f"{SPEEDSCOPE}/index.html")) as page:
        page.set_input_files("input[type=file]", path)
        page.get_by_text("Sandwich").click()  # the view with the table of functions
        for number, (measure, device) in enumerate(profiles, 1):
            expected = expected_bytes(trace, device)[measure]
            name = f"{titles[measure]}: {device} ({format_bytes(expected)})"
            page.get_by_text(f"{name} ({number}/{len(profiles)})", exact=True).wait_for()
            shown, rounding = self_bytes(page)
            assert abs(shown - expected) <= rounding + 1e-6
            page.keyboard.press("n")  # the next profile
