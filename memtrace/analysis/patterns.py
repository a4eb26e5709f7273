"""Ways in which a block is there without need: DrGPUM's object-level patterns, by msMemScope's conditions.

Each function gives the stretches in which blocks of a device need not be there. Distances are told by what happened in
between, not by a number of operators: a block that is freed late matters only if another was allocated meanwhile.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column, step_rows
from memtrace.analysis.block_accesses import filled_from_nothing, op_rows, uses
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.analysis.counterfactual import FOREVER, Absences
from memtrace.analysis.leaks import keeps_growing, live_bytes_at_step_ends, step_end_lifetimes
from memtrace.analysis.thresholds import MIN_STEPS_AFTER_WARM_UP, WARM_UP_STEPS
from memtrace.format.arrays import Array
from memtrace.trace import Trace

IDLE_SHARE: Final = 0.1
"""Idle is what nobody touches for this share of a step's operator calls (of the trace's, where no steps are known)."""
_KEPT: Final = np.array([CATEGORY["parameter"], CATEGORY["optimizer_state"]])


def early_allocation(trace: Trace, chosen: Array) -> Absences:
    """Blocks made before they are first used, while another block was freed in between: made later they could have had
    its place. What fills a block out of nothing (zeros, random numbers) moves with it and is no use. ``chosen`` are
    blocks of one device."""
    found, used = blocks(trace), uses(trace)
    from_nothing = filled_from_nothing(trace)
    here = chosen[found.alloc_event[chosen] >= 0]
    access = used.first[here]
    # Its maker's accesses of a block come one behind the other, before all others.
    while (skipped := from_nothing[np.minimum(access, len(from_nothing) - 1)] & (access < used.first[here + 1])).any():
        access = access + skipped
    there = access < used.first[here + 1]
    here, access = here[there], access[there]
    own = used.op[access] == trace.columns("events", "op_id")["op_id"][found.alloc_event[here]]
    here, access = here[~own], access[~own]
    begin, end = found.alloc_event[here], _first_row(trace, used.op[access], used.row[access])
    freed = _count(trace, found, here, "free")
    early = freed[np.maximum(end, 0)] > freed[begin + 1]
    return Absences(here[early], begin[early], end[early])


def late_deallocation(trace: Trace, chosen: Array) -> Absences:
    """Blocks freed after their last use, while another block was allocated in between. Blocks that are live at the end
    are no finding: nobody knows what they are for."""
    found, used = blocks(trace), uses(trace)
    here = chosen[(found.free_event[chosen] >= 0) & (used.num_of(chosen) > 0)]
    begin, end = _last_need(trace, here), found.free_event[here]
    made = _count(trace, found, here, "alloc")
    late = (end > begin) & (made[end] > made[np.minimum(begin + 1, end)])
    return Absences(here[late], begin[late], end[late])


def temporary_idleness(trace: Trace, chosen: Array) -> Absences:
    """The stretches between two uses of a block in which many operators run and none touches it."""
    used = uses(trace)
    mine = among(trace, chosen)[used.block]
    follows = np.flatnonzero(mine[1:] & (used.block[1:] == used.block[:-1]) & ~filled_from_nothing(trace)[:-1])
    calls = np.concatenate([[0], np.cumsum(_first_of_calls(trace))])
    begin = _last_row(trace, used.op[follows], used.row[follows])
    end = _first_row(trace, used.op[follows + 1], used.row[follows + 1])
    steps = step_rows(trace)
    whole = int(np.median(calls[steps.end_row] - calls[steps.first_row])) if len(steps.number) else int(calls[-1])
    idle = (end > begin) & (calls[np.maximum(end, begin)] - calls[begin + 1] >= max(IDLE_SHARE * whole, 1))
    return Absences(used.block[follows][idle], begin[idle], end[idle])


def unused_allocation(trace: Trace, chosen: Array) -> Absences:
    """Blocks that nobody but the operator that made them ever touches, and nobody reads."""
    found, used = blocks(trace), uses(trace)
    op = trace.columns("events", "op_id")["op_id"]
    alloc_op = np.where(found.alloc_event >= 0, op[found.alloc_event], -2)
    by_another = np.zeros(len(found), bool)
    by_another[used.block[used.is_read | (used.op != alloc_op[used.block])]] = True
    here = chosen[~by_another[chosen]]
    return Absences(here, found.alloc_event[here], _end(found, here))


def redundant_allocation(trace: Trace, chosen: Array) -> tuple[Absences, Array]:
    """Blocks made while another of the same size had been used for the last time and was not freed yet: they could have
    had its place until it was freed. Each donor serves one. Also the donors, one a row."""
    found, used = blocks(trace), uses(trace)
    donors = chosen[(found.free_event[chosen] >= 0) & (used.num_of(chosen) > 0)]
    done = _last_need(trace, donors, of_reads=True)
    takers = chosen[(found.alloc_event[chosen] >= 0) & (used.num_of(chosen) > 0)]
    # By size and then by moment: a donor comes before the takers that it may serve.
    size = np.concatenate([found.size[donors], found.size[takers]])
    moment = np.concatenate([done, found.alloc_event[takers]])
    order = np.lexsort((moment, size))
    is_taker = order >= len(donors)
    previous = np.zeros(len(order), bool)
    previous[1:] = is_taker[1:] & ~is_taker[:-1] & (size[order][1:] == size[order][:-1])
    place = np.flatnonzero(previous)
    taker, donor = takers[order[place] - len(donors)], donors[order[place - 1]]
    begin, end = found.alloc_event[taker], np.minimum(found.free_event[donor], _end(found, taker))
    apart = (end > begin) & (taker != donor)
    return Absences(taker[apart], begin[apart], end[apart]), donor[apart]


def kept_for_ever(trace: Trace, chosen: Array) -> Absences:
    """Blocks of lines that leave some behind in step after step: not freed before the last step ends (a list may die
    with its function), not used again, and not of the first steps, which make optimizer state and workspaces once."""
    found, used = blocks(trace), uses(trace)
    steps = step_rows(trace)
    if len(steps.number) < WARM_UP_STEPS + MIN_STEPS_AFTER_WARM_UP:
        return Absences.joined([])
    kept = (found.step[chosen] >= 0) & (_end(found, chosen) >= steps.end_row[-1])
    # What the last step made and is freed after it, and its gradients, are in use.
    in_use = (found.free_event[chosen] >= 0) | (found.category[chosen] == CATEGORY["gradient"])
    kept &= ~(in_use & (found.step[chosen] == steps.number[-1]))
    here = chosen[kept & ~np.isin(found.category[chosen], _KEPT)]
    last = found.alloc_event[here]
    touched = used.num_of(here) > 0
    last[touched] = _last_need(trace, here[touched])
    # What a later step uses, or what comes after all, is kept for a purpose.
    over = (steps.of_rows(last) <= found.step[here] + 1) & (last < steps.end_row[-1])
    here, last = here[over], last[over]
    keep = np.isin(found.stack[here], _growing_stacks(trace, chosen))
    return Absences(here[keep], last[keep], _end(found, here[keep]))


def _growing_stacks(trace: Trace, chosen: Array) -> Array:
    """The stacks whose blocks, freed ones too, hold more from step to step: what ``leaks`` calls growth."""
    found, ends = blocks(trace), step_rows(trace).end_row[WARM_UP_STEPS:]
    lifetimes = step_end_lifetimes(trace, ends)
    first, end = lifetimes.first[chosen], lifetimes.end[chosen]
    lived = chosen[end > first]
    stacks, place = np.unique(found.stack[lived], return_inverse=True)
    shape = (len(stacks), len(ends))
    live = live_bytes_at_step_ends(place, found.size[lived], first[end > first], end[end > first], shape)
    grows: Array = stacks[[keeps_growing(row) for row in live]]
    return grows


def idle_gradients(trace: Trace, chosen: Array) -> Absences:
    """Gradients between the optimizer's last look at them and the backward that makes them anew: they live through
    forward because they are zeroed rather than freed, or freed too late."""
    found, used = blocks(trace), uses(trace)
    gradients = chosen[found.category[chosen] == CATEGORY["gradient"]]
    mine = np.flatnonzero(among(trace, gradients)[used.block])
    if not len(mine):
        return Absences.joined([])
    phase = op_column(trace, used.op[mine], "phase")
    by_optimizer, in_backward = phase == PHASE["optimizer"], phase == PHASE["backward"]
    # Neither: what zeroes them. For each use by the optimizer the next use in backward of the same block, or its free.
    telling = mine[by_optimizer | in_backward]
    is_last = by_optimizer[by_optimizer | in_backward]
    block = used.block[telling]
    following = np.append(block[1:] == block[:-1], False)
    ends = is_last & ~(following & np.append(is_last[1:], False))
    at = np.flatnonzero(ends)
    begin = _last_row(trace, used.op[telling[at]], used.row[telling[at]])
    after = np.minimum(at + 1, len(telling) - 1)
    free = _end(found, block[at])
    end = np.where(following[at], _first_row(trace, used.op[telling[after]], used.row[telling[after]]), free)
    through = (end > begin) & (free < FOREVER) | following[at]
    forward = _count_forward(trace)
    bound = np.minimum(end, len(forward) - 1)
    through &= forward[bound] > forward[np.minimum(begin + 1, bound)]
    return Absences(block[at][through], begin[through], end[through])


def dead_writes(trace: Trace, chosen: Array) -> Array:
    """Rows of ``uses`` that write a block which the next use, by another operator, overwrites unread."""
    used = uses(trace)
    mine = among(trace, chosen)[used.block]
    writes = ~used.is_read
    same = mine[1:] & (used.block[1:] == used.block[:-1]) & (used.op[1:] != used.op[:-1])
    return np.flatnonzero(same & writes[:-1] & writes[1:])


def among(trace: Trace, chosen: Array) -> Array:
    """For each block whether it is one of some."""
    among = np.zeros(len(blocks(trace)), bool)
    among[chosen] = True
    return among


def _end(found: Blocks, chosen: Array) -> Array:
    return np.where(found.free_event[chosen] >= 0, found.free_event[chosen], FOREVER)


def _last_need(trace: Trace, chosen: Array, *, of_reads: bool = False) -> Array:
    """The last row of events that needs each block: the end of the operator call that touches it last. ``of_reads``:
    its beginning, for a call that could write its result where it reads."""
    used = uses(trace)
    access = used.first[chosen + 1] - 1
    return used.row[access] if of_reads else _last_row(trace, used.op[access], used.row[access])


def _last_row(trace: Trace, op: Array, row: Array) -> Array:
    last = op_rows(trace).last
    return np.where(op >= 0, last[np.maximum(op, 0)], row) if len(last) else row


def _first_row(trace: Trace, op: Array, row: Array) -> Array:
    first = op_rows(trace).first
    return np.where(op >= 0, first[np.maximum(op, 0)], row) if len(first) else row


def _count(trace: Trace, found: Blocks, chosen: Array, kind: str) -> Array:
    """For each row of events how many allocations or frees on the device of the blocks came before it."""
    device = int(found.device[chosen[0]]) if len(chosen) else -1
    return trace.cached(_running_count, kind, device)


def _running_count(trace: Trace, kind: str, device: int) -> Array:
    events = trace.columns("events", "kind", "device")
    return np.concatenate([[0], np.cumsum((events["kind"] == KIND[kind]) & (events["device"] == device))])


def _first_of_calls(trace: Trace) -> Array:
    """For each row of events whether it is the first of an operator call."""
    op = trace.columns("events", "op_id")["op_id"]
    first = np.zeros(len(op), bool)
    rows = op_rows(trace).first
    first[rows[rows >= 0]] = True
    return first


def _count_forward(trace: Trace) -> Array:
    """For each row of events how many rows of forward operators came before it."""
    op = trace.columns("events", "op_id")["op_id"]
    return np.concatenate([[0], np.cumsum(op_column(trace, op, "phase") == PHASE["forward"])])
