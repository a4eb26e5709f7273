"""Which bytes of a step grow with the batch.

With two traces of the same program at different batch sizes the answer is exact: the size of each block is c + k * b.
With one trace it follows from the roles of the blocks. What is computed from the inputs grows; what is computed from
parameters alone does not, nor do contributions to gradients, which have the size of a parameter.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.attribution import op_column
from memtrace.analysis.block_accesses import has_accesses
from memtrace.analysis.block_signatures import row_codes
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.step_accesses import StepAccesses, step_accesses
from memtrace.trace import Trace

STATE: Final = ("parameter", "gradient", "optimizer_state")
"""Categories that do not grow with the batch."""
MIN_MATCHED_SHARE: Final = 0.98
"""Two traces are of the same program if they share this part of the allocations of a step."""
_SCALAR_BYTES: Final = 8
_INDEPENDENT_FILLS: Final = ("aten::arange", "aten::linspace", "aten::eye", "aten::scalar_tensor", "aten::ones",
                             "aten::full", "aten::tril_indices", "aten::triu_indices")  # fmt: skip
"""Operators that read nothing and usually make positions, masks and constants, which the samples share."""
_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution", "conv", "rnn", "lstm",
                    "gru", "attention", "einsum")  # fmt: skip
"""Parts of the names of operators whose result has another meaning than their operands of the same size."""


def constant_bytes_by_role(trace: Trace, step: RecordedStep) -> Array:
    """Return for each block of a trace the bytes that do not grow with the batch: its size, or 0."""
    columns = blocks(trace)
    grows = _find_growing(trace, step, columns)
    return np.where(grows, 0, columns.size)


def _find_growing(trace: Trace, step: RecordedStep, columns: Blocks) -> Array:
    """Return which blocks grow with the batch, by their roles."""
    is_state = np.isin(columns.category, [CATEGORY[name] for name in STATE])
    in_step = (columns.alloc_event >= step.first_row) & (columns.alloc_event < step.end_row)
    in_passes = in_step & (columns.phase != PHASE["optimizer"]) & ~is_state & (columns.size > _SCALAR_BYTES)
    if not has_accesses(trace):
        without_accesses: Array = in_passes | (columns.category == CATEGORY["input"])
        return without_accesses
    accesses = step_accesses(trace, step)
    is_constant = is_state | _find_contributions(trace, accesses, columns) | _find_statistics(trace, columns)
    seeds = _find_inputs(trace, accesses, columns, in_step) & ~is_constant
    reached = _reach(accesses, seeds, barrier=is_constant)
    growing: Array = reached & ~is_constant & (in_passes | seeds)
    return growing


def _find_inputs(trace: Trace, accesses: StepAccesses, columns: Blocks, in_step: Array) -> Array:
    """Return the blocks with which the data of a step begins: what forward reads and no operator of it computes."""
    count = len(columns)
    phase = op_column(trace, accesses.op_id, "phase")[accesses.call]
    read_forward = np.zeros(count, bool)
    read_forward[accesses.block[accesses.is_read & (phase == PHASE["forward"])]] = True
    reads = np.zeros(len(accesses.op_id), bool)
    reads[accesses.call[accesses.is_read]] = True
    # A call without reads fills what it allocates: noise and zeros have the shape of the batch, positions do not.
    fills = accesses.is_alloc & ~reads[accesses.call]
    independent = _calls_named(trace, accesses, _INDEPENDENT_FILLS, whole=True)
    filled, shared = np.zeros(count, bool), np.zeros(count, bool)
    filled[accesses.block[fills]] = True
    shared[accesses.block[fills & independent[accesses.call]]] = True
    computed = np.zeros(count, bool)
    computed[accesses.block[accesses.is_alloc]] = True
    foreign = read_forward & ~computed & (columns.category != CATEGORY["unknown"])
    unnamed = read_forward & ~computed & in_step
    of_forward = filled & ~shared & (columns.phase != PHASE["optimizer"])
    inputs: Array = (columns.category == CATEGORY["input"]) | foreign | unnamed | of_forward
    return inputs


def _find_contributions(trace: Trace, accesses: StepAccesses, columns: Blocks) -> Array:
    """Return the blocks of backward that become gradients, or are added to them.

    These are read by a call that allocates or writes a gradient of the same size and is no product, or another such
    contribution. Workspaces of the size of a parameter of their module are counted too: reordered weights and their
    gradients.
    """
    is_gradient = columns.category == CATEGORY["gradient"]
    found = is_gradient.copy()
    copies = ~_calls_named(trace, accesses, _PRODUCTS)[accesses.call]
    results, operands = np.flatnonzero(~accesses.is_read & copies), np.flatnonzero(accesses.is_read & copies)
    size = columns.size
    # A call and a size identify what can be the same tensor before and after the call.
    result_key = row_codes_of_pairs(accesses.call, size[accesses.block])
    in_backward = columns.phase == PHASE["backward"]
    while True:
        keys = np.unique(result_key[results[found[accesses.block[results]]]])
        new = accesses.block[operands[np.isin(result_key[operands], keys)]]
        new = new[in_backward[new] & ~found[new]]
        if not len(new):
            break
        found[new] = True
    contributions: Array = (found & ~is_gradient) | _find_reordered(columns)
    return contributions


def _find_reordered(columns: Blocks) -> Array:
    """Return the workspaces that have the size of a parameter of their module."""
    gradient = (columns.category == CATEGORY["gradient"]) & (columns.module >= 0)
    width = int(columns.size.max(initial=0)) + 1
    keys = np.unique(columns.module[gradient].astype(np.int64) * width + columns.size[gradient])
    is_workspace = (columns.category == CATEGORY["workspace"]) & (columns.module >= 0)
    same: Array = is_workspace & np.isin(columns.module.astype(np.int64) * width + columns.size, keys)
    return same


def _find_statistics(trace: Trace, columns: Blocks) -> Array:
    """Return what batch normalization keeps per channel: its blocks that are much smaller than those of the batch."""
    names = np.unique(columns.op_name)
    chosen = [number for number in names.tolist() if number >= 0 and "batch_norm" in (trace.name(number) or "")]
    of_norm = np.isin(columns.op_name, chosen) & (columns.alloc_event >= 0)
    gradient = columns.category == CATEGORY["gradient"]
    width = int(columns.size.max(initial=0)) + 1
    key = columns.module.astype(np.int64) * width + columns.size
    return of_norm & np.isin(key, key[gradient & (columns.module >= 0)])


def row_codes_of_pairs(first: Array, second: Array) -> Array:
    """Return a number for each distinct pair of two columns."""
    return row_codes(first.astype(np.int64), second.astype(np.int64))


def _reach(accesses: StepAccesses, seeds: Array, barrier: Array) -> Array:
    """Return the blocks that are computed from ``seeds``, directly or not, without passing through ``barrier``.

    Breadth first over the graph block -> call that reads it -> blocks that the call allocates or writes; every block
    and call is visited once.
    """
    num_calls = len(accesses.op_id)
    readers = _adjacency(accesses.block[accesses.is_read], accesses.call[accesses.is_read], len(seeds))
    results = _adjacency(accesses.call[~accesses.is_read], accesses.block[~accesses.is_read], num_calls)
    reached: Array = seeds.copy()
    called = np.zeros(num_calls, bool)
    front = np.flatnonzero(seeds & ~barrier)
    while len(front):
        calls = np.unique(_neighbours(readers, front))
        calls = calls[~called[calls]]
        called[calls] = True
        front = np.unique(_neighbours(results, calls))
        front = front[~reached[front] & ~barrier[front]]
        reached[front] = True
    return reached


def _adjacency(source: Array, target: Array, count: int) -> tuple[Array, Array]:
    """Return the targets ordered by source, and where those of each source begin."""
    order = np.argsort(source, kind="stable")
    return target[order], np.searchsorted(source[order], np.arange(count + 1))


def _neighbours(adjacency: tuple[Array, Array], nodes: Array) -> Array:
    targets, offset = adjacency
    count = offset[nodes + 1] - offset[nodes]
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    found: Array = targets[np.repeat(offset[nodes], count) + within]
    return found


def _calls_named(trace: Trace, accesses: StepAccesses, words: tuple[str, ...], *, whole: bool = False) -> Array:
    """Return which calls are of operators whose names are ``words`` (``whole``), or contain one of them as a part."""
    names = op_column(trace, accesses.op_id, "name")
    distinct, index = np.unique(names, return_inverse=True)
    texts = [(trace.name(number) or "").partition(".")[0] for number in distinct.tolist()]
    if whole:
        return np.array([text in words for text in texts], bool)[index]
    parts = [text.rpartition("::")[2].split("_") for text in texts]
    return np.array([any(word in words for word in part) for part in parts], bool)[index]


def constant_bytes_by_law(
    trace: Trace, step: RecordedStep, batch: int, other: Trace, other_step: RecordedStep, other_batch: int
) -> Array:
    """Return for each block of a trace the bytes that do not grow with the batch, by a second trace.

    The allocations of both steps are matched in order by operator, module and phase; the size of a block is then
    c + k * b.

    Raises:
        MemtraceError: the traces are not of the same program, or of the same batch size.
    """
    if batch == other_batch:
        raise MemtraceError(f"both traces have batch size {batch}: pass traces of different batch sizes.")
    columns, others = blocks(trace), blocks(other)
    mine, theirs = _allocated(columns, step), _allocated(others, other_step)
    place, partner = _match(_signatures(trace, columns, mine), _signatures(other, others, theirs))
    largest = max(len(mine), len(theirs), 1)
    if len(place) < MIN_MATCHED_SHARE * largest:
        raise MemtraceError(
            f"the traces do not seem to be of the same program: of {largest:,} allocations in a step, "
            f"{len(place):,} are in both. Pass traces that differ in the batch size alone."
        )
    constant = constant_bytes_by_role(trace, step).astype(np.int64)
    size, other_size = columns.size[mine[place]], others.size[theirs[partner]]
    growth = (other_size - size) / (other_batch - batch)
    constant[mine[place]] = np.clip(np.rint(size - growth * batch), None, size).astype(np.int64)
    return constant


def _allocated(columns: Blocks, step: RecordedStep) -> Array:
    """Return the blocks that a step allocates, in order."""
    chosen = np.flatnonzero((columns.alloc_event >= step.first_row) & (columns.alloc_event < step.end_row))
    ordered: Array = chosen[np.argsort(columns.alloc_event[chosen], kind="stable")]
    return ordered


def _signatures(trace: Trace, columns: Blocks, block: Array) -> list[tuple[str, str, int, int]]:
    """Return operator, module and phase of each block, and its position among the blocks that share them."""
    texts = {
        number: trace.name(number) or ""
        for number in np.unique(np.concatenate([columns.op_name[block], columns.module[block]])).tolist()
    }
    counts: dict[tuple[str, str, int], int] = {}
    signatures = []
    for name, module, phase in zip(
        columns.op_name[block].tolist(), columns.module[block].tolist(), columns.phase[block].tolist(), strict=True
    ):
        key = (texts[name], texts[module], phase)
        position = counts[key] = counts.get(key, -1) + 1
        signatures.append((*key, position))
    return signatures


def _match(mine: list[tuple[str, str, int, int]], theirs: list[tuple[str, str, int, int]]) -> tuple[Array, Array]:
    """Return the positions in both lists of the signatures that both contain."""
    where = {signature: place for place, signature in enumerate(theirs)}
    pairs = [(place, where[signature]) for place, signature in enumerate(mine) if signature in where]
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
