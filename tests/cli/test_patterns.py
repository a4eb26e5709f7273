"""``memtrace steps``, ``access`` and ``leaks`` as their users meet them, and their figures."""

from __future__ import annotations

import csv
import io
import json

import pytest
from memtrace.dashboards.access import intervals_figure, outliers_figure
from memtrace.dashboards.growth import growth_figure
from memtrace.dashboards.stability import stability_figure

from memtrace import load
from tests.builders import event, trace_of
from tests.cli.runner import run_memtrace as memtrace
from tests.programs.training import STEPS, evaluation, not_iterative, recorded


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("patterns") / "run.memtrace"
    recorded(evaluation, path)
    return path


def test_steps(trace):
    found = json.loads(memtrace("steps", trace, "--json", "--from-events").stdout)
    assert found["num_steps"] == STEPS == len(found["boundaries_ns"]) - 1
    assert found["boundaries_ns"] == sorted(found["boundaries_ns"])
    assert found["confidence"] > 0.9
    assert found["period_events"] > 100
    assert set(found["stability"]) == {"events", "bytes", "roles", "by_step"}
    assert json.loads(memtrace("steps", trace, "--json").stdout)["source"] == "marks"
    text = memtrace("steps", trace).stdout
    assert "30 steps" in text
    assert "100 % of the marked boundaries" in text
    assert "only in" in text
    rows = list(csv.DictReader(io.StringIO(memtrace("steps", trace, "--csv").stdout)))
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert float(rows[5]["bytes"]) < 1


def test_what_is_not_iterative_is_said(tmp_path):
    recorded(not_iterative, tmp_path / "run.memtrace")
    assert "not iterative" in memtrace("steps", tmp_path / "run.memtrace").stdout
    assert "none detected" in memtrace("summary", tmp_path / "run.memtrace").stdout


def test_access_with_bandwidths_given_measured_and_published(trace, tmp_path):
    published = json.loads(memtrace("access", trace, "--json", "--min-bytes", "0").stdout)
    assert published["num_intervals"] > 1000
    fast = json.loads(memtrace("access", trace, "--json", "--min-bytes", "0", "--out", "1000", "--in", "1000").stdout)
    assert fast["swappable"]["num_intervals"] > published["swappable"]["num_intervals"]
    (tmp_path / "here.json").write_text(memtrace("doctor", "--json", "--bandwidth").stdout)
    measured = json.loads(memtrace("access", trace, "--json", "--bandwidths", tmp_path / "here.json").stdout)
    assert measured["bandwidths"]["source"].startswith("measured")
    assert "swap at 6.40 GB/s out" in memtrace("access", trace).stdout
    rows = list(csv.DictReader(io.StringIO(memtrace("access", trace, "--csv", "--min-bytes", "0").stdout)))
    assert len({(row["site"], row["category"], row["bytes"]) for row in rows}) == len(rows) > 0
    assert int(rows[0]["swap_ns"]) > 0


def test_leaks(trace):
    assert json.loads(memtrace("leaks", trace, "--json", "--capacity", "1GB").stdout)["capacity_bytes"] == 10**9
    found = json.loads(memtrace("leaks", trace, "--json", "--capacity", "1GiB").stdout)
    assert found["leaks"] == []
    assert found["steps_to_capacity"] is None
    assert "no leaks" in memtrace("leaks", trace).stdout
    assert memtrace("leaks", trace, "--csv").stdout.startswith("site,category,bytes_per_step")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("leaks", "--capacity", "many"), "invalid size"),
        (("access", "--out", "5"), "give both"),
        (("access", "--out", "5", "--in", "-1"), "make no sense"),
        (("access", "--bandwidths", "/nowhere.json"), "cannot be read"),
        (("access", "--bandwidths", "{trace}/rank=0/manifest.json"), "no bandwidths in it"),
    ],
)
def test_wrong_options_get_one_sentence(trace, arguments, sentence):
    done = memtrace(arguments[0], trace, *(text.format(trace=trace) for text in arguments[1:]))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_figures_are_there_with_data_and_none_without(trace):
    opened = load(trace)
    for build in (intervals_figure, outliers_figure, growth_figure, stability_figure):
        figure = build(opened, "cpu")
        assert figure.data
        assert len(figure.to_json()) < 1_000_000
        assert build(trace_of(events=[event("alloc", 0, 0, 10)]), "cpu") is None
    rows = dict(zip(stability_figure(opened, "cpu").data[0].y, stability_figure(opened, "cpu").data[0].z, strict=True))
    assert rows["bytes"][5] < rows["bytes"][6] == 100
