"""Each pattern in its smallest form and a near miss; predicted peaks against brute force and against a mended program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from defects import train
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.dashboards import findings as needless
from torch import nn

import memtrace
from memtrace.analysis.block_accesses import most_bytes_of_an_operator
from memtrace.analysis.counterfactual import FOREVER, Absences, merged, peak_without
from memtrace.analysis.findings import DeviceFindings, Finding, findings, findings_table
from memtrace.analysis.peak import find_peak
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of

FRAME = [
    {"id": 0, "kind": "frame", "text": "/home/me/train.py\t7\ttrain"},
    {"id": 1, "kind": "stack", "frames": [0]},
    {"id": 2, "kind": "operator", "text": "aten::relu"},
    {"id": 3, "kind": "operator", "text": "aten::clone"},
]
Act = tuple[str, int, int]


def life(acts: list[Act], *, ops: list[dict[str, object]] | None = None, **tables: object) -> Trace:
    """Events as (kind, block, operator), block b being of 1000 + b bytes unless it is even: those are of 1000."""
    size = {block: 1000 + block % 2 * block for _, block, _ in acts}
    rows = [
        event(
            kind,
            block,
            10 * at,
            size[block] if kind not in ("read", "write") else None,
            op_id=number if number >= 0 else None,
        )
        for at, (kind, block, number) in enumerate(acts)
    ]
    numbers = sorted({number for *_, number in acts if number >= 0})
    told = ops or [op(number, "forward", name=2, stack=1) for number in numbers]
    return trace_of(events=rows, ops=told, names=FRAME, **tables)  # type: ignore[arg-type]


def found(trace: Trace) -> DeviceFindings:
    return findings(trace, "cpu", min_bytes=1)


def of(trace: Trace, pattern: str) -> list[Finding]:
    return [one for one in found(trace).findings if one.pattern == pattern and one.name is None]


def test_early_allocation_needs_a_free_in_between() -> None:
    early = [("alloc", 0, 0), ("alloc", 1, 1), ("write", 1, 1), ("free", 1, -1), ("write", 0, 2), ("free", 0, -1)]
    (one,) = of(life(early), "early_allocation")
    assert (one.bytes, one.covers_peak, one.peak_if_mended_bytes, one.saved_bytes) == (1000, True, 1001, 1000)
    assert one.site == "me/train.py:7 train"
    miss = [("alloc", 0, 0), ("alloc", 1, 1), ("write", 1, 1), ("write", 0, 2), ("free", 1, -1), ("free", 0, -1)]
    assert of(life(miss), "early_allocation") == []


def test_filling_a_block_from_nothing_is_no_use_of_it() -> None:
    between: list[Act] = [("alloc", 1, 1), ("write", 1, 1), ("free", 1, -1)]
    ends: list[Act] = [("read", 0, 2), ("free", 0, -1)]
    (one,) = of(life([("alloc", 0, 0), ("write", 0, 0), *between, *ends]), "early_allocation")
    assert (one.bytes, one.peak_if_mended_bytes, one.saved_bytes) == (1000, 1001, 1000)
    # An operator that reads something has it at hand only then: it cannot simply move.
    reads: list[Act] = [("baseline", 2, -1), ("alloc", 0, 0), ("read", 2, 0), ("write", 0, 0)]
    assert of(life([*reads, *between, *ends]), "early_allocation") == []
    assert of(life([("alloc", 0, 0), ("write", 0, 0), *ends, *between]), "early_allocation") == []


def test_late_deallocation_needs_an_allocation_in_between() -> None:
    made: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("read", 0, 1)]
    other: list[Act] = [("alloc", 1, 2), ("write", 1, 2), ("read", 1, 3)]
    frees: list[Act] = [("free", 0, -1), ("free", 1, -1)]
    (one,) = of(life([*made, *other, *frees]), "late_deallocation")
    assert (one.saved_bytes, one.peak_if_mended_bytes) == (1000, 1001)
    # Its operator still runs when the other is made: it is needed until then.
    in_one_call: list[Act] = [("alloc", 1, 1), ("write", 1, 1), ("read", 1, 3)]
    assert of(life([*made, *in_one_call, *frees]), "late_deallocation") == []
    assert of(life([*made, frees[0], *other, frees[1]]), "late_deallocation") == []


def test_temporary_idleness_needs_many_operators_in_between() -> None:
    def acts(between: int) -> list[Act]:
        inner = [
            act
            for n in range(between)
            for act in (("alloc", 1 + 2 * n, 1 + n), ("write", 1 + 2 * n, 1 + n), ("free", 1 + 2 * n, 1 + n))
        ]
        rest = [
            act
            for n in range(40)
            for act in (
                ("alloc", 201 + 2 * n, 100 + n),
                ("write", 201 + 2 * n, 100 + n),
                ("free", 201 + 2 * n, 100 + n),
            )
        ]
        made = [("baseline", 300, -1), ("alloc", 0, 0), ("read", 300, 0), ("write", 0, 0)]
        return [*made, *inner, ("read", 0, 90), ("free", 0, -1), *rest]  # type: ignore[list-item]

    (one,) = of(life(acts(8)), "temporary_idleness")
    assert one.bytes == 1000 and one.covers_peak
    assert of(life(acts(2)), "temporary_idleness") == []


def test_unused_allocation_is_read_by_nobody() -> None:
    (one,) = of(
        life([("alloc", 0, 0), ("write", 0, 0), ("alloc", 1, 1), ("write", 1, 1), ("read", 1, 2)]), "unused_allocation"
    )
    assert (one.bytes, one.saved_bytes, one.num_blocks) == (1000, 1000, 1)
    assert of(life([("alloc", 0, 0), ("write", 0, 0), ("read", 0, 1)]), "unused_allocation") == []
    assert of(life([("alloc", 0, 0), ("write", 0, 1), ("alloc", 1, 2), ("read", 1, 3)]), "unused_allocation") == []


def test_a_block_older_than_the_trace_that_nobody_touches_is_unused() -> None:
    (one,) = of(life([("baseline", 0, -1), ("alloc", 1, 1), ("read", 1, 2)]), "unused_allocation")
    assert (one.saved_bytes, one.peak_if_mended_bytes) == (1000, 1001)


def test_dead_write_is_overwritten_unread() -> None:
    (one,) = of(life([("alloc", 0, 0), ("write", 0, 0), ("write", 0, 1), ("read", 0, 2)]), "dead_write")
    assert (one.bytes, one.saved_bytes) == (1000, 0)
    assert (
        of(life([("alloc", 0, 0), ("write", 0, 0), ("read", 0, 1), ("write", 0, 1), ("read", 0, 2)]), "dead_write")
        == []
    )


def test_redundant_allocation_takes_the_place_of_one_of_its_size() -> None:
    acts = [
        ("alloc", 0, 0),
        ("write", 0, 0),
        ("read", 0, 1),
        ("alloc", 2, 1),
        ("write", 2, 1),
        ("free", 0, -1),
        ("read", 2, 2),
        ("free", 2, -1),
    ]
    (one,) = of(life(acts), "redundant_allocation")
    assert (one.bytes, one.saved_bytes, one.peak_if_mended_bytes) == (1000, 1000, 1000)
    other_size = [(kind, 3 if block == 2 else block, number) for kind, block, number in acts]
    assert of(life(other_size), "redundant_allocation") == []
    read_later = [*acts[:5], ("read", 0, 3), *acts[5:]]
    assert of(life(read_later), "redundant_allocation") == []


def test_a_copy_beside_its_only_source_is_a_double_copy() -> None:
    acts = [
        ("alloc", 0, 0),
        ("write", 0, 0),
        ("read", 0, 1),
        ("alloc", 2, 1),
        ("write", 2, 1),
        ("free", 0, -1),
        ("read", 2, 2),
        ("free", 2, -1),
    ]
    ops = [op(0, "forward", name=2, stack=1), op(1, "forward", name=3, stack=1), op(2, "forward", name=2, stack=1)]
    names = [one.name for one in found(life(acts, ops=ops)).findings]
    assert "double copy" in names
    assert "double copy" not in [one.name for one in found(life(acts)).findings]


def leaking(steps: int, keep: bool, sequence: int | None = None) -> Trace:
    acts: list[Act] = []
    for number in range(steps):
        acts += [("alloc", 2 * number, number), ("write", 2 * number, number), ("read", 2 * number, number)]
        acts += [] if keep else [("free", 2 * number, -1)]
    width = 10 * len(acts) // steps
    ops = [op(number, "forward", name=2, stack=1, sequence_nr=sequence) for number in range(steps)]
    return life(acts, ops=ops, spans=[step(n, n * width, width) for n in range(steps)])


def test_a_leak_is_left_behind_in_step_after_step() -> None:
    (one,) = of(leaking(12, keep=True), "leak")
    assert (one.num_blocks, one.bytes, one.saved_bytes) == (12, 12_000, 11_000)
    assert not of(leaking(12, keep=False), "leak")
    assert any(reason.startswith("leak: it takes") for reason in found(leaking(4, keep=True)).not_judged)


def test_a_leak_of_what_autograd_recorded_is_a_kept_graph() -> None:
    assert [one.name for one in found(leaking(12, keep=True, sequence=5)).findings] == ["loss kept with its graph"]


def test_gradients_are_kept_through_forward_where_backward_makes_them_anew_only_later() -> None:
    def acts(freed: bool) -> list[Act]:
        rows: list[Act] = []
        for n in range(3):
            block, first = (2 * n if freed else 0), 10 * n
            rows += [("alloc", 101 + 2 * n, first), ("write", 101 + 2 * n, first), ("free", 101 + 2 * n, first)]
            rows += [("alloc", block, first + 1)] if freed or n == 0 else [("read", block, first + 1)]
            rows += [("write", block, first + 1), ("read", block, first + 2)]
            rows += [("free", block, -1)] if freed else [("write", block, first + 3)]
        return rows

    phases = ("forward", "backward", "optimizer", "other")
    ops = [op(10 * n + k, phase, name=2, stack=1) for n in range(3) for k, phase in enumerate(phases)]
    labels = [{"block_id": block, "category": "gradient", "name": None} for block in (0, 2, 4)]
    kept = found(life(acts(freed=False), ops=ops, labels=labels[:1]))
    (one,) = (one for one in kept.findings if one.name == "gradients kept through forward")
    assert (one.bytes, one.covers_peak, one.num_blocks) == (1000, True, 1)
    # The forward of the next step no longer has it beside its own.
    assert one.peak_if_mended_bytes < kept.peak_bytes
    freed = found(life(acts(freed=True), ops=ops, labels=labels))
    assert all(one.name != "gradients kept through forward" for one in freed.findings)


def test_a_forward_without_backward_keeps_its_graph() -> None:
    acts: list[Act] = [
        ("alloc", 0, 0),
        ("write", 0, 0),
        ("read", 0, 1),
        ("alloc", 1, 2),
        ("write", 1, 2),
        ("read", 1, 3),
    ]
    frees: list[Act] = [("free", 0, -1), ("free", 1, -1)]
    recorded = [op(number, "forward", name=2, stack=1, sequence_nr=number) for number in range(4)]
    assert found(life([*acts, *frees], ops=recorded)).findings[0].name == "graph kept without backward"
    assert all(one.name is None for one in found(life([*acts, *frees])).findings)
    # The node between the two runs no operator.
    backward = [*recorded, *(op(4 + n, "backward", name=2, stack=1, sequence_nr=3 * (1 - n)) for n in range(2))]
    assert all(one.name is None for one in found(life([*acts, ("read", 1, 4), *frees], ops=backward)).findings)


@pytest.mark.parametrize("evaluates", [False, True])
def test_only_what_no_backward_runs_through_is_a_graph_without_one(tmp_path: Path, evaluates: bool) -> None:
    model = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 500))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        # The logits, which no backward reads, die before it.
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    with memtrace.record(tmp_path / "run.memtrace"):
        for _ in range(6):
            tokens = torch.randint(500, (8, 33))
            loss_of(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                kept = loss_of(tokens)  # its graph lives through the next step
    told = findings(memtrace.load(tmp_path / "run.memtrace"), "cpu")
    graphs = [one for one in told.findings if one.name == "graph kept without backward"]
    assert bool(graphs) == evaluates
    if evaluates:
        assert kept.requires_grad and graphs[0].saved_bytes > 500_000


@pytest.mark.parametrize("detached", [False, True])
def test_losses_of_some_steps_in_a_list_that_dies_with_its_function(tmp_path: Path, detached: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> torch.Tensor:
        losses, outputs = [], []
        for number in range(24):
            output = model(torch.randn(64, 64))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(output.detach())
            if number % 3 == 2:
                losses.append(model(torch.randn(64, 64)).square().mean())
                losses[-1] = losses[-1].detach() if detached else losses[-1]
        return torch.cat(outputs)  # these are used: no leak

    with memtrace.record(tmp_path / "run.memtrace"):
        run()
    told = findings(memtrace.load(tmp_path / "run.memtrace"), "cpu")
    kept = [one for one in told.findings if one.pattern == "leak"]
    assert [one.name for one in kept] == ([] if detached else ["loss kept with its graph"])
    assert all(one.saved_bytes > 500_000 for one in kept)


def test_without_accesses_most_patterns_are_not_judged() -> None:
    told = found(life([("alloc", 0, -1), ("alloc", 1, -1), ("free", 0, -1)]))
    assert told.findings == () and told.lower_bound_bytes is None
    assert any("does not say what was read and written" in reason for reason in told.not_judged)


def test_the_lower_bound_is_what_one_operator_touches() -> None:
    acts = [
        ("alloc", 0, 0),
        ("write", 0, 0),
        ("read", 0, 1),
        ("alloc", 1, 1),
        ("write", 1, 1),
        ("alloc", 3, 2),
        ("write", 3, 2),
    ]
    assert most_bytes_of_an_operator(life(acts), "cpu") == 2001


LIVES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 50)), min_size=1, max_size=8)
CUTS = st.lists(st.tuples(st.integers(0, 7), st.integers(-1, 40), st.integers(0, 30)), max_size=8)


@settings(deadline=None)
@given(LIVES, CUTS)
def test_the_peak_without_some_blocks_is_that_of_a_replay(
    lives: list[tuple[int, int, int]], cuts: list[tuple[int, int, int]]
) -> None:
    moments = sorted((at, kind, block) for block, (first, length, _) in enumerate(lives)
                     for kind, at in (("alloc", first), ("free", first + length)))  # fmt: skip
    trace = trace_of(events=[event(kind, block, at, lives[block][2]) for at, kind, block in moments])
    rows = {(kind, block): row for row, (_, kind, block) in enumerate(moments)}
    stretches = [
        (block, begin, min(begin + length, len(moments))) for block, begin, length in cuts if block < len(lives)
    ]
    absences = Absences(*(np.array([stretch[place] for stretch in stretches], np.int64) for place in range(3)))
    highest = 0
    for level in range(len(moments) + 1):
        # After `level` events: from row level - 1 to row level.
        size = 0
        for block, (_, _, bytes_) in enumerate(lives):
            live = rows["alloc", block] < level <= rows["free", block]
            absent = any(b == block and begin <= level - 1 and level <= end for b, begin, end in stretches)
            size += bytes_ * (live and not absent)
        highest = max(highest, size)
    # Absences beyond a block's life take nothing away: only those within it are asked for here.
    within = [max(rows["alloc", b], begin) <= min(rows["free", b], end) for b, begin, end in stretches]
    clipped = Absences(absences.block[within],
                       np.maximum(absences.begin, [rows["alloc", b] for b, *_ in stretches])[within] if stretches else absences.begin,
                       np.minimum(absences.end, [rows["free", b] for b, *_ in stretches])[within] if stretches else absences.end)  # fmt: skip
    assert peak_without(trace, "cpu", clipped) == highest


@given(CUTS)
def test_merged_stretches_cover_the_same_and_never_overlap(cuts: list[tuple[int, int, int]]) -> None:
    stretches = [(block, begin, begin + length) for block, begin, length in cuts]
    columns = (np.array([stretch[place] for stretch in stretches], np.int64) for place in range(3))
    joined = merged(Absences(*columns))

    def covered(rows: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
        return {(block, at) for block, begin, end in rows for at in range(begin, end + 1)}

    rows = list(zip(joined.block.tolist(), joined.begin.tolist(), joined.end.tolist(), strict=True))
    assert covered(rows) == covered(stretches)
    assert sum(end - begin + 1 for _, begin, end in rows) == len(covered(rows))


def test_for_ever_is_to_the_end() -> None:
    trace = life([("alloc", 0, 0), ("alloc", 1, 1), ("alloc", 3, 2)])
    absent = Absences(np.array([0]), np.array([1]), np.array([FOREVER]))
    assert find_peak(trace, "cpu").requested.bytes == 3004
    assert peak_without(trace, "cpu", absent) == 2004


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    folder: Path = tmp_path_factory.mktemp("defects")
    for name, mended in (("before", False), ("after", True)):
        train(folder / f"{name}.memtrace", mended=mended)
    return memtrace.load(folder / "before.memtrace"), memtrace.load(folder / "after.memtrace")


def test_planted_defects_are_found_first_and_their_mending_foretold(planted: tuple[Trace, Trace]) -> None:
    before, after = planted
    told = findings(before, "cpu")
    first = told.findings[:3]
    assert {one.name or one.pattern for one in first} == {
        "loss kept with its graph", "gradients kept through forward", "unused_allocation",
    }  # fmt: skip
    assert all(one.site is not None and "defects.py" in one.site for one in first)
    predicted = peak_without(before, "cpu", Absences.joined([one.absences for one in first]))
    measured = find_peak(after, "cpu").requested.bytes
    assert predicted == pytest.approx(measured, rel=0.02)
    assert told.peak_bytes > 1.5 * measured
    rest = {one.name or one.pattern for one in findings(after, "cpu").findings if one.saved_bytes > 0}
    assert not rest & {"loss kept with its graph", "gradients kept through forward", "unused_allocation", "leak"}


def test_the_table_has_every_finding(planted: tuple[Trace, Trace]) -> None:
    table = findings_table(planted[0])
    assert len(table) == len(findings(planted[0], "cpu").findings)
    assert (table.peak_if_mended_bytes + table.saved_bytes == findings(planted[0], "cpu").peak_bytes).all()


def test_a_leak_is_told_without_accesses_too() -> None:
    acts: list[Act] = [("alloc", 2 * number, number) for number in range(12)]
    ops = [op(number, "forward", name=2, stack=1) for number in range(12)]
    (one,) = of(life(acts, ops=ops, spans=[step(n, 10 * n, 10) for n in range(12)]), "leak")
    # What is not read or written is needed no longer than its allocation.
    assert (one.num_blocks, one.saved_bytes) == (12, 12_000)


def test_the_page_says_what_was_not_judged() -> None:
    section = needless.findings_table(life([("alloc", 0, -1), ("free", 0, -1)]), "cpu")
    assert section is not None and not section.rows
    assert section.note.startswith("Nothing was found. Not judged: unused_allocation")
