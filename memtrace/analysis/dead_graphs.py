"""Dead graphs: what autograd recorded although no backward follows, and the line of the program that runs it."""

from __future__ import annotations

import numpy as np

from memtrace.analysis.attribution import PHASE, op_column
from memtrace.analysis.autograd_nodes import is_recorded_forward, ran_only_forward
from memtrace.analysis.block_accesses import group_accesses_by_block
from memtrace.analysis.blocks import PERSISTENT, allocating_op, blocks
from memtrace.analysis.components import connected_components
from memtrace.analysis.counterfactual import IdleIntervals
from memtrace.analysis.event_codes import KIND
from memtrace.analysis.patterns import block_mask
from memtrace.analysis.statements import call_path, end_of_variables, num_common_frames
from memtrace.analysis.thresholds import MIN_SHARE_OF_GRAPH
from memtrace.code_owner import Owner
from memtrace.format.arrays import Array
from memtrace.frames import Frame, PhaseHint, phase_hint
from memtrace.trace import Trace


def is_held_by_graph(trace: Trace, block: Array) -> Array:
    """Return whether an autograd graph may hold each block: it belongs to a forward through which no backward ran.

    The block was made or read by an operator that autograd recorded. Once backward has run, the graph has released its
    blocks, and what is still allocated is held by the program.
    """
    return ran_only_forward(trace, allocating_op(trace, block)) | _is_read_without_backward(trace, block)


def _is_read_without_backward(trace: Trace, block: Array) -> Array:
    """Return whether an operator that autograd recorded reads each block, and no backward ran through its node."""
    accesses = group_accesses_by_block(trace)
    mine = np.flatnonzero(accesses.is_read & block_mask(trace, block)[accesses.block])
    readers = mine[ran_only_forward(trace, accesses.op[mine])]
    return block_mask(trace, accesses.block[readers])[block]


def is_freed_with(trace: Trace, block: Array, others: Array) -> Array:
    """Return whether each block is freed together with one of ``others``, without any event but frees in between.

    An input that a graph saves is freed with the graph, unless a variable holds it.
    """
    columns, kind = blocks(trace), trace.columns("events", "kind")["kind"]
    burst = np.cumsum(kind != KIND["free"])
    free, other_free = columns.free_event[block], columns.free_event[others]
    bursts = burst[other_free[other_free >= 0]]
    return np.asarray((free >= 0) & np.isin(burst[np.maximum(free, 0)], bursts)) if len(burst) else free >= 0


def is_made_without_backward(trace: Trace, block: Array) -> Array:
    """Return whether autograd recorded the operator that made each block, and no backward ran through its node."""
    return ran_only_forward(trace, allocating_op(trace, block))


def is_held_by_dead_graph(trace: Trace, block: Array) -> Array:
    """Return whether a graph through which no backward runs is all that holds each block.

    These are its own blocks, except those that a backward reads (they were detached and saved by another graph), and
    inputs that it saves, if they are freed together with its blocks.
    """
    accesses = group_accesses_by_block(trace)
    mine = np.flatnonzero(accesses.is_read & block_mask(trace, block)[accesses.block])
    in_backward = op_column(trace, accesses.op[mine], "phase") == PHASE["backward"]
    is_read_by_backward = block_mask(trace, accesses.block[mine[in_backward]])[block]
    is_own = is_made_without_backward(trace, block) & ~is_read_by_backward
    is_input = _is_read_without_backward(trace, block) & ~is_read_by_backward & ~is_own
    is_input &= ~np.isin(blocks(trace).category[block], PERSISTENT)
    return np.asarray(is_own | (is_input & is_freed_with(trace, block, block[is_own])))


def until_variables_drop(trace: Trace, intervals: IdleIntervals, last_access: Array | None = None) -> IdleIntervals:
    """Return the intervals of blocks of dead graphs without the time for which variables hold the blocks as well.

    Without its graph, a result that is in a variable is freed when the line that made it has assigned the next one.

    Args:
        trace: the trace of one rank.
        intervals: intervals that end with the free of a block.
        last_access: for each of them, the last access that the program needs; see ``find_release_rows``.
    """
    begin = np.maximum(intervals.begin, end_of_variables(trace, intervals.block, last_access))
    kept = begin < intervals.end
    return IdleIntervals(intervals.block[kept], begin[kept], intervals.end[kept])


def sites_of_dead_graphs(trace: Trace, block: Array) -> list[str | None]:
    """Return for each block of a dead graph the line of the program that runs the whole graph.

    Blocks belong to one graph if an operator that autograd recorded reads one of them to make the other.
    """
    sites = trace.cached(_sites_by_graph)
    return [sites.get(graph) for graph in trace.cached(_graphs)[block].tolist()]


def _sites_by_graph(trace: Trace) -> dict[int, str | None]:
    """Return the site of each dead graph, by all of its blocks: those that variables hold as well too."""
    every_block = np.arange(len(blocks(trace)))
    of_graph = every_block[is_held_by_graph(trace, every_block)]
    graph, is_own = trace.cached(_graphs)[of_graph], is_made_without_backward(trace, of_graph)
    sites = sites_of_groups(trace, of_graph, graph, is_own, trace.cached(_live_lines))
    return dict(zip(graph.tolist(), sites, strict=True))


