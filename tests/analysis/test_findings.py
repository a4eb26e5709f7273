"""Wasted memory in training loops: hand-made traces, real programs, and predicted against measured peaks."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from memtrace.dashboards.findings import findings_table as page_table
from torch import nn

import memtrace
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.findings import Finding, find_device_waste, findings_table, predict_peak_with_fixes
from memtrace.analysis.pattern_catalog import ALL_PATTERNS
from memtrace.analysis.peak import find_peak
from memtrace.analysis.windows import step_window
from tests.analysis.short_traces import Act, find_waste, findings_of, trace_of_acts, trace_of_steps
from tests.builders import op, step
from tests.cli.runner import run_memtrace
from tests.conftest import DefectTraces

THREE_DEFECTS = {"retained graph", "gradients kept through forward", "unused allocation"}


def test_block_that_every_step_leaves_behind_is_a_leak() -> None:
    (finding,) = findings_of(trace_of_steps(12, freed=False), "leak")
    assert (finding.num_blocks, finding.wasted_bytes, finding.saved_bytes) == (12, 12_000, 11_000)
    assert findings_of(trace_of_steps(12, freed=True), "leak") == []


def test_leaks_are_skipped_in_a_trace_of_few_steps() -> None:
    skipped = find_waste(trace_of_steps(4, freed=False)).skipped_patterns
    assert [(part.patterns, part.reason) for part in skipped] == [
        (("leak", "retained graph", "graph kept across steps"), "at least 6 steps are needed")
    ]


def test_leak_of_blocks_that_autograd_recorded_is_a_retained_graph() -> None:
    findings = find_waste(trace_of_steps(12, freed=False, sequence_nr=5)).findings
    assert [(finding.pattern, finding.pattern_class) for finding in findings] == [("retained graph", "leak")]


def test_leaks_are_found_without_accesses() -> None:
    acts: list[Act] = [("alloc", 2 * number, number) for number in range(12)]
    trace = trace_of_acts(acts, spans=[step(number, 10 * number, 10) for number in range(12)])
    (finding,) = findings_of(trace, "leak")
    # A block that is never accessed is not needed after its allocation.
    assert (finding.num_blocks, finding.saved_bytes) == (12, 12_000)


def test_without_accesses_all_other_patterns_are_skipped() -> None:
    waste = find_waste(trace_of_acts([("alloc", 0, -1), ("alloc", 1, -1), ("free", 0, -1)]))
    assert waste.findings == () and waste.lower_bound_bytes is None
    skipped = {name for part in waste.skipped_patterns for name in part.patterns}
    assert skipped == {pattern.name for pattern in ALL_PATTERNS}
    assert waste.skipped_patterns[0].reason == "the trace does not record reads and writes"


def gradient_trace(*, freed: bool) -> memtrace.Trace:
    """Return three steps in which a gradient is freed after the optimizer, or set to zero and written again."""
    acts: list[Act] = []
    for number in range(3):
        activation, gradient, first_op = 101 + 2 * number, (2 * number if freed else 0), 10 * number
        acts += [("alloc", activation, first_op), ("write", activation, first_op), ("free", activation, first_op)]
        acts += [("alloc", gradient, first_op + 1)] if freed or number == 0 else [("read", gradient, first_op + 1)]
        acts += [("write", gradient, first_op + 1), ("read", gradient, first_op + 2)]
        acts += [("free", gradient, -1)] if freed else [("write", gradient, first_op + 3)]
    phases = ("forward", "backward", "optimizer", "other")
    ops = [op(10 * number + k, phase, name=2, stack=1) for number in range(3) for k, phase in enumerate(phases)]
    gradients = (0, 2, 4) if freed else (0,)
    return trace_of_acts(ops=ops, acts=acts, labels=[{"block_id": g, "category": "gradient"} for g in gradients])


def test_gradients_that_are_set_to_zero_are_kept_through_forward() -> None:
    trace = gradient_trace(freed=False)
    (finding,) = findings_of(trace, "gradients kept through forward")
    assert (finding.wasted_bytes, finding.covers_peak, finding.num_blocks) == (1000, True, 1)
    # Without it, the forward of the next step has the memory to itself.
    assert finding.peak_if_fixed_bytes < find_waste(trace).peak_bytes


def test_gradients_that_are_freed_are_not_kept_through_forward() -> None:
    assert findings_of(gradient_trace(freed=True), "gradients kept through forward") == []


FORWARD_ONLY: list[Act] = [
    ("alloc", 0, 0),
    ("write", 0, 0),
    ("read", 0, 1),
    ("alloc", 1, 2),
    ("write", 1, 2),
    ("read", 1, 3),
]
FREE_BOTH: list[Act] = [("free", 0, -1), ("free", 1, -1)]
RECORDED_OPS = [op(number, "forward", name=2, stack=1, sequence_nr=number) for number in range(4)]


def test_graph_that_no_backward_runs_through_is_a_forward_without_backward() -> None:
    recorded = trace_of_acts([*FORWARD_ONLY, *FREE_BOTH], ops=RECORDED_OPS)
    assert find_waste(recorded).findings[0].pattern == "forward without backward"
    not_recorded = trace_of_acts([*FORWARD_ONLY, *FREE_BOTH])
    assert findings_of(not_recorded, "forward without backward") == []


def test_node_between_two_nodes_that_ran_counts_as_run() -> None:
    # Backward runs nodes 3 and 0; the nodes between them need no operator of their own.
    backward = [op(4 + n, "backward", name=2, stack=1, sequence_nr=3 * (1 - n)) for n in range(2)]
    trace = trace_of_acts([*FORWARD_ONLY, ("read", 1, 4), *FREE_BOTH], ops=[*RECORDED_OPS, *backward])
    assert findings_of(trace, "forward without backward") == []


@pytest.mark.parametrize("evaluates", [False, True])
def test_evaluation_under_autograd_is_a_forward_without_backward(tmp_path: Path, evaluates: bool) -> None:
    model = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 500))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compute_loss(tokens: torch.Tensor) -> torch.Tensor:
        # No backward reads the logits, so they are freed before it.
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    validation_loss = torch.zeros(())
    with memtrace.record(tmp_path / "run.memtrace"):
        for _ in range(6):
            tokens = torch.randint(500, (8, 33))
            compute_loss(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                validation_loss = compute_loss(tokens)  # its graph stays alive through the next step
    waste = find_device_waste(memtrace.load(tmp_path / "run.memtrace"), "cpu")
    graphs = [finding for finding in waste.findings if finding.pattern == "forward without backward"]
    assert bool(graphs) == evaluates == validation_loss.requires_grad
    assert all(finding.saved_bytes > 500_000 for finding in graphs[:1])


@pytest.mark.parametrize("detached", [False, True])
def test_losses_in_a_list_that_dies_with_its_function_are_a_retained_graph(tmp_path: Path, detached: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> torch.Tensor:
        losses, outputs = [], []
        for number in range(24):
            output = model(torch.randn(64, 64))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(output.detach())
            if number % 3 == 2:
                loss = model(torch.randn(64, 64)).square().mean()
                losses.append(loss.detach() if detached else loss)
        return torch.cat(outputs)  # the outputs are used at the end, so they are not leaked

    with memtrace.record(tmp_path / "run.memtrace"):
        train()
    waste = find_device_waste(memtrace.load(tmp_path / "run.memtrace"), "cpu")
    leaks = [finding for finding in waste.findings if finding.pattern_class == "leak"]
    assert [finding.pattern for finding in leaks] == ([] if detached else ["retained graph"])
    assert all(finding.saved_bytes > 500_000 for finding in leaks)


def test_defects_come_first_and_their_predicted_savings_are_those_of_the_fixed_program(
    defect_traces: DefectTraces,
) -> None:
    trace, fixed = memtrace.load(defect_traces.defects), memtrace.load(defect_traces.fixed)
    waste = find_device_waste(trace, "cpu")
    first_three = waste.findings[:3]
    assert {finding.pattern for finding in first_three} == THREE_DEFECTS
    assert all(finding.site is not None and "defects.py" in finding.site for finding in first_three)
    measured = find_peak(fixed, "cpu").requested.bytes
    assert predict_peak_with_fixes(trace, waste, first_three) == pytest.approx(measured, rel=0.02)
    assert waste.peak_bytes > 1.5 * measured


def test_fixed_program_has_none_of_the_defects(defect_traces: DefectTraces) -> None:
    findings = find_device_waste(memtrace.load(defect_traces.fixed), "cpu").findings
    saving = {finding.pattern for finding in findings if finding.saved_bytes > 0}
    assert not saving & {*THREE_DEFECTS, "leak"}


def test_memory_from_before_the_recording_is_not_an_unused_allocation(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    earlier = [torch.ones(1 << 20)]  # as the garbage of earlier code, which any collection may free
    with memtrace.record(tmp_path / "run.memtrace"):
        for _ in range(4):
            model(torch.randn(64, 64)).square().mean().backward()
        earlier.clear()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert find_peak(trace, "cpu").requested.bytes > 4 << 20
    assert "unused allocation" not in {finding.pattern for finding in find_device_waste(trace, "cpu").findings}


def test_workspace_of_an_operator_is_not_an_unused_allocation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    with memtrace.record(tmp_path / "run.memtrace"):
        for _ in range(3):
            model(torch.randn(2, 64, 16, 16)).square().mean().backward()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert (blocks(trace).category == CATEGORY["workspace"]).any()
    assert "unused allocation" not in {finding.pattern for finding in find_device_waste(trace, "cpu").findings}


def test_single_line_fixes_come_first_and_then_the_largest_savings(defect_traces: DefectTraces) -> None:
    findings = find_device_waste(memtrace.load(defect_traces.defects), "cpu").findings
    order = [(not f.saved_bytes, not f.is_single_line_fix, -f.saved_bytes, -f.idle_byte_seconds) for f in findings]
    assert order == sorted(order)


def test_table_has_one_row_per_finding(defect_traces: DefectTraces) -> None:
    trace = memtrace.load(defect_traces.defects)
    waste, table = find_device_waste(trace, "cpu"), findings_table(trace)
    assert len(table) == len(waste.findings)
    assert (table.peak_if_fixed_bytes + table.saved_bytes == waste.peak_bytes).all()


def test_command_prints_the_same_findings_as_text_json_and_csv(defect_traces: DefectTraces) -> None:
    (device,) = json.loads(run_memtrace("findings", defect_traces.defects, "--json").stdout)["devices"]
    findings = device["findings"]
    assert {finding["pattern"] for finding in findings[:3]} == THREE_DEFECTS
    rows = list(csv.DictReader(io.StringIO(run_memtrace("findings", defect_traces.defects, "--csv").stdout)))
    assert list(rows[0]) == ["device", *(field.name for field in fields(Finding))]
    assert [(row["pattern"], int(row["saved_bytes"])) for row in rows] == [
        (finding["pattern"], finding["saved_bytes"]) for finding in findings
    ]
    text = " ".join(run_memtrace("findings", defect_traces.defects).stdout.split())
    assert "All single-line fixes together: " in text and "No schedule can go below " in text
    assert "Single-line fixes Retained graph: Store loss.item()" in text


def test_command_leaves_out_findings_below_the_given_size(defect_traces: DefectTraces) -> None:
    done = run_memtrace("findings", defect_traces.defects, "--json", "--min-bytes", "4MiB")
    (device,) = json.loads(done.stdout)["devices"]
    assert device["min_bytes"] == 4 << 20 and device["findings"]
    assert all(finding["wasted_bytes"] >= 4 << 20 for finding in device["findings"])
    assert run_memtrace("findings", defect_traces.defects, "--min-bytes", "many").returncode == 2


def test_page_names_the_patterns_that_were_not_checked() -> None:
    table = page_table(trace_of_acts([("alloc", 0, -1), ("free", 0, -1)]), "cpu")
    assert table is not None and not table.rows
    assert table.note.startswith("No wasted memory was found. Not checked: unused allocation, ")


@pytest.mark.parametrize("offset", [0, 10**9])
@pytest.mark.parametrize("factor", [1, 10**6])
def test_findings_do_not_depend_on_the_ids_of_operator_calls(offset: int, factor: int) -> None:
    # In a window of a long trace, the ids are large and far apart.
    acts: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("alloc", 1, 1), ("write", 1, 1), ("free", 1, -1)]
    acts += [("read", 0, 2), ("alloc", 3, 3), ("write", 3, 3), ("read", 3, 4), *FREE_BOTH[:1]]
    renumbered = [(kind, block, offset + factor * op_id if op_id >= 0 else -1) for kind, block, op_id in acts]
    assert find_waste(trace_of_acts(renumbered)) == find_waste(trace_of_acts(acts))


def test_block_that_may_be_used_outside_a_window_is_not_unused(defect_traces: DefectTraces) -> None:
    # The graphs of earlier steps are live, and not accessed, in the window.
    window = step_window(memtrace.load(defect_traces.defects), 6, 9)
    waste = find_device_waste(window, "cpu")
    assert "unused allocation" not in {finding.pattern for finding in waste.findings}
    assert "gradients kept through forward" in {finding.pattern for finding in waste.findings}
    assert [part.patterns for part in waste.skipped_patterns] == [("leak", "retained graph", "graph kept across steps")]
