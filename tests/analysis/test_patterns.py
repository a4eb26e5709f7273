"""Object-level patterns of wasted memory, each in its smallest form and in a near miss."""

from __future__ import annotations

import pytest

from memtrace.analysis.counterfactual import IdleIntervals, compute_peak_lower_bound
from memtrace.format.manifest import FileCoverage
from tests.analysis.short_traces import NAMES, SITE, Act, find_waste, findings_of, trace_of_acts
from tests.builders import op, with_manifest

USE_BLOCK_1: list[Act] = [("alloc", 1, 1), ("write", 1, 1), ("free", 1, -1)]
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
"""Block 2 is made from block 0 by the last operator that reads it, and has the same size."""


def test_allocation_before_another_block_is_freed_is_early() -> None:
    trace = trace_of_acts([("alloc", 0, 0), *USE_BLOCK_1, ("write", 0, 2), ("free", 0, -1)])
    (finding,) = findings_of(trace, "early allocation")
    assert (finding.wasted_bytes, finding.covers_peak) == (1000, True)
    assert (finding.peak_if_fixed_bytes, finding.saved_bytes) == (1001, 1000)
    assert finding.site == SITE


def test_allocation_is_not_early_if_no_block_is_freed_before_its_first_use() -> None:
    acts: list[Act] = [("alloc", 0, 0), ("alloc", 1, 1), ("write", 1, 1)]
    ends: list[Act] = [("write", 0, 2), ("free", 1, -1), ("free", 0, -1)]
    assert findings_of(trace_of_acts([*acts, *ends]), "early allocation") == []


def test_filling_a_new_block_with_zeros_is_not_its_first_use() -> None:
    trace = trace_of_acts([("alloc", 0, 0), ("write", 0, 0), *USE_BLOCK_1, ("read", 0, 2), ("free", 0, -1)])
    (finding,) = findings_of(trace, "early allocation")
    assert (finding.wasted_bytes, finding.peak_if_fixed_bytes, finding.saved_bytes) == (1000, 1001, 1000)


def test_filling_a_new_block_from_another_block_is_its_first_use() -> None:
    # The operator cannot move: its input may be gone later.
    acts: list[Act] = [("baseline", 2, -1), ("alloc", 0, 0), ("read", 2, 0), ("write", 0, 0)]
    ends: list[Act] = [("read", 0, 2), ("free", 0, -1)]
    assert findings_of(trace_of_acts([*acts, *USE_BLOCK_1, *ends]), "early allocation") == []


def test_block_that_is_used_right_after_it_is_filled_is_not_early() -> None:
    acts: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("read", 0, 2), ("free", 0, -1)]
    assert findings_of(trace_of_acts([*acts, *USE_BLOCK_1]), "early allocation") == []


MAKE_AND_READ_BLOCK_0: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("read", 0, 1)]
FREE_BOTH: list[Act] = [("free", 0, -1), ("free", 1, -1)]


def test_free_after_another_block_was_allocated_is_late() -> None:
    other: list[Act] = [("alloc", 1, 2), ("write", 1, 2), ("read", 1, 3)]
    trace = trace_of_acts([*MAKE_AND_READ_BLOCK_0, *other, *FREE_BOTH])
    (finding,) = findings_of(trace, "late deallocation")
    assert (finding.saved_bytes, finding.peak_if_fixed_bytes) == (1000, 1001)


def test_free_is_not_late_if_the_last_reader_allocates_the_other_block() -> None:
    # The operator needs its input until it ends.
    other: list[Act] = [("alloc", 1, 1), ("write", 1, 1), ("read", 1, 3)]
    trace = trace_of_acts([*MAKE_AND_READ_BLOCK_0, *other, *FREE_BOTH])
    assert findings_of(trace, "late deallocation") == []


def test_free_right_after_the_last_use_is_not_late() -> None:
    other: list[Act] = [("alloc", 1, 2), ("write", 1, 2), ("read", 1, 3)]
    trace = trace_of_acts([*MAKE_AND_READ_BLOCK_0, FREE_BOTH[0], *other, FREE_BOTH[1]])
    assert findings_of(trace, "late deallocation") == []