def sites_of_groups(
    trace: Trace, block: Array, group: Array, is_own: Array, live_lines: frozenset[tuple[str, int]]
) -> list[str | None]:
    """Return for each block the line of the program that runs the whole graph which the block belongs to.

    Args:
        trace: the trace of one rank.
        block: the blocks.
        group: the number of the graph of each block.
        is_own: whether the call stack of each block says where its graph runs; where none does, all are taken.
        live_lines: files and lines that graphs pass which are needed.
    """
    order = np.argsort(group, kind="stable")
    groups, first = np.unique(group[order], return_index=True)
    sites: list[str | None] = [None] * len(block)
    columns = blocks(trace)
    site_of_stacks: dict[tuple[int, ...], str | None] = {}
    for members in np.split(order, first[1:]) if len(groups) else []:
        own = block[members[is_own[members]] if is_own[members].any() else members]
        stacks, index = np.unique(columns.stack[own], return_inverse=True)
        num_bytes = np.bincount(index, weights=columns.size[own])
        key = tuple(stacks.tolist())
        if key not in site_of_stacks:
            site_of_stacks[key] = _site_of_stacks(trace, stacks, num_bytes, live_lines)
        for member in members.tolist():
            sites[member] = site_of_stacks[key]
    return sites


def _graphs(trace: Trace) -> Array:
    """Return the number of the dead graph that each block of the trace belongs to; others are graphs of their own.

    An input that graphs save belongs to the first of them.
    """
    accesses, num_blocks = group_accesses_by_block(trace), len(blocks(trace))
    every_block = np.arange(num_blocks)
    is_own = is_made_without_backward(trace, every_block)
    reads = np.flatnonzero(accesses.is_read)
    reads = reads[ran_only_forward(trace, accesses.op[reads])]
    block, made = accesses.block[reads], every_block[is_own]
    ops, number = np.unique(np.concatenate([allocating_op(trace, made), accesses.op[reads]]), return_inverse=True)
    made_by, read_by = num_blocks + number[: len(made)], num_blocks + number[len(made) :]
    links = is_own[block]
    first, second = np.concatenate([made, block[links]]), np.concatenate([made_by, read_by[links]])
    graph = connected_components(first, second, num_blocks + len(ops))
    # In reverse, so that the first reader of each input is assigned last.
    graph[block[~links][::-1]] = graph[read_by[~links][::-1]]
    return graph[:num_blocks]


def _site_of_stacks(
    trace: Trace, stacks: Array, num_bytes: Array, live_lines: frozenset[tuple[str, int]]
) -> str | None:
    """Return the line of the program under which a dead graph can run without autograd; None without call stacks.

    It is the innermost line that makes nearly all of the graph. It is not a line that live graphs pass as well, nor a
    line of a module whose whole forward call is dead, because the line that calls the module serves as well. Where only
    the line of a live graph calls that module, as in ``head(backbone(x))``, it is that line.
    """
    known = stacks >= 0
    if not known.any():
        return None
    paths = [call_path(trace, int(stack)) for stack in stacks[known]]
    weights = dict(zip(paths, num_bytes[known].tolist(), strict=True))
    path = _path_of_most_bytes(trace, weights)
    owner = trace.code_owner
    of_user = [depth for depth, frame in enumerate(path) if owner.owner(frame) is Owner.USER]
    is_dead = [(path[depth].file, path[depth].line) not in live_lines for depth in of_user]
    for depth, dead in zip(reversed(of_user), reversed(is_dead), strict=True):
        in_module = depth > 0 and phase_hint(path[depth - 1]) is PhaseHint.MODULE_CALL
        if dead and not in_module:
            return owner.format_site(path[: depth + 1][::-1])
    callers = of_user[: is_dead.index(True)] if True in is_dead else of_user
    if callers:
        return owner.format_site(path[: callers[-1] + 1][::-1])
    return owner.format_site(max(weights, key=weights.__getitem__)[::-1])


def _path_of_most_bytes(trace: Trace, weights: dict[tuple[Frame, ...], float]) -> tuple[Frame, ...]:
    """Return the outermost frames that the call paths of nearly all bytes share, and the frame where they part.

    Args:
        trace: the trace of one rank.
        weights: the bytes of each call path.
    """
    total = sum(weights.values())
    while True:
        largest = max(weights, key=weights.__getitem__)
        depth = min(num_common_frames(largest, path) for path in weights)
        longer = [path for path in weights if len(path) > depth]
        functions = {(path[depth].file, path[depth].function) for path in longer}
        if len(weights) == 1 or len(longer) < len(weights) or len(functions) > 1:
            return largest[:depth]
        bytes_by_frame: dict[Frame, float] = {}
        for path, num_bytes in weights.items():
            bytes_by_frame[path[depth]] = bytes_by_frame.get(path[depth], 0.0) + num_bytes
        frame = max(bytes_by_frame, key=bytes_by_frame.__getitem__)
        weights = {path: num_bytes for path, num_bytes in weights.items() if path[depth] == frame}
        if bytes_by_frame[frame] < MIN_SHARE_OF_GRAPH * total:
            return next(iter(weights))[: depth + 1]


def _live_lines(trace: Trace) -> frozenset[tuple[str, int]]:
    """Return the lines of all call paths through which autograd records a graph that backward uses."""
    ops = trace.columns("ops", "op_id", "stack")
    op = ops["op_id"][ops["stack"] >= 0]
    return lines_of(trace, op[is_recorded_forward(trace, op) & ~ran_only_forward(trace, op)])


def lines_of(trace: Trace, op: Array) -> frozenset[tuple[str, int]]:
    """Return the files and lines of all frames of the call stacks of some operator calls."""
    stacks = np.unique(op_column(trace, op, "stack")).tolist()
    return frozenset((frame.file, frame.line) for stack in stacks for frame in call_path(trace, stack))
