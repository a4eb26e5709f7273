"""What the user states about a machine means the same to the summary, the page and the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from memtrace.dashboards.access import swap_figure
from memtrace.dashboards.findings import findings_table
from memtrace.dashboards.page import render

import memtrace
from memtrace.analysis.access import analyze_access
from memtrace.analysis.bandwidth import bandwidths_from_rates, bandwidths_of_card
from memtrace.analysis.findings import find_device_waste
from memtrace.analysis.options import AnalysisOptions
from memtrace.units import format_bytes, format_count
from tests.cli.runner import run_memtrace

OPTIONS = (
    AnalysisOptions(min_swap_bytes=0),
    AnalysisOptions(bandwidths_of_card("A100"), min_swap_bytes=64 << 10),
    AnalysisOptions(bandwidths_from_rates(0.01, 0.02), min_swap_bytes=1024, min_waste_bytes=1),
)


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_page_and_analysis_agree(options: AnalysisOptions, gpt_trace: Path) -> None:
    trace = memtrace.load(gpt_trace)
    access = analyze_access(trace, options.bandwidths, min_bytes=options.min_swap_bytes)
    figure = swap_figure(trace, "cpu", options)
    assert figure is not None
    note = figure.layout.meta["note"]
    assert f"{format_count(access.swappable.num_intervals or 0, 'interval')} (dots and circles)" in note
    assert f" {format_bytes(access.swappable.bytes_at_peak)} can be in host memory" in note
    assert f"at least {format_bytes(options.min_swap_bytes)}." in note
    table = findings_table(trace, "cpu", options)
    waste = find_device_waste(trace, "cpu", min_bytes=options.min_waste_bytes)
    assert (0 if table is None else len(table.rows)) == min(len([f for f in waste.findings if f.saved_bytes]), 30) or (
        not any(finding.saved_bytes for finding in waste.findings)
    )


def test_summary_and_access_agree(gpt_trace: Path) -> None:
    machine = ("--d2h", "0.5", "--h2d", "0.5")
    summary = json.loads(run_memtrace("summary", gpt_trace, *machine, "--min-swap", "4KiB", "--json").stdout)
    access = json.loads(run_memtrace("access", gpt_trace, *machine, "--min-bytes", "4KiB", "--json").stdout)
    assert summary["patterns"]["swappable_bytes_at_peak"] == access["swappable"]["bytes_at_peak"]


def test_the_page_states_the_bandwidths_of_the_user(gpt_trace: Path) -> None:
    page = render(memtrace.load(gpt_trace), options=AnalysisOptions(bandwidths_from_rates(7.25, 6.5)))
    assert "7.25 GB" in page and "6.50 GB" in page


def test_a_capacity_that_the_peak_exceeds_is_part_of_the_verdict(gpt_trace: Path) -> None:
    peak = json.loads(run_memtrace("summary", gpt_trace, "--json").stdout)["devices"][0]["peak"]["requested_bytes"]
    result = json.loads(run_memtrace("summary", gpt_trace, "--capacity", f"{peak - 1024}B", "--json").stdout)
    assert "by 1.00 KiB." in result["verdict"]["sentences"][1]
    assert any(fix["is_enough"] for fix in result["verdict"]["fixes"])
    assert f"--capacity {peak - 1024}B" in result["verdict"]["next_command"]
    fits = json.loads(run_memtrace("summary", gpt_trace, "--capacity", f"{peak}B", "--json").stdout)["verdict"]
    assert "leaves 0 B of the capacity" in fits["sentences"][1] and fits["next_command"] is None
