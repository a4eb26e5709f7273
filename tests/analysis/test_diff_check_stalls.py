"""Comparing traces, checking limits in CI, and waits for data: on recorded runs and on hand-made traces."""

from __future__ import annotations

import csv
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memtrace
from memtrace.analysis.cache_share import DataSource, predict_cache_shares
from memtrace.analysis.check import LimitCheck, MemoryLimits, check_limits
from memtrace.analysis.diff import MemoryChange, changes_table, compare_traces
from memtrace.analysis.stalls import StallBreakdown, measure_stalls
from memtrace.errors import MemtraceError, TraceError
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of
from tests.cli.runner import run_memtrace

MIB = 1 << 20
PARAMETER_BYTES = 4 * (256 * 1024 * 2 + 1024 + 256)
"""Of the model of ``record_run``."""


def record_run(path: Path, *, batch_size: int = 8, num_steps: int = 6, leaks: bool = False) -> Path:
    """Record a training run; with ``leaks``, every step keeps 1 MiB."""
    torch.manual_seed(0)
    kept = []
    with memtrace.record(path) as rec:
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(num_steps):
            model(torch.randn(batch_size, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if leaks:
                kept.append(torch.ones(MIB // 4))
            rec.step()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "small": record_run(folder / "small.memtrace"),
        "longer": record_run(folder / "longer.memtrace", num_steps=9),
        "large": record_run(folder / "large.memtrace", batch_size=16),
        "leak": record_run(folder / "leak.memtrace", num_steps=8, leaks=True),
    }


# Comparing traces.


def test_runs_of_one_program_do_not_differ_even_if_one_is_longer(runs: dict[str, Path]) -> None:
    comparison = compare_traces(memtrace.load(runs["small"]), memtrace.load(runs["longer"]))
    assert comparison.changes == ()
    assert (comparison.before.num_steps, comparison.after.num_steps) == (6, 9)
    assert len(comparison.steps) == 6
    assert all(row.before_bytes == row.after_bytes for row in comparison.steps)
    done = run_memtrace("diff", runs["small"], runs["longer"])
    assert done.returncode == 0 and "No category, module or allocation site changed." in done.stdout


def test_run_of_two_steps_is_compared_with_the_same_steps_of_the_other() -> None:
    # The first step makes an allocation that lasts.
    short, long = (
        trace_of(
            events=[event("alloc", 0, 0, 1000), *(event("alloc", n + 1, 10 * n + 1, 8) for n in range(num_steps))],
            spans=[step(n, 10 * n, 10) for n in range(num_steps)],
        )
        for num_steps in (2, 12)
    )
    changes = compare_traces(long, short).changes
    assert [change for change in changes if change.measure == "allocated_per_step"] == []


def test_twice_the_batch_size_doubles_activations_and_leaves_parameters_alone(runs: dict[str, Path]) -> None:
    small, large = memtrace.load(runs["small"]), memtrace.load(runs["large"])
    changes = compare_traces(small, large).changes
    per_step = {
        change.name: change
        for change in changes
        if (change.grouping, change.measure) == ("category", "allocated_per_step")
    }
    assert set(per_step) <= {"activation", "temporary", "input", "unknown"}
    before_bytes = per_step["activation"].before_bytes
    assert before_bytes is not None and per_step["activation"].after_bytes == 2 * before_bytes
    assert all(change.kind == "grew" for change in changes)
    table = changes_table(small, large)
    assert len(table) == len(changes) and (table.change_bytes == table.after_bytes - table.before_bytes).all()


def test_command_prints_every_change_as_json_and_csv(runs: dict[str, Path]) -> None:
    changes = compare_traces(memtrace.load(runs["small"]), memtrace.load(runs["large"])).changes
    rows = list(csv.DictReader(io.StringIO(run_memtrace("diff", runs["small"], runs["large"], "--csv").stdout)))
    assert list(rows[0]) == [field.name for field in fields(MemoryChange)]
    document = json.loads(run_memtrace("diff", runs["small"], runs["large"], "--json").stdout)
    for printed in (rows, document["changes"]):
        assert [int(row["change_bytes"]) for row in printed] == [change.change_bytes for change in changes]
    assert "Allocated per step (median), by category" in run_memtrace("diff", runs["small"], runs["large"]).stdout


def test_site_of_only_one_trace_appears_or_disappears(runs: dict[str, Path]) -> None:
    small, leak = memtrace.load(runs["small"]), memtrace.load(runs["leak"])
    appeared = [
        change
        for change in compare_traces(small, leak).changes
        if (change.kind, change.grouping) == ("appeared", "site")
    ]
    assert {change.before_bytes for change in appeared} == {None}
    assert MIB in {change.after_bytes for change in appeared}
    back = compare_traces(leak, small).changes
    disappeared = {(change.measure, change.name) for change in back if change.kind == "disappeared"}
    assert {(change.measure, change.name) for change in appeared} <= disappeared


BLOCKS = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2), st.booleans()), min_size=1, max_size=12)
"""Blocks as (bytes, call stack, whether it is freed)."""


