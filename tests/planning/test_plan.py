"""Plans as values: JSON, damaged files, and comparison."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from memtrace.cli import cli

from memtrace.errors import MemtraceError
from memtrace.planning.actions import Offload, OffloadedTensor, Recompute, Spill
from memtrace.planning.compare import compare_plans
from memtrace.planning.plan import Plan, StepCost, read_plan, write_plan

NAMES = st.text("abc.01", min_size=1, max_size=8)
SIZES = st.integers(0, 1 << 50)
ACTIONS = st.one_of(
    st.builds(Recompute, st.lists(NAMES).map(tuple)),
    st.builds(Offload, st.lists(st.builds(OffloadedTensor, NAMES, st.integers(0, 99), SIZES)).map(tuple), NAMES),
    st.builds(Spill, st.lists(st.lists(NAMES).map(tuple)).map(tuple), SIZES, st.booleans()),
)
COSTS = st.builds(StepCost, SIZES, st.none() | SIZES)
PLANS = st.builds(Plan, st.just("cpu"), st.lists(ACTIONS).map(tuple), COSTS, COSTS, st.lists(NAMES).map(tuple))


@given(plan=PLANS)
def test_a_written_plan_reads_as_the_same_value(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan


def write_json(path: Path, **changes: object) -> Path:
    plan = Plan("cpu", (Recompute(("blocks.0",)),), StepCost(10, 5), StepCost(8, 6))
    path.write_text(json.dumps({**asdict(plan), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "memtrace"}, "is not a plan"),
        ({"plan_version": 99}, "has plan version 99"),
        ({"device": 3}, "device"),
        ({"actions": [{"kind": "explode"}]}, "explode"),
        ({"actions": [{"kind": "recompute"}]}, "modules"),
        ({"actions": [{"kind": "recompute", "modules": [1]}]}, "modules"),
        ({"actions": [{"kind": ["recompute"], "modules": []}]}, "kind"),
        ({"actions": "recompute"}, "actions"),
        ({"predicted": {"peak_bytes": -1, "step_ns": None}}, "peak_bytes"),
        ({"predicted": {"step_ns": None}}, "peak_bytes"),
        ({"recorded": None}, "recorded"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = write_json(tmp_path / "plan.json", **changes)
    with pytest.raises(MemtraceError, match=reason) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"format": NaN}', b"[" * 100_000])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(MemtraceError, match=str(path)):
        read_plan(path)


def test_a_missing_plan_and_a_folder_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="no such file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(MemtraceError, match="cannot be written"):
        write_plan(Plan("cpu", (), StepCost(1, None), StepCost(1, None)), tmp_path / "missing" / "plan.json")


def test_plans_differ_by_the_modules_that_only_one_of_them_changes() -> None:
    start = StepCost(10, 5)
    one = Plan("cpu", (Recompute(("a", "b")),), start, StepCost(8, 6))
    other = Plan("cpu", (Recompute(("b", "c")), Spill((("a",),), 0)), start, StepCost(7, 7))
    difference = compare_plans(one, other)
    assert difference.only_in_plan == ("Recompute a in backward.",)
    assert difference.only_in_other == (
        "Recompute c in backward.",
        "Spill the model in 1 shard without a buffer, and recompute its modules in backward.",
    )
    assert difference.note is None
    assert compare_plans(one, one).only_in_plan == ()


def test_plans_of_different_steps_or_devices_say_so() -> None:
    one = Plan("cpu", (), StepCost(10, 5), StepCost(8, 6))
    assert compare_plans(one, Plan("cpu", (), StepCost(11, 5), StepCost(8, 6))).note is not None
    note = compare_plans(one, Plan("cuda:0", (), StepCost(10, 5), StepCost(8, 6))).note
    assert note is not None and "cuda:0" in note


def test_show_and_diff_print_plans(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write_plan(Plan("cpu", (Recompute(("a",)),), StepCost(1 << 20, 5), StepCost(1 << 19, None), ("Assumed.",)), one)
    write_plan(Plan("cpu", (), StepCost(1 << 20, 5), StepCost(1 << 20, 5)), other)
    shown = CliRunner().invoke(cli, ["plan", "show", str(one)])
    assert shown.exit_code == 0
    assert "Recompute a in backward." in shown.output
    assert "512 KiB less" in shown.output
    assert "Assumed." in shown.output
    copy = tmp_path / "copy.json"
    copy.write_text(CliRunner().invoke(cli, ["plan", "show", str(one), "--json"]).output)
    assert read_plan(copy) == read_plan(one), "what --json prints is a plan, too"
    compared = CliRunner().invoke(cli, ["plan", "diff", str(one), str(other)])
    assert compared.exit_code == 0
    assert "Recompute a in backward." in compared.output
