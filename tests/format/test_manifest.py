"""The manifest: a round trip through JSON, and errors that name the member."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.errors import TraceError
from memtrace.format.manifest import (
    ClockOffset,
    DeviceInfo,
    FileCoverage,
    Manifest,
    RecordingOptions,
    TraceSource,
    missing_parts,
    parse_manifest,
    part_ranges,
    read_manifest,
    write_manifest,
)

FULL = Manifest(
    memtrace_version="1.2",
    source=TraceSource("recording", "native"),
    rank=3,
    world_size=8,
    finished=False,
    stop_reason="the disk is full",
    t0_epoch_ns=10**18,
    num_events=5,
    versions={"python": "3.11", "cuda": None},
    devices={"cpu": DeviceInfo("x86_64", num_threads=2), "cuda:0": DeviceInfo(total_bytes=1 << 40)},
    command=("train.py", "--fast"),
    options=RecordingOptions(last_steps=4, flush_seconds=1),
    clock=ClockOffset(offset_ns=-5),
    allocator_settings={"max_split_size": -1, "divisions": {"1": 0}},
    coverage=FileCoverage(0, 7, has_accesses=True, notes=("a note",)),
    parts={"events": ((0, 3), (5, 5))},
)


@pytest.mark.parametrize("manifest", [FULL, Manifest()])
def test_a_manifest_survives_its_file(manifest: Manifest, tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path / "manifest.json") == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 1}, "format version 1, which this memtrace no longer reads"),
        ({"format_version": 99}, "Install a newer memtrace"),
        ({"format_version": None}, "has no format_version"),
        ({"format": "other"}, "is not the manifest of a memtrace trace"),
        ({"rank": "two"}, "the member rank has the invalid value 'two'"),
        ({"rank": True}, "the member rank has the invalid value 'True'"),
        ({"coverage": {"notes": "text"}}, "the member coverage.notes has the invalid value"),
        ({"devices": {"cpu": {"name": 5}}}, "the member devices.cpu.name has the invalid value"),
        ({"parts": {"events": [[0, 1, 2]]}}, "the member parts.events has the invalid value"),
    ],
)
def test_an_invalid_manifest_is_an_error_that_names_the_member(changes: dict[str, Any], message: str) -> None:
    content = json.loads(json.dumps(FULL.to_json())) | changes
    with pytest.raises(TraceError, match=message):
        parse_manifest(content, "manifest.json")


def test_the_message_about_a_newer_format_has_one_line_of_a_reasonable_length() -> None:
    content = {"format": "memtrace", "format_version": 99, "memtrace_version": "x" * 10**6}
    with pytest.raises(TraceError) as refusal:
        parse_manifest(content, "manifest.json")
    assert len(str(refusal.value)) < 300


def test_unknown_members_are_ignored_and_absent_ones_have_defaults() -> None:
    content = {"format": "memtrace", "format_version": 3, "rank": 1, "from_the_future": {}}
    assert parse_manifest(content, "manifest.json") == Manifest(rank=1)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_missing_parts_are_those_listed_and_not_there(listed: set[int], present: set[int], first: int) -> None:
    ranges = part_ranges(listed)
    assert {number for low, high in ranges for number in range(low, high + 1)} == listed
    absent = sorted(number for number in listed - present if number >= first)
    expected = (len(absent), absent[0] if absent else None)
    assert missing_parts(ranges, sorted(present), first) == expected


def test_a_manifest_that_lists_more_parts_than_any_folder_is_checked_quickly() -> None:
    assert missing_parts(((0, 10**15),), [0, 1], 0) == (10**15 - 1, 2)
