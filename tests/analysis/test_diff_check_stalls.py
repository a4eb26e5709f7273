"""Two traces beside each other, limits in CI, and waits for data: on real runs and on traces made by hand."""

from __future__ import annotations

import csv
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memtrace
from memtrace.analysis.check import Limits, check
from memtrace.analysis.diff import MEASURES, diff, diff_table
from memtrace.analysis.stalls import split, stalls
from memtrace.errors import MemtraceError, TraceError
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of

MIB = 1 << 20


def run(path: Path, *, batch: int = 8, steps: int = 6, leak: bool = False) -> Path:
    torch.manual_seed(0)
    kept = []
    with memtrace.record(path) as rec:
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.randn(batch, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if leak:
                kept.append(torch.ones(MIB // 4))
            rec.step()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "small": run(folder / "small.memtrace"),
        "again": run(folder / "again.memtrace", steps=9),
        "large": run(folder / "large.memtrace", batch=16),
        "leak": run(folder / "leak.memtrace", steps=8, leak=True),
    }


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "memtrace.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_two_runs_of_one_program_do_not_differ_though_one_is_longer(runs: dict[str, Path]) -> None:
    told = diff(memtrace.load(runs["small"]), memtrace.load(runs["again"]))
    assert told.changes == ()
    assert told.totals["num_steps"] == (6, 9)
    assert all(before == after for _, before, after in told.step_peaks) and len(told.step_peaks) == 6
    said = command("diff", runs["small"], runs["again"])
    assert said.returncode == 0 and "nothing is held or allocated differently" in said.stdout


def test_a_run_of_two_steps_is_compared_with_the_same_steps(tmp_path: Path) -> None:
    # The first step makes what lasts.
    short, long = (
        trace_of(
            events=[event("alloc", 0, 0, 1000), *(event("alloc", n + 1, 10 * n + 1, 8) for n in range(steps))],
            spans=[step(n, 10 * n, 10) for n in range(steps)],
        )
        for steps in (2, 12)
    )
    assert [change for change in diff(long, short).changes if change.measure == MEASURES[1]] == []


def test_twice_the_batch_doubles_what_depends_on_it_and_nothing_else(runs: dict[str, Path]) -> None:
    changes = diff(memtrace.load(runs["small"]), memtrace.load(runs["large"])).changes
    by_category = {c.name: c for c in changes if c.grouping == "category" and c.measure.startswith("allocated")}
    assert set(by_category) <= {"activation", "temporary", "input", "unknown"}
    assert by_category["activation"].after_bytes == 2 * by_category["activation"].before_bytes  # type: ignore[operator]
    assert all(change.kind == "grew" for change in changes)
    assert {"parameter", "optimizer_state", "gradient"}.isdisjoint(by_category)
    table = diff_table(memtrace.load(runs["small"]), memtrace.load(runs["large"]))
    assert (table.change_bytes == table.after_bytes - table.before_bytes).all()
    rows = list(csv.DictReader(io.StringIO(command("diff", runs["small"], runs["large"], "--csv").stdout)))
    assert len(rows) == len(changes)
    assert len(json.loads(command("diff", runs["small"], runs["large"], "--json").stdout)["changes"]) == len(changes)


def test_what_appears_and_vanishes_is_named(runs: dict[str, Path]) -> None:
    forth = diff(memtrace.load(runs["small"]), memtrace.load(runs["leak"])).changes
    back = diff(memtrace.load(runs["leak"]), memtrace.load(runs["small"])).changes
    new = [change for change in forth if change.kind == "appeared" and change.grouping == "site"]
    assert {change.before_bytes for change in new} == {None} and MIB in {change.after_bytes for change in new}
    gone = {(change.measure, change.name) for change in back if change.kind == "vanished"}
    assert {(change.measure, change.name) for change in new} <= gone


LIVES = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2), st.booleans()), min_size=1, max_size=12)


