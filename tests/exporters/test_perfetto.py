"""Perfetto traces, read with Perfetto's own messages."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, peak_by_category
from memtrace.exporters import export_trace
from memtrace.trace import Trace
from tests.builders import with_manifest
from tests.exporters.conftest import NUM_STEPS, STEP_NS, make_trace


class Read:
    """The packets of a Perfetto trace, with interned names resolved."""

    def __init__(self, path: Path) -> None:
        messages = pytest.importorskip(
            "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="the package perfetto is not installed"
        )
        content = messages.Trace()
        content.ParseFromString(path.read_bytes())
        self.packets = list(content.packet)
        self.tracks = {
            packet.track_descriptor.uuid: packet.track_descriptor
            for packet in self.packets
            if packet.HasField("track_descriptor")
        }
        names: dict[tuple[int, str, int], str] = {}
        self.events: list[tuple[str, Any, Any, str]] = []
        for packet in self.packets:
            sequence = packet.trusted_packet_sequence_id
            for field in ("event_names", "debug_annotation_names", "debug_annotation_string_values"):
                for entry in getattr(packet.interned_data, field):
                    text = entry.str.decode() if field.endswith("values") else entry.name
                    names[sequence, field, entry.iid] = text
            if packet.HasField("track_event"):
                event = packet.track_event
                name = names[sequence, "event_names", event.name_iid] if event.name_iid else ""
                self.events.append((self.tracks[event.track_uuid].name, packet, event, name))
        self.names = names

    def of_type(self, number: int) -> list[tuple[str, Any, Any, str]]:
        return [each for each in self.events if each[2].type == number]


@pytest.fixture(scope="module")
def exported(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Read:
    return Read(export_trace(trace, tmp_path_factory.mktemp("perfetto") / "a.pftrace", format="perfetto"))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_counters_reach_the_peaks_of_the_trace(trace: Trace, exported: Read, device: str) -> None:
    peak = find_peak(trace, device)
    values: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[int]] = defaultdict(list)
    for track, packet, event, _ in exported.of_type(4):
        values[track].append(event.counter_value)
        times[track].append(packet.timestamp)
    assert max(values[f"{device} requested"]) == peak.requested.bytes
    assert values[f"{device} requested"][0] == peak.baseline_bytes
    assert values[f"{device} requested"][-1] == peak.end_bytes
    assert peak.allocated is not None
    allocated = values.get(f"{device} allocated") or values[f"{device} requested"]
    assert max(allocated) == peak.allocated.bytes
    peak_ns = times[f"{device} requested"][int(np.argmax(values[f"{device} requested"]))]
    for group in peak_by_category(trace, device):
        track = f"{device} {group.name}"
        assert values[track][int(np.searchsorted(times[track], peak_ns, side="right")) - 1] == group.bytes
    assert all(list(column) == sorted(column) for column in times.values())


def test_slices_begin_and_end_at_the_times_of_the_trace(trace: Trace, exported: Read) -> None:
    open_slices: dict[int, list[tuple[str, int]]] = defaultdict(list)
    slices: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for track, packet, event, name in exported.events:
        if event.type == 1:
            open_slices[event.track_uuid].append((name, packet.timestamp))
        elif event.type == 2:
            begun = open_slices[event.track_uuid].pop()
            slices[track].append((*begun, packet.timestamp))
    assert sorted(slices["steps"]) == [
        (f"step {number}", number * STEP_NS, (number + 1) * STEP_NS) for number in range(NUM_STEPS)
    ]
    assert slices["phases"] == [("forward", 10, 100)]
    assert sorted(slices["modules"]) == [('Net."quoted"\ufffdé', 20, 90), ("Net.layers.0", 10, 90)]
    assert slices["ranges"] == [("forward", 20, 50)] and slices["ranges (overlapping)"] == [("forward", 30, 70)]
    ops = trace.ops
    assert sorted(each for track in ("", "operators (overlapping)") for each in slices[track]) == sorted(
        (f"aten::op{name}", start, start + 5) for name, start in zip(ops["name"], ops["start_ns"], strict=True)
    )


def test_flows_lead_from_each_allocation_to_its_free(trace: Trace, exported: Read) -> None:
    table = blocks(trace)
    begins, ends, sizes = {}, {}, {}
    for _, packet, event, name in exported.of_type(3):
        for flow in event.flow_ids:
            begins[flow] = packet.timestamp
            sizes[flow] = event.debug_annotations[0].int_value
            assert name.startswith("alloc ")
        for flow in event.terminating_flow_ids:
            ends[flow] = packet.timestamp
            assert name.startswith("free ")
    assert begins.keys() == ends.keys()
    has_both = (table.alloc_event >= 0) & (table.free_event >= 0)
    assert sorted((begins[flow], ends[flow], sizes[flow]) for flow in begins) == sorted(
        zip(
            table.alloc_ns[has_both].tolist(),
            table.free_ns[has_both].tolist(),
            table.size[has_both].tolist(),
            strict=True,
        )
    )


def test_failed_allocations_and_the_clock_are_there(exported: Read) -> None:
    failures = [(packet.timestamp, event) for _, packet, event, name in exported.of_type(3) if name == "out of memory"]
    assert [(time, event.debug_annotations[0].int_value) for time, event in failures] == [(250_000, 1 << 34)]
    (snapshot,) = [packet.clock_snapshot for packet in exported.packets if packet.HasField("clock_snapshot")]
    assert {clock.clock_id: clock.timestamp for clock in snapshot.clocks} == {6: 0, 1: 1_790_000_000_000_000_000}


def test_ranks_are_processes_on_one_clock(tmp_path: Path) -> None:
    parts = [
        with_manifest(make_trace(rank, num_blocks=30), rank=rank, t0_epoch_ns=10_000 - 4_000 * rank, world_size=2)
        for rank in range(2)
    ]
    sources = {rank: part._source for rank, part in enumerate(parts)}
    both = Read(export_trace(Trace(None, sources), tmp_path / "a.pftrace", format="perfetto"))
    processes = {track.process.pid: track.process.process_name for track in both.tracks.values() if track.process.pid}
    assert processes == {4711: "rank 0: memtrace", 4712: "rank 1: memtrace"}
    starts = [packet.timestamp for track, packet, event, name in both.of_type(1) if name == "step 0"]
    assert starts == [4_000, 0]


def test_trace_processor_finds_the_peak(trace: Trace, tmp_path: Path, tool: Any) -> None:
    program = tool("trace_processor_shell")
    path = export_trace(trace, tmp_path / "a.pftrace", format="perfetto")
    query = tmp_path / "query.sql"
    query.write_text("select cast(max(value) as int) from counter join track on track_id = track.id "
                     "where name = 'cpu requested';")  # fmt: skip
    output = subprocess.run([program, "-q", query, path], capture_output=True, text=True, check=True).stdout
    assert str(find_peak(trace, "cpu").requested.bytes) in output