def trace_with_stacks(blocks: list[tuple[int, int, bool]], address: list[int], first_line: int = 5) -> Trace:
    """Return a trace whose three call stacks lie in three functions from line ``first_line`` on."""
    names: list[dict[str, Any]] = []
    for stack in range(3):
        text = f"/home/me/a.py\t{first_line + stack}\tf{stack}"
        names += [{"id": 2 * stack, "kind": "frame", "text": text}]
        names += [{"id": 2 * stack + 1, "kind": "stack", "frames": [2 * stack]}]
    events: list[dict[str, Any]] = []
    for block, (size, stack, is_freed) in enumerate(blocks):
        events.append(event("alloc", block, 10 * block, size, op_id=stack, address=address[block]))
        events += [event("free", block, 10 * block + 5, size)] if is_freed else []
    ops = [op(stack, "forward", stack=2 * stack + 1) for stack in range(3)]
    return trace_of(events=events, ops=ops, names=names, spans=[step(0, 0, 10 * len(blocks))])


@settings(deadline=None)
@given(BLOCKS, st.randoms())
def test_addresses_and_line_numbers_make_no_difference(
    blocks: list[tuple[int, int, bool]], shuffler: random.Random
) -> None:
    address = [4096 * number for number in range(1, len(blocks) + 1)]
    trace = trace_with_stacks(blocks, address)
    shuffler.shuffle(address)
    assert compare_traces(trace, trace).changes == ()
    assert compare_traces(trace, trace_with_stacks(blocks, address)).changes == ()
    assert compare_traces(trace, trace_with_stacks(blocks, address, first_line=70)).changes == ()


# Limits.


