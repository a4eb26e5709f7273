"""Chrome traces, CSV tables, and how the output is written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from memtrace.cli import cli

import memtrace
from memtrace.analysis.blocks import blocks, blocks_table
from memtrace.analysis.peak import find_peak
from memtrace.errors import MemtraceError
from memtrace.exporters import FORMATS, export_trace
from memtrace.exporters.formats import FILE_FORMATS
from memtrace.format.manifest import FileCoverage
from memtrace.trace import Trace
from tests.builders import with_manifest
from tests.exporters.conftest import NUM_STEPS, make_trace


@pytest.mark.parametrize("seed", range(3))
def test_memtrace_reads_the_same_peaks_from_a_chrome_trace(seed: int, tmp_path: Path) -> None:
    trace = make_trace(seed)
    again = memtrace.load(str(export_trace(trace, tmp_path / "a.json", format="chrome")))
    peak, peak_again = find_peak(trace, "cpu"), find_peak(again, "cpu")
    assert (peak_again.requested.bytes, peak_again.end_bytes) == (peak.requested.bytes, peak.end_bytes)
    # torch.profiler has the bytes that the allocator counts on a GPU.
    peak, peak_again = find_peak(trace, "cuda:0"), find_peak(again, "cuda:0")
    assert peak.allocated is not None and peak_again.allocated is not None
    assert peak_again.allocated.bytes == peak.allocated.bytes
    assert len(blocks(again)) == len(blocks(trace))
    steps = again.spans[again.spans["kind"] == "step"]
    assert steps["index"].tolist() == list(range(NUM_STEPS))


def test_a_chrome_trace_holds_operators_modules_totals_and_failures(trace: Trace, tmp_path: Path) -> None:
    path = export_trace(trace, tmp_path / "a.json.gz", format="chrome")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named: dict[str, list[Any]] = {}
    for each in events:
        named.setdefault(each["name"], []).append(each)
    on_cpu = [each["args"] for each in named["[memory]"] if each["args"]["Device Type"] == 0]
    total = 0
    for arguments in on_cpu:
        total += arguments["Bytes"]
        assert arguments["Total Allocated"] == total
    assert named["[OutOfMemory]"][0]["args"]["Bytes"] == 1 << 34
    assert sum(len(named[f"aten::op{number}"]) for number in range(3)) == len(trace.ops)
    assert [(each["ts"], each["dur"]) for each in named["nn.Module: Net.layers.0"]] == [(0.01, 0.08)]
    counter = named["cpu memory by category"]
    assert max(sum(each["args"].values()) for each in counter) == find_peak(trace, "cpu").requested.bytes


def test_csv_tables_hold_every_block_event_step_and_site(trace: Trace, tmp_path: Path) -> None:
    folder = export_trace(trace, tmp_path / "tables", format="csv")
    tables = {path.name: pd.read_csv(path) for path in folder.iterdir()}
    assert sorted(tables) == ["allocation_sites.csv", "blocks.csv", "events.csv", "steps.csv"]
    assert tables["blocks.csv"]["size"].tolist() == blocks_table(trace)["size"].tolist()
    assert tables["events.csv"]["time_ns"].tolist() == trace.events["time_ns"].tolist()
    assert tables["steps.csv"]["step"].tolist() == list(range(NUM_STEPS))
    assert tables["steps.csv"]["data_wait_ns"].isna().all()
    sites = tables["allocation_sites.csv"]
    for device in trace.devices:
        of_device = sites[sites["device"] == device]
        assert of_device["peak_bytes"].sum() == find_peak(trace, device).requested.bytes
    assert set(sites["allocation_site"]) >= {"[allocated before the recording]"}
    assert any("model.py:12 Net.forward" in site for site in sites["allocation_site"])


def test_equal_traces_give_equal_files(trace: Trace, tmp_path: Path) -> None:
    for name in FILE_FORMATS:
        first, second = (export_trace(trace, tmp_path / f"{name}{copy}.gz", format=name) for copy in range(2))
        assert first.read_bytes() == second.read_bytes(), name


def test_an_empty_trace_can_be_exported(tmp_path: Path) -> None:
    from tests.builders import trace_of

    for name in FORMATS:
        assert export_trace(trace_of(), tmp_path / name, format=name).exists()
    assert memtrace.load(str(tmp_path / "snapshot")).num_rows("events") == 0


def test_a_trace_of_totals_is_refused(trace: Trace, tmp_path: Path) -> None:
    totals = with_manifest(trace, coverage=FileCoverage(has_blocks=False))
    for name in FORMATS:
        with pytest.raises(MemtraceError, match="cannot be exported: the file holds totals"):
            export_trace(totals, tmp_path / name, format=name)
        assert not (tmp_path / name).exists()


def test_an_export_that_fails_leaves_the_old_file(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("mine")
    with pytest.raises(MemtraceError, match="exists already"):
        export_trace(trace, path, format="chrome")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memtrace.exporters.chrome._slices", fail)
    with pytest.raises(MemtraceError, match=r"a\.json cannot be written: No space left"):
        export_trace(trace, path, format="chrome", overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "mine"


def test_unknown_formats_and_measures_are_errors(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown format 'svg'; the formats are perfetto"):
        export_trace(trace, tmp_path / "a", format="svg")
    with pytest.raises(ValueError, match="measures must be some of peak"):
        export_trace(trace, tmp_path / "a", format="pprof", measures=("leaks",))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def test_the_command_exports_a_window_of_a_recording_in_every_format(gpt_trace: Path, tmp_path: Path) -> None:
    expected = find_peak(memtrace.load(str(gpt_trace)).window(2, 3), "cpu").requested.bytes
    for name in FORMATS:
        result = run(gpt_trace, "-f", name, "-o", tmp_path / "new" / name, "--from-step", 2, "--to-step", 3)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("Wrote ")
    for name, device in (("snapshot", "cuda:0"), ("chrome", "cpu")):
        again = memtrace.load(str(tmp_path / "new" / name))
        assert find_peak(again, device).requested.bytes == expected


def test_the_command_explains_what_it_cannot_do(gpt_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    result = run(gpt_trace, "-f", "csv", "-o", tmp_path / "folder")
    assert isinstance(result.exception, MemtraceError) and "pass --overwrite" in str(result.exception)
    assert run(gpt_trace, "-f", "csv", "-o", tmp_path / "folder", "--overwrite").exit_code == 0
    assert (tmp_path / "folder" / "mine.txt").read_text() == "mine"
    result = run(gpt_trace, "-f", "pprof", "-o", tmp_path / "folder", "--overwrite")
    assert "is not a file" in str(result.exception)
    result = run(gpt_trace, "-f", "perfetto", "--what", "peak", "-o", tmp_path / "a")
    assert result.exit_code == 2 and "--what applies to pprof and speedscope" in result.output


def test_a_large_file_gets_advice(gpt_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    small = {name: replace(each, comfortable_bytes=1) for name, each in FILE_FORMATS.items()}
    monkeypatch.setattr("memtrace.exporters.formats.FILE_FORMATS", small)
    result = run(gpt_trace, "-f", "perfetto", "-o", tmp_path / "a.pftrace")
    assert "--from-step" in result.stderr and "trace_processor --httpd" in result.stderr