def lives_trace(lives: list[tuple[int, int, bool]], address: list[int], line: int = 5) -> Trace:
    names = [row for stack in range(3) for row in (
        {"id": 2 * stack, "kind": "frame", "text": f"/home/me/a.py\t{line + stack}\tf{stack}"},
        {"id": 2 * stack + 1, "kind": "stack", "frames": [2 * stack]})]  # fmt: skip
    events: list[dict[str, Any]] = []
    for block, (size, stack, freed) in enumerate(lives):
        events.append(event("alloc", block, 10 * block, size, op_id=stack, address=address[block]))
        events += [event("free", block, 10 * block + 5, size)] if freed else []
    ops = [op(stack, "forward", stack=2 * stack + 1) for stack in range(3)]
    return trace_of(events=events, ops=ops, names=names, spans=[step(0, 0, 10 * len(lives))])


@given(LIVES, st.randoms())
def test_neither_addresses_nor_moved_lines_make_a_difference(
    lives: list[tuple[int, int, bool]], dice: random.Random
) -> None:
    address = [4096 * place for place in range(1, len(lives) + 1)]
    one = lives_trace(lives, address)
    dice.shuffle(address)
    assert diff(one, one).changes == ()
    assert diff(one, lives_trace(lives, address)).changes == ()
    assert diff(one, lives_trace(lives, address, line=70)).changes == ()


# Limits.