def test_exit_code_tells_a_shell_script_whether_the_limits_hold(runs: dict[str, Path]) -> None:
    script = f"""
    set -e
    check="{sys.executable} -m memtrace.cli check {runs["leak"]}"
    $check --max-peak 1GiB --max-growth 2MiB
    if $check --max-growth 0.5MiB; then exit 9; else test $? -eq 1; fi
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    held, exceeded = done.stdout.split("All checks passed.")
    assert "EXCEEDED" not in held
    assert "EXCEEDED" in exceeded and "1.00 MiB" in exceeded and "test_diff_check_stalls.py" in exceeded


def test_limits_come_from_options_and_from_a_file_and_options_take_precedence(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"peak": "1GiB", "categories": {"parameter": "1MiB"}, "modules": {"Sequential": 10}}))
    done = run_memtrace("check", runs["small"], "--limits", limits, "--max-category", "parameter=4MiB", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    checks = {check["limit"]: check for check in report["limits"]}
    passed = {name: check["passed"] for name, check in checks.items()}
    assert passed == {"peak": True, "category parameter": True, "module Sequential": False}
    assert report["passed"] is False
    assert "test_diff_check_stalls.py" in checks["module Sequential"]["site"]
    assert checks["category parameter"]["actual_bytes"] == PARAMETER_BYTES
    assert checks["category parameter"]["limit_bytes"] == 4 * MIB


def test_check_prints_csv_with_the_fields_of_a_limit_check(runs: dict[str, Path]) -> None:
    (row,) = csv.DictReader(io.StringIO(run_memtrace("check", runs["small"], "--max-peak", "1GiB", "--csv").stdout))
    assert list(row) == [field.name for field in fields(LimitCheck)]
    assert (row["rank"], row["limit"], row["passed"]) == ("0", "peak", "True")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no limits given; pass --max-peak"),
        (("--max-category", "weights=1MiB"), "unknown category 'weights'; the categories are"),
        (("--max-category", "activation"), "--max-category activation: expected NAME=BYTES"),
        (("--max-category", "activation=many"), "--max-category activation=many: invalid size 'many'"),
        (
            ("--max-module", "Nope=1MiB"),
            "no block of the trace belongs to module 'Nope'; top-level modules: Sequential",
        ),
        (("--max-peak", "-5"), "'-5'"),
        (("--limits", "/nowhere.json"), "/nowhere.json: cannot read the limits: No such file"),
    ],
)
def test_wrong_limits_are_explained_with_exit_code_2(
    runs: dict[str, Path], arguments: tuple[str, ...], message: str
) -> None:
    done = run_memtrace("check", runs["small"], *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object"),
        ('{"peek": 5}', "unknown key 'peek'"),
        ('{"peak": "many"}', "invalid size 'many'"),
        ('{"categories": 5}', "'categories' must be an object"),
        ("{", "invalid JSON"),
        ('{"peak": -5}', "invalid size '-5'"),
        ('{"growth": true}', "invalid size 'True'"),
        ('{"categories": {"activation": -1}}', "invalid size '-1'"),
    ],
)
def test_wrong_files_of_limits_are_explained_with_exit_code_2(
    runs: dict[str, Path], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "limits.json").write_text(text)
    done = run_memtrace("check", runs["small"], "--limits", tmp_path / "limits.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"limits.json: {message}" in done.stderr


def test_module_that_holds_nothing_at_the_peak_passes() -> None:
    names = [{"id": 0, "kind": "module", "text": "net.early"}, {"id": 1, "kind": "module", "text": "net.late"}]
    events = [event("alloc", 0, 0, 10, op_id=0), event("free", 0, 1, 10, op_id=0), event("alloc", 1, 2, 50, op_id=1)]
    trace = trace_of(events=events, ops=[op(n, "forward", module=n) for n in range(2)], names=names)
    early, whole = check_limits(trace, MemoryLimits(module_bytes={"net.early": 5, "net": 5})).limits
    assert (early.actual_bytes, early.passed) == (0, True)
    assert (whole.actual_bytes, whole.passed) == (50, False)


def test_unknown_growth_does_not_pass() -> None:
    report = check_limits(trace_of(events=[event("alloc", 0, 0, 10)]), MemoryLimits(growth_bytes_per_step=5))
    assert [(check.actual_bytes, check.passed) for check in report.limits] == [(None, False)]
    assert not report.passed


def test_unknown_category_is_an_error() -> None:
    with pytest.raises(MemtraceError, match="unknown category 'x'"):
        check_limits(trace_of(events=[event("alloc", 0, 0, 10)]), MemoryLimits(category_bytes={"x": 1}))


# Waits for data.


def trace_with_durations(durations_ns: list[int]) -> Trace:
    """Return a trace whose steps last for ``durations_ns``."""
    starts = [sum(durations_ns[:number]) for number in range(len(durations_ns))]
    spans = [step(number, start, durations_ns[number]) for number, start in enumerate(starts)]
    return trace_of(events=[event("alloc", 0, 0, 10)], spans=spans)


def test_breakdown_is_the_difference_between_median_steps_after_warm_up() -> None:
    synthetic, cached, cold = (trace_with_durations([9000, 7000, ns, ns, ns]) for ns in (10, 30, 60))
    result = measure_stalls(cold, synthetic=synthetic, cached=cached)
    assert result.breakdown == StallBreakdown(
        clock="host", synthetic_ns=10, cached_ns=30, cold_ns=60, prep_stall_ns=20, fetch_stall_ns=30
    )


def test_a_cached_share_is_as_fast_as_the_slowest_of_computing_preprocessing_and_reading() -> None:
    # Computing takes 10, preprocessing 30, reading 90 from storage and 0 from the cache.
    result = predict_cache_shares(10, 30, 120, (0, 0.5, 1))
    assert [(step.supply_ns, step.step_ns, step.limit) for step in result.steps] == [
        (90, 90, "supply"), (45, 45, "supply"), (0, 30, "prep")
    ]  # fmt: skip
    assert result.enough_share == pytest.approx(2 / 3) and result.is_fetch_measured
    assert predict_cache_shares(10, 30, 120, (result.enough_share,)).steps[0].step_ns == 30


def test_bandwidths_replace_the_measured_time_of_reading() -> None:
    # 1 kB at 10 MB/s takes 100 us, at 1 GB/s 1 us.
    source = DataSource(1000, 10_000_000, 1_000_000_000)
    result = predict_cache_shares(5000, 2000, 9000, (0, 0.25, 1), source)
    assert [step.supply_ns for step in result.steps] == [100_000, 75_250, 1000]
    assert [step.limit for step in result.steps] == ["supply", "supply", "ingestion"]
    assert result.enough_share == pytest.approx(95 / 99) and not result.is_fetch_measured
    slow = DataSource(1000, 10_000_000, 100_000_000)
    assert predict_cache_shares(5000, 2000, 9000, (), slow).enough_share is None
    assert predict_cache_shares(200_000, 2000, 9000, (), slow).enough_share == 0
    with pytest.raises(MemtraceError, match="from 0 to 1"):
        predict_cache_shares(1, 1, 1, (1.5,))


def test_recorded_waits_are_the_time_that_the_loader_takes(tmp_path: Path) -> None:
    in_loader_ns: list[int] = []
    outside_body_ns: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(8):
            start_ns = time.perf_counter_ns()
            batch = torch.randn(200, 200).sort().values
            in_loader_ns.append(time.perf_counter_ns() - start_ns)
            yield batch

    with memtrace.record(tmp_path / "run.memtrace") as rec:
        body_end_ns = time.perf_counter_ns()
        for batch in rec.steps(loader()):
            outside_body_ns.append(time.perf_counter_ns() - body_end_ns)
            batch.sum()
            body_end_ns = time.perf_counter_ns()
    result = measure_stalls(memtrace.load(tmp_path / "run.memtrace"))
    waits_ns = [row.data_wait_ns for row in result.steps]
    assert len(waits_ns) == 8 and result.wait_share is not None
    for least_ns, wait_ns, most_ns in zip(in_loader_ns, waits_ns, outside_body_ns, strict=True):
        assert wait_ns is not None and least_ns <= wait_ns <= most_ns
    assert result.wait_share == sum(filter(None, waits_ns)) / sum(row.duration_ns for row in result.steps)


def test_command_breaks_down_stalls_of_three_recordings(runs: dict[str, Path]) -> None:
    three = (runs["large"], "--synthetic", runs["small"], "--cached", runs["longer"])
    breakdown = json.loads(run_memtrace("stalls", *three, "--json").stdout)["breakdown"]
    assert breakdown["prep_stall_ns"] == breakdown["cached_ns"] - breakdown["synthetic_ns"]
    assert breakdown["fetch_stall_ns"] == breakdown["cold_ns"] - breakdown["cached_ns"]
    text = run_memtrace("stalls", *three, "--cache-share", "0.3").stdout
    assert "fetch stall" in text and "30 %" in text
    assert len(run_memtrace("stalls", runs["small"], "--csv").stdout.splitlines()) == 1 + 6


def test_breakdown_needs_all_three_recordings(runs: dict[str, Path]) -> None:
    done = run_memtrace("stalls", runs["large"], "--cached", runs["small"])
    assert done.returncode == 2 and "--synthetic is missing" in done.stderr
    trace = trace_of(events=[event("alloc", 0, 0, 10)])
    with pytest.raises(ValueError, match="both the synthetic and the cached recording"):
        measure_stalls(trace, cached=trace)


def test_trace_without_steps_has_no_waits_and_no_breakdown() -> None:
    trace = trace_of(events=[event("alloc", 0, 0, 10)])
    result = measure_stalls(trace)
    assert (result.steps, result.wait_share, result.median_wait_ns) == ((), None, None)
    with pytest.raises(TraceError, match="the synthetic recording has no steps"):
        measure_stalls(trace, synthetic=trace, cached=trace)


def test_waits_of_a_run_without_a_loader_are_unknown(runs: dict[str, Path]) -> None:
    result = json.loads(run_memtrace("stalls", runs["small"], "--json").stdout)
    assert result["wait_share"] is None and result["steps"][0]["data_wait_ns"] is None
    text = run_memtrace("stalls", runs["small"]).stdout
    assert "time waiting for data: unknown" in text and "0 %" not in text
    summary = json.loads(run_memtrace("summary", runs["small"], "--json").stdout)
    assert summary["steps"]["data_wait_share"] is None
