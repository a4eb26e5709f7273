"""The choice of what to recompute, against all choices of models of up to 12 modules."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.planning.recompute_model import RecomputeModel
from memtrace.planning.recompute_solver import choose_greedily, minimize_cost, minimize_peak

MAX_MODULES = 12


@dataclass(frozen=True)
class Tree:
    """Modules as a tree: the parent of each module, -1 for a root."""

    parents: tuple[int, ...]

    def chain(self, module: int) -> list[int]:
        chain = []
        while module >= 0:
            chain.append(module)
            module = self.parents[module]
        return chain


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, MAX_MODULES))
    return Tree(tuple(draw(st.integers(-1, module - 1)) for module in range(count)))


@st.composite
def models(draw: st.DrawFn) -> RecomputeModel:
    """A random tree of modules whose forward and backward hold random blocks."""
    tree = draw(trees())
    modules = st.integers(0, len(tree.parents) - 1)
    positions, sizes = st.integers(0, 40), st.integers(1, 1000)
    blocks = draw(st.lists(st.tuples(positions, st.integers(0, 10), sizes), min_size=1, max_size=15))
    block = st.integers(0, len(blocks) - 1)
    nodes = draw(st.lists(st.tuples(block, positions, modules), max_size=20))
    kept = draw(st.lists(st.tuples(block, modules, positions), max_size=10))
    added = draw(st.lists(st.tuples(modules, positions, st.integers(1, 10), sizes), max_size=12))
    fixed = draw(st.lists(st.tuples(positions, st.integers(-200, 500)), min_size=1, max_size=6))
    releases = [(node, option) for node, (_, _, module) in enumerate(nodes) for option in tree.chain(module)]
    columns = np.array
    return RecomputeModel(
        fixed_positions=columns(sorted(float(position) for position, _ in fixed)),
        fixed_changes=columns([change for _, change in fixed]),
        begin=columns([float(begin) for begin, _, _ in blocks]),
        size=columns([size for _, _, size in blocks]),
        program_end=columns([float(begin + length) for begin, length, _ in blocks]),
        node_block=columns([number for number, _, _ in nodes], dtype=int),
        # A holder cannot release a block before it is allocated.
        node_end=columns([float(max(end, blocks[number][0])) for number, end, _ in nodes], dtype=float),
        release_node=columns([node for node, _ in releases], dtype=int),
        release_option=columns([option for _, option in releases], dtype=int),
        kept_block=columns([number for number, _, _ in kept], dtype=int),
        kept_option=columns([option for _, option, _ in kept], dtype=int),
        kept_end=columns([float(max(end, blocks[number][0])) for number, _, end in kept], dtype=float),
        added_option=columns([option for option, _, _, _ in added], dtype=int),
        added_begin=columns([float(begin) for _, begin, _, _ in added], dtype=float),
        added_end=columns([float(begin + length) for _, begin, length, _ in added], dtype=float),
        added_bytes=columns([size for _, _, _, size in added], dtype=int),
        cost_ns=columns(draw(st.lists(st.integers(1, 100), min_size=len(tree.parents), max_size=len(tree.parents)))),
        groups=tuple({tuple(sorted(tree.chain(module))) for module in range(len(tree.parents))}),
    )


def all_choices(model: RecomputeModel) -> list[tuple[int, int]]:
    """The cost and the peak of every allowed choice."""
    results = []
    for flags in itertools.product((False, True), repeat=model.num_options):
        chosen = np.array(flags)
        if model.is_allowed(chosen):
            results.append((int(model.cost_ns[chosen].sum()), replayed_peak(model, chosen)))
    return results


def replayed_peak(model: RecomputeModel, chosen: np.ndarray) -> int:
    """The peak of a choice, counted position by position and block by block."""
    releases: dict[int, set[int]] = {}
    for node, option in zip(model.release_node, model.release_option, strict=True):
        releases.setdefault(int(node), set()).add(int(option))
    picked = set(np.flatnonzero(chosen).tolist())
    ends = model.program_end.tolist()
    for node, (block, end) in enumerate(zip(model.node_block, model.node_end, strict=True)):
        if not releases.get(node, set()) & picked:
            ends[block] = max(ends[block], end)
    for block, option, end in zip(model.kept_block, model.kept_option, model.kept_end, strict=True):
        if int(option) in picked:
            ends[block] = max(ends[block], end)
    spans = [*zip(model.begin, ends, model.size, strict=True)]
    added = zip(model.added_option, model.added_begin, model.added_end, model.added_bytes, strict=True)
    spans += [(begin, end, size) for option, begin, end, size in added if int(option) in picked]
    starts = {float(begin) for begin, _, _ in spans} | set(model.fixed_positions.tolist())
    return max(
        int(model.fixed_changes[model.fixed_positions <= at].sum())
        + sum(int(size) for begin, end, size in spans if begin <= at < end)
        for at in starts
    )


@settings(max_examples=15, deadline=None)
@given(models(), st.floats(0, 1))
def test_optimum_equals_brute_force(model: RecomputeModel, share: float) -> None:
    choices = all_choices(model)
    least, most = min(peak for _, peak in choices), replayed_peak(model, np.zeros(model.num_options, bool))
    target = int(least + share * max(most - least, 0))
    choice = minimize_cost(model, target)
    assert choice is not None
    assert choice.is_optimal
    assert choice.peak_bytes == replayed_peak(model, choice.chosen) <= target
    assert choice.cost_ns == min(cost for cost, peak in choices if peak <= target)


@settings(max_examples=15, deadline=None)
@given(models())
def test_least_peak_equals_brute_force(model: RecomputeModel) -> None:
    choices = all_choices(model)
    least = min(peak for _, peak in choices)
    choice = minimize_peak(model)
    assert choice.peak_bytes == least
    assert choice.cost_ns == min(cost for cost, peak in choices if peak == least)
    assert least == 0 or minimize_cost(model, least - 1) is None


@settings(max_examples=15, deadline=None)
@given(models(), st.floats(0, 1))
def test_greedy_choice_is_allowed_and_never_raises_the_peak(model: RecomputeModel, share: float) -> None:
    nothing = replayed_peak(model, np.zeros(model.num_options, bool))
    choice = choose_greedily(model, int(share * max(nothing, 0)))
    assert model.is_allowed(choice.chosen)
    assert choice.peak_bytes == replayed_peak(model, choice.chosen) <= nothing