@pytest.mark.parametrize(
    ("num_operators", "device", "is_idle"), [(8, "cuda:0", True), (2, "cuda:0", False), (8, "cpu", False)]
)
def test_block_of_a_gpu_is_idle_if_many_operators_run_between_two_uses(
    num_operators: int, device: str, is_idle: bool
) -> None:
    def allocate_and_free(first_block: int, first_op: int, count: int) -> list[Act]:
        kinds = ("alloc", "write", "free")
        return [(kind, first_block + 2 * n, first_op + n) for n in range(count) for kind in kinds]

    acts: list[Act] = [("baseline", 300, -1), ("alloc", 0, 0), ("read", 300, 0), ("write", 0, 0)]
    acts += allocate_and_free(1, 1, num_operators)
    acts += [("read", 0, 90), ("free", 0, -1)]
    acts += allocate_and_free(201, 100, 40)
    findings = findings_of(trace_of_acts(acts, device=device), "temporary idleness")
    assert [(finding.wasted_bytes, finding.covers_peak) for finding in findings] == [(1000, True)] * is_idle


def test_block_that_is_only_written_by_its_own_operator_is_unused() -> None:
    acts: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("alloc", 1, 1), ("write", 1, 1), ("read", 1, 2)]
    (finding,) = findings_of(trace_of_acts(acts), "unused allocation")
    assert (finding.wasted_bytes, finding.saved_bytes, finding.num_blocks) == (1000, 1000, 1)


@pytest.mark.parametrize("use", ["read", "write"])
def test_block_that_another_operator_touches_is_not_unused(use: str) -> None:
    acts: list[Act] = [("alloc", 0, 0), ("write", 0, 0), (use, 0, 1), ("alloc", 1, 2), ("read", 1, 3)]
    assert findings_of(trace_of_acts(acts), "unused allocation") == []


@pytest.mark.parametrize(
    "acts",
    [
        pytest.param([("baseline", 0, -1)], id="older than the recording"),
        pytest.param([("alloc", 0, 0)], id="allocated empty"),
        pytest.param([("alloc", 0, -1)], id="allocated outside all operators"),
        pytest.param([("alloc", 0, 0), ("free", 0, 0)], id="scratch of an operator"),
        pytest.param([("baseline", 2, -1), ("alloc", 0, 0), ("read", 2, 0), ("write", 0, 0)], id="result"),
    ],
)
def test_block_whose_use_is_not_known_is_not_unused(acts: list[Act]) -> None:
    trace = trace_of_acts([*acts, ("alloc", 1, 1), ("write", 1, 1), ("read", 1, 2)])
    assert findings_of(trace, "unused allocation") == []


@pytest.mark.parametrize("category", ["parameter", "gradient", "optimizer_state", "input"])
def test_block_of_a_model_or_an_optimizer_is_not_unused(category: str) -> None:
    acts: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("alloc", 1, 1), ("write", 1, 1), ("read", 1, 2)]
    trace = trace_of_acts(acts, labels=[{"block_id": 0, "category": category}])
    assert findings_of(trace, "unused allocation") == []


def test_block_that_the_last_step_leaves_behind_is_late_like_those_before_it() -> None:
    acts: list[Act] = []
    for number in range(3):
        block, other, call = 2 * number, 101 + 2 * number, 10 * number
        acts += [("alloc", block, call), ("write", block, call), ("read", block, call + 1)]
        acts += [("free", block - 2, -1)] if number else []
        acts += [("alloc", other, call + 2), ("write", other, call + 2), ("free", other, -1)]
    (finding,) = findings_of(trace_of_acts(acts), "late deallocation")
    assert (finding.num_blocks, finding.saved_bytes) == (3, 1000)


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_block_that_autograd_or_the_optimizer_frees_is_not_late(phase: str) -> None:
    other: list[Act] = [("alloc", 1, 2), ("write", 1, 2), ("read", 1, 3)]
    names = [*NAMES, {"id": 9, "kind": "range", "text": phase}]
    span = {"kind": "phase", "name": 9, "start_ns": 0, "duration_ns": 1000}
    acts = [*MAKE_AND_READ_BLOCK_0, *other, *FREE_BOTH]
    assert findings_of(trace_of_acts(acts, spans=[span], names=names), "late deallocation") == []


