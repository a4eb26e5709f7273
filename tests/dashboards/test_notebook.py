"""Displays in Jupyter: in a real kernel, for every kind of trace and result, and never with an error."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memtrace.cli import COMMANDS
from memtrace.cli.plan import PLANS
from memtrace.dashboards.inline_svg import HEIGHT, stacked_curve
from memtrace.dashboards.notebook import MAX_EVENTS, MAX_ROWS, to_html

import memtrace
from memtrace import analysis
from memtrace.analysis.peak import find_peak
from memtrace.display import Displayed
from memtrace.planning import plan_recompute
from memtrace.trace import Trace, load
from tests.analysis.test_compare import job, sized_trace
from tests.builders import event, trace_of, with_manifest
from tests.dashboards.test_page import hostile_trace


@pytest.fixture
def jupyter_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the kernel's own are written where nobody else's are."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))


@pytest.mark.usefixtures("jupyter_folders")
def test_a_notebook_shows_traces_and_results(gpt_trace: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is missing: pip install 'memtrace[test]'")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is missing: pip install 'memtrace[test]'")
    pytest.importorskip("ipykernel", reason="ipykernel is missing: pip install 'memtrace[test]'")
    cells = [
        f"import memtrace\ntrace = memtrace.load({str(gpt_trace)!r})\ntrace",
        "memtrace.analysis.summarize(trace)",
        "memtrace.analysis.find_peak(trace, 'cpu')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[0]["data"]["text/html"] for cell in notebook.cells]
    assert str(gpt_trace) in shown[0] and "<svg" in shown[0] and "largest category" in shown[0]
    assert "median_duration_ns" in shown[1]
    assert "bytes" in shown[2]


@pytest.mark.usefixtures("jupyter_folders")
def test_names_complete_in_a_live_kernel(gpt_trace: Path) -> None:
    manager = pytest.importorskip("jupyter_client.manager", reason="ipykernel is missing: pip install 'memtrace[test]'")
    pytest.importorskip("ipykernel", reason="ipykernel is missing: pip install 'memtrace[test]'")
    kernel, client = manager.start_new_kernel(startup_timeout=120)
    try:
        client.execute(f"import memtrace; trace = memtrace.load({str(gpt_trace)!r})", reply=True, timeout=120)

        def completions(code: str) -> set[str]:
            reply = client.complete(code, len(code), reply=True, timeout=120)
            return {match.rpartition(".")[2] for match in reply["content"]["matches"]}

        assert {"window", "rank", "events", "manifest"} <= completions("trace.")
        assert {"load", "record", "plots", "analysis"} <= completions("memtrace.")
        assert {"find_leaks", "compare_runs"} <= completions("memtrace.analysis.")
        assert {"timeline", "pipeline"} <= completions("memtrace.plots.")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def html_of(value: Any) -> str:
    """The display of a value, which must be HTML."""
    bundle = value._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}, bundle["text/plain"][-300:]
    html: str = bundle["text/html"]
    assert len(html) < 400_000
    return html


def test_results_show_their_fields_with_units(gpt_trace: Path) -> None:
    trace = load(gpt_trace)
    plan = plan_recompute(trace, "cpu")
    compared = analysis.compare_runs(analysis.match_runs([trace, trace]))
    for value in (
        analysis.summarize(trace),
        analysis.summarize_job(trace),
        analysis.find_wasted_memory(trace),
        analysis.analyze_access(trace),
        analysis.find_leaks(trace),
        analysis.analyze_steps(trace),
        analysis.compute_coverage(trace),
        analysis.compare_traces(trace, trace),
        analysis.compare_ranks(trace),
        compared,
        plan,
        plan.plan,
    ):
        assert isinstance(value, Displayed)
        assert type(value).__name__ in html_of(value)
    peak = find_peak(trace, "cpu")
    assert re.search(r"bytes</td><td[^>]*>[\d.]+ [KM]iB", html_of(peak))


def test_hostile_names_are_text() -> None:
    trace = hostile_trace()
    shown = html_of(trace) + html_of(analysis.summarize(trace)) + html_of(analysis.find_wasted_memory(trace))
    assert "<script" not in shown and "<img" not in shown
    assert "&lt;script&gt;" in shown


def test_the_curve_reaches_the_peak_and_keeps_its_last_level() -> None:
    """Levels of 100, 400 and 200 bytes: the highest is the top of the plot, the others are in proportion."""
    events = [
        event("alloc", 0, 0, 100),
        event("alloc", 1, 500, 300),
        event("free", 1, 900, 300),
        event("alloc", 2, 1000, 100),
    ]
    svg = stacked_curve(trace_of(events=events), "cpu")
    (path,) = re.findall(r'<path d="(M[^"]*Z)"', svg)
    top, bottom = 20.0, HEIGHT - 34.0
    levels = [bottom - (bottom - top) * size / 400 for size in (100, 400, 100, 200)]
    assert [float(y) for y in re.findall(r"V([\d.]+)", path)] == pytest.approx([*levels, bottom], abs=0.11)
    assert "peak 400 B" in svg and 'fill="currentColor"' in svg


def test_a_running_recording_shows_a_line_and_a_finished_one_its_trace(tmp_path: Path) -> None:
    recording = memtrace.record(tmp_path / "run.memtrace", observer="dispatch")
    assert "has not started" in html_of(recording)
    with recording:
        kept = torch.ones(1000)
        assert "is running" in html_of(recording)
    del kept
    assert "<svg" in html_of(recording)
    shutil.rmtree(recording.path)
    assert "does not exist" in html_of(recording)


def test_a_trace_that_is_still_being_written_says_so(gpt_trace: Path) -> None:
    whole = load(gpt_trace)
    unfinished = with_manifest(whole, finished=False)
    assert "still running" in html_of(unfinished) and "<svg" in html_of(unfinished)
    empty = with_manifest(trace_of(), finished=False, source=whole.manifest.source)
    assert "No events have been written yet." in html_of(empty)
    assert "No events." in html_of(trace_of())


def test_ranks_are_listed_and_the_fullest_is_drawn() -> None:
    shown = html_of(job({0: sized_trace([10]), 1: sized_trace([30])}))
    assert "rank 1, cpu" in shown and "<svg" in shown
    many = html_of(job({rank: sized_trace([10]) for rank in range(40)}))
    assert "40 ranks" in many and "memtrace.plots.ranks(trace)" in many


def test_a_trace_too_large_to_analyze_names_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = sized_trace([10])
    monkeypatch.setattr(Trace, "num_rows", lambda self, table: MAX_EVENTS + 1)
    assert "trace.window(10, 12)" in to_html(trace)


@dataclass(frozen=True)
class Result(Displayed):
    """A result of every kind of value."""

    total_bytes: int | None
    part_bytes: tuple[int, ...]
    time_s: float
    values: Any
    nested: tuple[Result, ...] = ()


def test_unknown_values_long_lists_and_deep_results_are_bounded() -> None:
    inner = Result(5, (), 0.001, {"<b>": 1})
    for _ in range(5):
        inner = Result(None, tuple(range(100)), 2.5, np.zeros(9), (inner,) * 4)
    shown = html_of(inner)
    assert "unknown" in shown and f"{100 - MAX_ROWS} more" in shown and "9 values" in shown and "2.50 s" in shown
    assert "&lt;b&gt;" in html_of(Result(5, (), 0.001, {"<b>": 1}))


def test_a_display_that_fails_is_plain_text() -> None:
    class Broken(Displayed):
        @property
        def is_recording(self) -> bool:
            raise RuntimeError("broken")

    bundle = Broken()._repr_mimebundle_()
    assert set(bundle) == {"text/plain"}
    assert "RuntimeError while drawing it: broken" in bundle["text/plain"]


RESULT_PACKAGES = ("analysis", "allocator", "pipeline", "planning")


def exported_results() -> Iterator[type]:
    """The results of analyses and planners that commands print."""
    for home, _ in (*COMMANDS.values(), *PLANS.values()):
        result = getattr(import_module(home), "RESULT", None)
        if isinstance(result, type) and result.__module__.split(".")[1] in RESULT_PACKAGES:
            yield result


def test_what_commands_print_shows_itself() -> None:
    missing = {result.__name__ for result in exported_results() if not issubclass(result, Displayed)}
    assert not missing
