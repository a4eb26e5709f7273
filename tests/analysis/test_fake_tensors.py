"""Recordings of fake tensors: sizes are answers, times are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from memtrace.dashboards.access import intervals_figure, swap_figure
from memtrace.dashboards.steps import steps_figure
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memtrace
from memtrace.analysis import analyze_access, find_swap_candidates, find_wasted_memory, measure_stalls, summarize
from memtrace.analysis.bandwidth import TITAN_XP
from memtrace.analysis.diff import compare_traces
from memtrace.analysis.ranks import compare_ranks
from memtrace.planning.verdict import find_verdict
from memtrace.trace import Trace
from tests.cli.runner import run_memtrace


@pytest.fixture(scope="module")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake") / "run.memtrace"
    with FakeTensorMode(), memtrace.record(path):
        model = nn.Sequential(nn.Linear(1 << 12, 1 << 13), nn.Linear(1 << 13, 1 << 12))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(1 << 14, 1 << 12)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.fixture(scope="module")
def fake(fake_path: Path) -> Trace:
    return memtrace.load(fake_path)


def test_peak_of_fake_tensors_is_known_and_times_are_not(fake: Trace) -> None:
    summary = summarize(fake)
    assert summary.peak_bytes > 1 << 30
    assert not fake.has_times
    assert summary.steps.num_steps == 3
    assert summary.steps.median_duration_ns is None and summary.steps.data_wait_share is None
    assert summary.devices[0].peak.time_ns is None


def test_no_fake_tensor_is_a_swap_candidate(fake: Trace) -> None:
    assert summarize(fake).patterns.swappable_bytes_at_peak is None
    assert find_swap_candidates(fake, TITAN_XP) == ()
    result = analyze_access(fake)
    assert result.num_intervals is None and result.swappable.bytes_at_peak is None
    assert set(result.percentiles_ns.values()) == {None}


def test_findings_and_stalls_of_fake_tensors_claim_no_time(fake: Trace) -> None:
    (waste,) = find_wasted_memory(fake).devices
    assert all(finding.idle_byte_seconds is None for finding in waste.findings)
    assert measure_stalls(fake).wait_share is None


def test_no_command_and_no_part_of_the_page_claims_a_time_of_fake_tensors(fake: Trace) -> None:
    assert intervals_figure(fake, "cpu") is None and swap_figure(fake, "cpu") is None
    figure = steps_figure(fake, "cpu")
    assert figure is not None and {curve.name for curve in figure.data} == {"peak", "live at the end of the step"}
    assert not any("time" in sentence for sentence in find_verdict(fake).sentences)
    assert compare_traces(fake, fake).before.median_step_duration_ns is None
    assert compare_ranks(fake).ranks[0].compute_ns is None


def test_commands_print_no_duration_of_fake_tensors(fake_path: Path) -> None:
    text = run_memtrace("summary", fake_path).stdout
    assert "Swap candidates" not in text and "median unknown" in text
    assert "no access intervals" in run_memtrace("access", fake_path).stdout


def test_times_of_a_recording_in_pure_python_are_known(tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.memtrace", observer="dispatch"):
        nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()
    assert memtrace.load(tmp_path / "run.memtrace").has_times