def test_argument_of_a_module_is_held_until_the_module_returns() -> None:
    other: list[Act] = [("alloc", 1, 2), ("write", 1, 2), ("read", 1, 3)]
    acts = [*MAKE_AND_READ_BLOCK_0, *other, *FREE_BOTH]
    inside = {"kind": "module", "name": 2, "start_ns": 15, "duration_ns": 40}  # begins before block 0 is read
    assert findings_of(trace_of_acts(acts, spans=[inside]), "late deallocation") == []
    around = inside | {"start_ns": 0, "duration_ns": 100}  # allocates block 0 itself
    assert len(findings_of(trace_of_acts(acts, spans=[around]), "late deallocation")) == 1


def test_write_that_is_overwritten_before_a_read_is_dead_and_saves_no_memory() -> None:
    trace = trace_of_acts([("alloc", 0, 0), ("write", 0, 0), ("write", 0, 1), ("read", 0, 2)])
    (finding,) = findings_of(trace, "dead write")
    assert (finding.wasted_bytes, finding.saved_bytes) == (1000, 0)


def test_write_that_is_read_before_the_next_write_is_not_dead() -> None:
    acts: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("read", 0, 1), ("write", 0, 1), ("read", 0, 2)]
    assert findings_of(trace_of_acts(acts), "dead write") == []


def test_allocation_that_could_reuse_a_block_of_its_size_is_redundant() -> None:
    (finding,) = findings_of(trace_of_acts(REUSABLE), "redundant allocation")
    assert (finding.wasted_bytes, finding.saved_bytes, finding.peak_if_fixed_bytes) == (1000, 1000, 1000)


def test_allocation_of_another_size_is_not_redundant() -> None:
    other_size: list[Act] = [(kind, 3 if block == 2 else block, op_id) for kind, block, op_id in REUSABLE]
    assert findings_of(trace_of_acts(other_size), "redundant allocation") == []


def test_allocation_is_not_redundant_if_the_other_block_is_still_read() -> None:
    read_later: list[Act] = [*REUSABLE[:5], ("read", 0, 3), *REUSABLE[5:]]
    assert findings_of(trace_of_acts(read_later), "redundant allocation") == []


def test_copy_of_a_block_that_is_not_used_again_is_a_double_copy() -> None:
    clone = op(1, "forward", name=3, stack=1)
    ops = [op(0, "forward", name=2, stack=1), clone, op(2, "forward", name=2, stack=1)]
    assert len(findings_of(trace_of_acts(REUSABLE, ops=ops), "double copy")) == 1
    assert findings_of(trace_of_acts(REUSABLE), "double copy") == []


def test_lower_bound_is_the_most_bytes_that_one_operator_touches() -> None:
    acts: list[Act] = [("alloc", 0, 0), ("write", 0, 0), ("read", 0, 1), ("alloc", 1, 1), ("write", 1, 1)]
    acts += [("alloc", 3, 2), ("write", 3, 2)]
    assert compute_peak_lower_bound(trace_of_acts(acts), "cpu", IdleIntervals.concatenate([])) == 2001


def test_use_of_blocks_is_not_judged_where_compiled_kernels_ran_unseen() -> None:
    names = [*NAMES, {"id": 9, "kind": "frame", "text": "/site-packages/torch/_inductor/utils.py\t9\trun"}]
    trace = trace_of_acts(REUSABLE, names=names)
    assert find_waste(trace).findings != ()  # a recording sees these kernels, unless it states otherwise
    waste = find_waste(with_manifest(trace, coverage=FileCoverage(unseen_accesses=("compiled",))))
    assert waste.findings == ()
    assert waste.skipped_patterns[0].reason == "kernels of torch.compile read and write memory unseen"
    assert "late deallocation" in waste.skipped_patterns[0].patterns