def test_a_shell_script_passes_and_fails_by_the_exit_code(runs: dict[str, Path]) -> None:
    script = f"""
    set -e
    check="{sys.executable} -m memtrace.cli check {runs["leak"]}"
    $check --max-peak 1GiB --max-growth 2MiB > /dev/null
    if $check --max-growth 0.5MiB; then exit 9; else test $? -eq 1; fi
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "BROKEN" in done.stdout and "1.0 MiB" in done.stdout and "test_diff_check_stalls.py" in done.stdout


def test_limits_by_flag_and_by_file(runs: dict[str, Path], tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"peak": "1GiB", "categories": {"parameter": "1MiB"}, "modules": {"Sequential": 10}}))
    done = command("check", runs["small"], "--limits", limits, "--max-category", "parameter=4MiB", "--json")
    assert done.returncode == 1
    rows = {row["limit"]: row for row in json.loads(done.stdout)["limits"]}
    assert (rows["peak"]["passed"], rows["category parameter"]["passed"], rows["module Sequential"]["passed"]) == (
        True,
        True,
        False,
    )
    assert "test_diff_check_stalls.py" in rows["module Sequential"]["site"]
    assert rows["category parameter"]["found_bytes"] == 4 * (256 * 1024 * 2 + 1024 + 256)
    assert command("check", runs["small"], "--max-peak", "1GiB", "--csv").stdout.startswith("rank,limit")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to check"),
        (("--max-category", "weights=1MiB"), "'weights' is no category"),
        (("--max-category", "activation"), "is no NAME=BYTES"),
        (("--max-category", "activation=many"), "invalid size"),
        (("--max-module", "Nope=1MiB"), "no module Nope holds anything"),
        (("--max-peak", "-5"), "invalid size"),
        (("--limits", "/nowhere.json"), "/nowhere.json cannot be read"),
    ],
)
def test_limits_that_make_no_sense_are_exit_code_2(
    runs: dict[str, Path], arguments: tuple[str, ...], says: str
) -> None:
    done = command("check", runs["small"], *arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text",
    ["[]", '{"peek": 5}', '{"peak": "many"}', '{"categories": 5}', "{", '{"peak": -5}', '{"growth": true}',
     '{"categories": {"activation": -1}}'],
)  # fmt: skip
def test_files_of_limits_that_are_none_are_refused(runs: dict[str, Path], tmp_path: Path, text: str) -> None:
    (tmp_path / "limits.json").write_text(text)
    done = command("check", runs["small"], "--limits", tmp_path / "limits.json")
    assert done.returncode == 2 and "limits.json" in done.stderr and "Traceback" not in done.stderr


def test_a_module_that_holds_nothing_at_the_peak_passes() -> None:
    names = [{"id": 0, "kind": "module", "text": "net.early"}, {"id": 1, "kind": "module", "text": "net.late"}]
    rows = [event("alloc", 0, 0, 10, op_id=0), event("free", 0, 1, 10, op_id=0), event("alloc", 1, 2, 50, op_id=1)]
    trace = trace_of(events=rows, ops=[op(n, "forward", module=n) for n in range(2)], names=names)
    early, whole = check(trace, Limits(modules={"net.early": 5, "net": 5}))
    assert (early.found_bytes, early.passed) == (0, True)
    assert (whole.found_bytes, whole.passed) == (50, False)


def test_growth_that_cannot_be_told_does_not_pass() -> None:
    (verdict,) = check(trace_of(events=[event("alloc", 0, 0, 10)]), Limits(growth=5))
    assert verdict.found_bytes is None and not verdict.passed
    with pytest.raises(MemtraceError, match="is no category"):
        check(trace_of(events=[event("alloc", 0, 0, 10)]), Limits(categories={"x": 1}))


# Waits for data.

FETCH, PREPARE, COMPUTE, ROUNDS = 0.03, 0.02, 0.01, 8


def job(path: Path, wait: float) -> Trace:
    def loader() -> Iterator[torch.Tensor]:
        for _ in range(ROUNDS):
            time.sleep(wait)
            yield torch.ones(4)

    with memtrace.record(path) as rec:
        for batch in rec.steps(loader()):
            time.sleep(COMPUTE)
            batch.sum()
    return memtrace.load(path)


def test_stalls_are_what_the_loader_slept(tmp_path: Path) -> None:
    waits = {"synthetic": 0.0, "cached": PREPARE, "cold": PREPARE + FETCH}
    jobs = {name: job(tmp_path / f"{name}.memtrace", wait) for name, wait in waits.items()}
    told = split(jobs["synthetic"], jobs["cold"], jobs["cached"])
    # Sleeping is never shorter than asked for; on a busy machine it is longer, the one run more than the other.
    assert 0.3 * PREPARE < told.prep_stall_ns / 1e9 < 5 * PREPARE
    assert 0.3 * FETCH < told.fetch_stall_ns / 1e9 < 5 * FETCH
    one = stalls(jobs["cold"])
    assert len(one.steps) == ROUNDS and one.share is not None
    assert all((row.data_wait_ns or 0) >= (PREPARE + FETCH) * 1e9 for row in one.steps)
    assert 0.5 < one.share < 1
    said = command(
        "stalls",
        tmp_path / "cold.memtrace",
        "--synthetic",
        tmp_path / "synthetic.memtrace",
        "--cached",
        tmp_path / "cached.memtrace",
    )
    assert said.returncode == 0 and "fetch stall" in said.stdout
    assert json.loads(command("stalls", tmp_path / "cold.memtrace", "--json").stdout)["split"] is None
    assert len(command("stalls", tmp_path / "cold.memtrace", "--csv").stdout.splitlines()) == ROUNDS + 1
    alone = command("stalls", tmp_path / "cold.memtrace", "--cached", tmp_path / "cached.memtrace")
    assert alone.returncode == 2 and "go together" in alone.stderr


def test_without_steps_nothing_is_known_of_waits() -> None:
    trace = trace_of(events=[event("alloc", 0, 0, 10)])
    assert stalls(trace).share is None and stalls(trace).median_wait_ns is None
    with pytest.raises(TraceError, match="the synthetic recording has no steps"):
        split(trace, trace, trace)


def test_waits_that_were_not_seen_are_unknown(runs: dict[str, Path]) -> None:
    """The program makes its data itself: nobody can tell how long it waits for them."""
    told = json.loads(command("stalls", runs["small"], "--json").stdout)
    assert told["share"] is None and told["steps"][0]["data_wait_ns"] is None
    said = command("stalls", runs["small"]).stdout
    assert "not seen" in said and "0.0 %" not in said
    assert "waiting for data unknown" in " ".join(command("summary", runs["small"]).stdout.split())


def test_findings_print_as_json_and_csv(runs: dict[str, Path]) -> None:
    told = json.loads(command("findings", runs["leak"], "--json").stdout)["devices"][0]
    assert told["findings"][0]["pattern"] == "unused_allocation" or told["findings"][0]["pattern"] == "leak"
    rows = list(csv.DictReader(io.StringIO(command("findings", runs["leak"], "--csv").stdout)))
    assert len(rows) == len(told["findings"]) and rows[0]["device"] == "cpu"
    assert "a line mends it" in command("findings", runs["leak"]).stdout
