"""``memtrace steps``, ``access``, ``leaks`` and ``doctor`` as users run them, and the page sections of the first three."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memtrace.cli import cli
from memtrace.dashboards.access import intervals_figure, swap_figure
from memtrace.dashboards.growth import growth_figure
from memtrace.dashboards.stability import stability_figure
from memtrace.dashboards.steps import steps_figure

from memtrace import load
from memtrace.errors import MemtraceError
from memtrace.trace import Trace
from tests.builders import event, trace_of
from tests.programs.training import STEPS, not_iterative, recorded


def run(*arguments: str | Path) -> str:
    """Return the output of a command that succeeds."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str | Path) -> Any:
    """Return the parsed JSON output of a command."""
    return json.loads(run(*arguments, "--json"))


def run_csv(*arguments: str | Path) -> list[dict[str, str]]:
    """Return the rows of the CSV output of a command."""
    return list(csv.DictReader(io.StringIO(run(*arguments, "--csv"))))


def one_line(text: str) -> str:
    """Return text without the line breaks of the terminal."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def trace(program_traces: dict[str, Trace]) -> Path:
    """Path of the trace of a program that evaluates after every fifth step."""
    path = program_traces["evaluation every 5"].path
    assert path is not None
    return path


def test_steps_are_printed_with_their_stability_and_differences(trace: Path) -> None:
    text = one_line(run("steps", trace))
    assert "30 steps, marked by the program or its optimizer" in text
    assert "Step marks: 100 % of their ends were also detected" in text
    assert "(median of 28 steps; 2 warm-up steps excluded)" in text
    assert "only in 5 steps (5, 10, 15, ...)" in text


def test_steps_as_json_come_from_marks_or_events(trace: Path) -> None:
    detected = run_json("steps", trace, "--from-events")
    assert detected["num_steps"] == STEPS == len(detected["steps"])
    starts = [row["start_ns"] for row in detected["steps"]]
    assert starts == sorted(starts)
    assert detected["source"] == "events"
    assert detected["confidence"] > 0.9
    assert detected["median_events"] > 100
    assert set(detected["stability"]) == {"num_warm_up_steps", "events", "bytes", "blocks"}
    assert run_json("steps", trace)["source"] == "marks"


def test_steps_as_csv_have_one_row_per_step(trace: Path) -> None:
    rows = run_csv("steps", trace)
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert float(rows[5]["matching_bytes"]) < 1 and rows[5]["is_unusual"] == "True"


def test_a_program_without_steps_is_reported_as_not_iterative(tmp_path: Path) -> None:
    recorded(not_iterative, tmp_path / "run.memtrace")
    assert "not iterative" in one_line(run("steps", tmp_path / "run.memtrace"))


def test_access_uses_published_given_and_measured_bandwidths(trace: Path, tmp_path: Path) -> None:
    published = run_json("access", trace, "--min-bytes", "0")
    assert published["num_intervals"] > 1000
    given = run_json("access", trace, "--min-bytes", "0", "--d2h", "1000", "--h2d", "1000")
    assert given["swappable"]["num_intervals"] > published["swappable"]["num_intervals"]
    assert "at 6.40 GB/s to the host (D2H)" in one_line(run("access", trace))
    (tmp_path / "machine.json").write_text(run("doctor", "--json", "--bandwidth"))
    measured = run_json("access", trace, "--bandwidth", tmp_path / "machine.json")
    assert measured["bandwidths"]["source"].startswith("measured")


def test_access_as_csv_has_one_row_per_candidate(trace: Path) -> None:
    rows = run_csv("access", trace, "--min-bytes", "0")
    assert len({(row["site"], row["category"], row["bytes"]) for row in rows}) == len(rows) > 0
    assert int(rows[0]["swap_ns"]) > 0


def test_leaks_are_printed_with_the_capacity(trace: Path) -> None:
    assert run_json("leaks", trace, "--capacity", "1GB")["capacity_bytes"] == 10**9
    result = run_json("leaks", trace, "--capacity", "1GiB")
    assert result["leaks"] == [] and result["steps_to_capacity"] is None
    assert "no leaks (28 steps; 2 warm-up steps excluded)" in one_line(run("leaks", trace))
    assert run("leaks", trace, "--csv").startswith("site,category,bytes_per_step")


def test_doctor_reports_versions_and_the_observer() -> None:
    report = run_json("doctor")
    assert report["environment"]["observer"] in ("native", "dispatch")
    assert report["environment"]["versions"]["torch"]
    assert report["bandwidth"] is None
    assert "observer" in run("doctor")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("leaks", ("--capacity", "many"), "'many'"),
        ("leaks", ("--min-steps", "1"), "1 is not in the range x>=2"),
        ("access", ("--d2h", "5"), "--d2h and --h2d must be given together"),
        ("access", ("--d2h", "5", "--h2d", "5", "--bandwidth", "file"), "give only one of --bandwidth"),
    ],
)
def test_invalid_options_are_usage_errors(trace: Path, command: str, arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(cli, [command, str(trace), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--d2h", "5", "--h2d", "-1"), "host-to-device bandwidth of -1 GB/s: pass a positive number"),
        (("--bandwidth", "/nowhere.json"), "/nowhere.json: cannot be read: No such file"),
        (("--bandwidth", "{trace}/rank=0/manifest.json"), "no bandwidths. Pass the output of"),
        (("--bandwidth", "{trace}/rank=0/events-00000.parquet"), "not JSON"),
    ],
)
def test_unusable_bandwidths_are_errors_that_name_the_input(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(cli, ["access", str(trace), *(text.format(trace=trace) for text in arguments)])
    assert isinstance(result.exception, MemtraceError)  # main() prints it and exits with 2
    assert message in str(result.exception)


@pytest.mark.parametrize("build", [intervals_figure, swap_figure, growth_figure, stability_figure, steps_figure])
def test_figures_stay_small_and_are_left_out_without_data(trace: Path, build: Any) -> None:
    figure = build(load(trace), "cpu")
    assert figure.data
    assert len(figure.to_json()) < 1_000_000
    assert build(trace_of(events=[event("alloc", 0, 0, 10)]), "cpu") is None


def test_the_stability_figure_shows_the_steps_that_differ(trace: Path) -> None:
    (heatmap,) = stability_figure(load(trace), "cpu").data
    rows = dict(zip(heatmap.y, heatmap.z, strict=True))
    assert rows["bytes"][5] < rows["bytes"][6] == 100
