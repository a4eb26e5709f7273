"""Late deallocations and redundant allocations count only where the program could do otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import memtrace
from memtrace.analysis.findings import Finding, find_device_waste
from tests.analysis.short_traces import NAMES, Act, findings_of, trace_of_acts


def findings_in(program: Callable[[], object], folder: Path, pattern: str) -> list[Finding]:
    """Return the findings of a pattern in a program that save something."""
    with memtrace.record(folder / "run.memtrace"):
        program()
    waste = find_device_waste(memtrace.load(folder / "run.memtrace"), "cpu")
    return [finding for finding in waste.findings if finding.pattern == pattern and finding.saved_bytes]


def doubled_sum(x: torch.Tensor) -> torch.Tensor:
    doubled = torch.exp(x)
    return (torch.cos(doubled) * torch.sin(doubled)).sum()


def test_the_argument_of_a_function_is_held_until_the_statement_ends(tmp_path: Path) -> None:
    def program() -> None:
        for _ in range(6):
            x = torch.randn(256, 256)
            doubled_sum(x)  # the peak is in the call, after the last use of x

    late = findings_in(program, tmp_path, "late deallocation")
    assert [finding.site for finding in late if "doubled_sum" not in (finding.site or "")] == []


def test_a_variable_that_is_held_past_the_statement_of_its_last_use_is_late(tmp_path: Path) -> None:
    def program() -> None:
        for _ in range(6):
            x = torch.randn(256, 256)
            x.sum()
            doubled_sum(torch.randn(256, 256))

    assert findings_in(program, tmp_path, "late deallocation")


def test_elements_of_a_data_set_are_not_late(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(256, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [torch.randn(64, 256) for _ in range(8)]
        for x in data:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert findings_in(program, tmp_path, "late deallocation") == []


def test_what_a_retained_graph_holds_after_backward_is_not_a_late_variable(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(64, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.zeros(())
        for _ in range(6):
            x = torch.randn(128, 64)
            loss = nn.functional.cross_entropy(model(x), torch.zeros(128, dtype=torch.long))
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            torch.randn(512, 512)
        del loss

    findings = findings_in(program, tmp_path, "late deallocation")
    assert not [finding for finding in findings if finding.wasted_bytes >= 128 * 512 * 4]


REUSABLE: list[Act] = [
    ("alloc", 0, 0),
    ("write", 0, 0),
    ("read", 0, 1),
    ("alloc", 2, 1),
    ("write", 2, 1),
    ("free", 0, -1),
    ("read", 2, 2),
    ("free", 2, -1),
]


def names_with(operator: str, *frames: str) -> list[dict[str, object]]:
    """Return the names of a short trace whose operator and call stack (innermost frame first) are given."""
    rows = [{"id": 10 + number, "kind": "frame", "text": frame} for number, frame in enumerate(frames)]
    stack = {"id": 1, "kind": "stack", "frames": [row["id"] for row in rows]}
    return [*rows, stack, {"id": 2, "kind": "operator", "text": operator}, NAMES[3]]


def test_only_operators_with_an_in_place_form_allocate_redundantly() -> None:
    user = "/home/me/train.py\t7\ttrain"
    assert findings_of(trace_of_acts(REUSABLE, names=names_with("aten::relu", user)), "redundant allocation")
    for operator in ("aten::_log_softmax", "aten::mm", "aten::convolution"):
        trace = trace_of_acts(REUSABLE, names=names_with(operator, user))
        assert findings_of(trace, "redundant allocation") == [], operator


def test_lines_of_libraries_are_not_the_users_to_change_except_modules_with_an_option() -> None:
    user, root = "/home/me/train.py\t7\ttrain", "/usr/lib/python3/site-packages/torch/nn"
    call = f"{root}/modules/module.py\t1789\tModule._call_impl"
    wrapper = f"{root}/functional.py\t1700\trelu"
    module = f"{root}/modules/activation.py\t100\tReLU.forward"
    library = f"{root}/modules/transformer.py\t900\tTransformerEncoderLayer._ff_block"
    for frames, is_choice in (((wrapper, module, call, user), True), ((wrapper, library, call, user), False)):
        trace = trace_of_acts(REUSABLE, names=names_with("aten::relu", *frames))
        assert bool(findings_of(trace, "redundant allocation")) == is_choice
