"""The operators of a step as a graph of tasks, and how long the step would take if tasks were changed.

Tasks are the operator calls on the host and, where the recording has device times, what they run on the device. A task
begins some time after the last of its predecessors has ended: the call before it on its thread, calls on other threads
that write what it reads or for which its thread waited, the task before it on the device, its launch. That time (the
gap) is kept, so the simulation of an unchanged graph takes as long as the recorded step.

Source: Daydream (USENIX ATC 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Final

import numpy as np

from memtrace.analysis.event_codes import KIND, PHASE
from memtrace.format.arrays import Array
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace

COMPUTE_BOUND: Final = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "convolution", "conv2d", "rnn",
                        "lstm", "gru", "attention")  # fmt: skip
"""Parts of the names of operators that matrix products dominate; all others are bound by memory bandwidth."""
COMPUTE_SPEEDUP: Final = 3.0
"""Speed-up of compute-bound kernels in half precision, by Daydream."""
MEMORY_SPEEDUP: Final = 2.0
"""Speed-up of memory-bound kernels in half precision, by Daydream."""
_TRANSFERS: Final = ("c10d::*", "_c10d_functional::*", "aten::_to_copy*", "aten::copy_*")
_PREDECESSORS: Final = ("after", "needs", "launched_by", "waits_for")
"""Columns of ``OperatorGraph`` that are positions of tasks."""
_NONE: Final = -1


@dataclass(frozen=True)
class OperatorGraph:
    """The tasks of a step in the order of their recorded start, one element per task; times in ns.

    Predecessors are positions of earlier tasks, -1 for none; a task without one waits for the start of the step.
    """

    tail_ns: int
    """Time from the end of the last call on the host to the end of the step."""
    start_ns: Array
    """Recorded start, since the step began."""
    duration_ns: Array
    gap_ns: Array
    """Time from the end of the last predecessor to the start."""
    after: Array
    """The task before it on its thread or device."""
    needs: Array
    """The task on another thread that it waits for."""
    launched_by: Array
    """Of a device task: the call on the host that launched it, which has to have started."""
    waits_for: Array
    """Of a call on the host that ends when the device has finished: the device task."""
    is_device: Array
    name: Array
    """Operator (names.id)."""
    phase: Array
    op_id: Array
    inserted_ns: int = 0
    """Time of inserted tasks, which run when all others have ended."""

    def __len__(self) -> int:
        return len(self.start_ns)

    def simulate(self) -> int:
        """Return how long the step takes with the present durations."""
        _, end = self.simulate_tasks()
        return int(np.array(end, np.int64)[~self.is_device].max(initial=0)) + self.tail_ns + self.inserted_ns

    def simulate_tasks(self) -> tuple[list[int], list[int]]:
        """Return the start and the end of each task."""
        start, end = [0] * len(self), [0] * len(self)
        columns = (self.duration_ns, self.gap_ns, self.after, self.needs, self.launched_by, self.waits_for)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for place, (duration, gap, after, needs, launched_by, waits_for) in enumerate(rows):
            ready = 0
            if after >= 0:
                ready = end[after]
            if needs >= 0 and end[needs] > ready:
                ready = end[needs]
            if launched_by >= 0 and start[launched_by] > ready:
                ready = start[launched_by]
            start[place] = ready + gap
            end[place] = start[place] + duration
            if waits_for >= 0:
                end[place] = max(start[place], end[waits_for]) + duration
        return start, end

    # -- changes -----------------------------------------------------------------------------------------------

    def scale(self, mask: Array, factor: float) -> OperatorGraph:
        """Return the graph with the durations of ``mask`` multiplied by a factor."""
        return replace(self, duration_ns=np.where(mask, np.rint(self.duration_ns * factor), self.duration_ns).astype(
            np.int64))  # fmt: skip

    def remove(self, mask: Array) -> OperatorGraph:
        """Return the graph in which the tasks of ``mask`` take no time, and nothing waits between them."""
        return replace(self, duration_ns=np.where(mask, 0, self.duration_ns), gap_ns=np.where(mask, 0, self.gap_ns))

    def insert_last(self, duration_ns: int) -> OperatorGraph:
        """Return the graph with a further task at its end."""
        return replace(self, inserted_ns=self.inserted_ns + duration_ns)

    def computes(self) -> Array:
        """Return a mask of the tasks that compute: those on the device, or all where the graph has none."""
        return self.is_device if self.is_device.any() else np.ones(len(self), bool)

    def of_operators(self, trace: Trace, matches: Callable[[str], bool]) -> Array:
        """Return a mask of the tasks whose operator's name (such as ``aten::mm``) meets a condition."""
        distinct, index = np.unique(self.name, return_inverse=True)
        hits = [matches(trace.name(number) or "") for number in distinct.tolist()]
        mask: Array = np.array(hits, bool)[index]
        return mask


def is_compute_bound(name: str) -> bool:
    """Return whether the operator of a name such as ``aten::addmm`` is a matrix product or a convolution."""
    parts = name.partition(".")[0].rpartition("::")[2].split("_")
    return any(part in COMPUTE_BOUND for part in parts)


def is_transfer(name: str) -> bool:
    """Return whether an operator copies between devices or ranks."""
    return any(fnmatchcase(name, pattern) for pattern in _TRANSFERS)


def use_half_precision(trace: Trace, graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with kernels in half precision: compute-bound ones in a third, others in half of their time."""
    compute_bound = graph.of_operators(trace, is_compute_bound)
    in_passes = graph.computes() & (graph.phase != PHASE["optimizer"])
    faster = graph.scale(in_passes & compute_bound, 1 / COMPUTE_SPEEDUP)
    return faster.scale(in_passes & ~compute_bound, 1 / MEMORY_SPEEDUP)


def fuse_optimizer(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with one task in place of all of the optimizer's: as long as the sum of what they compute."""
    update = graph.phase == PHASE["optimizer"]
    fused_ns = int(graph.duration_ns[update & graph.computes()].sum())
    if not update.any():
        return graph
    return graph.remove(update).insert_last(fused_ns)


def build_graph(trace: Trace, step: RecordedStep) -> OperatorGraph:
    """Return the operator graph of a recorded step."""
    columns = trace.columns("ops", "op_id", "name", "start_ns", "duration_ns", "thread", "phase")
    start = columns["start_ns"] - step.start_ns
    inside = (start >= 0) & (start < step.duration_ns) & (columns["duration_ns"] >= 0)
    chosen = np.flatnonzero(inside)
    chosen = chosen[np.lexsort((-columns["duration_ns"][chosen], start[chosen]))]
    chosen = chosen[_is_outermost(start[chosen], columns["duration_ns"][chosen], columns["thread"][chosen])]
    host = _Host(
        columns["op_id"][chosen],
        start[chosen],
        np.minimum(columns["duration_ns"][chosen], step.duration_ns - start[chosen]),
        columns["thread"][chosen],
        columns["name"][chosen],
        columns["phase"][chosen],
    )
    return _assemble(trace, step, host)


@dataclass(frozen=True)
class _Host:
    op_id: Array
    start: Array
    duration: Array
    thread: Array
    name: Array
    phase: Array


def _is_outermost(start: Array, duration: Array, thread: Array) -> Array:
    """Return which calls, in order of start, are not within another call of their thread."""
    outermost = np.ones(len(start), bool)
    for number in np.unique(thread).tolist():
        own = np.flatnonzero(thread == number)
        reached = np.maximum.accumulate(start[own] + duration[own])
        outermost[own[1:]] = start[own[1:]] >= reached[:-1]
    return outermost


def _assemble(trace: Trace, step: RecordedStep, host: _Host) -> OperatorGraph:
    after, needs = _previous_on_thread(host), _find_needs(trace, step, host)
    device = trace.columns("device_times", "op_id", "device", "start_ns", "duration_ns")
    place = _find_places(host.op_id, device["op_id"])
    rows = np.flatnonzero(place >= 0)
    rows = rows[np.argsort(device["start_ns"][rows], kind="stable")]
    num_host, num_device = len(host.op_id), len(rows)
    none = np.full(num_host, _NONE, np.int64)
    launch = place[rows]
    device_start = device["start_ns"][rows] - step.start_ns
    device_end = device_start + device["duration_ns"][rows]
    device_after = _last_ended(device_start, device_end, device["device"][rows])
    unordered = OperatorGraph(
        tail_ns=0,
        start_ns=np.concatenate([host.start, device_start]),
        duration_ns=np.concatenate([host.duration, device["duration_ns"][rows]]),
        gap_ns=np.zeros(num_host + num_device, np.int64),
        after=np.concatenate([after, np.where(device_after >= 0, device_after + num_host, _NONE)]),
        needs=np.concatenate([needs, np.full(num_device, _NONE)]),
        launched_by=np.concatenate([none, launch]),
        waits_for=np.concatenate([_find_waits(host, launch, device_end, num_host), np.full(num_device, _NONE)]),
        is_device=np.concatenate([np.zeros(num_host, bool), np.ones(num_device, bool)]),
        name=np.concatenate([host.name, host.name[launch]]),
        phase=np.concatenate([host.phase, host.phase[launch]]),
        op_id=np.concatenate([host.op_id, host.op_id[launch]]),
    )
    return _put_in_order(unordered, step.duration_ns)


def _put_in_order(unordered: OperatorGraph, step_ns: int) -> OperatorGraph:
    """Return a graph with its tasks in the order of their start, and with the gaps of its recorded times."""
    start, waits_for = unordered.start_ns, unordered.waits_for
    end = start + unordered.duration_ns
    ready = np.maximum(_at(end, unordered.after), _at(end, unordered.needs))
    ready = np.maximum(ready, _at(start, unordered.launched_by))
    # Of a call that waits, only what is left after the device has finished is its own.
    own = end - np.maximum(start, _at(end, waits_for))
    complete = replace(
        unordered,
        tail_ns=step_ns - int(end[~unordered.is_device].max(initial=0)),
        duration_ns=np.where(waits_for >= 0, own, unordered.duration_ns),
        gap_ns=start - ready,
    )
    # A call that waits for the device is ordered after what it waits for: only its end depends on it.
    order = np.lexsort((unordered.is_device, np.where(waits_for >= 0, end, start)))
    rank = np.empty(len(order) + 1, np.int64)
    rank[order], rank[-1] = np.arange(len(order)), _NONE
    columns = {field.name: getattr(complete, field.name) for field in fields(complete) if field.type == "Array"}
    columns |= {name: rank[columns[name]] for name in _PREDECESSORS}
    return replace(complete, **{name: column[order] for name, column in columns.items()})


def _at(times: Array, place: Array) -> Array:
    """Return the times at places; 0, the start of the step, for -1."""
    return np.where(place >= 0, times[place], 0) if len(times) else place


def _previous_on_thread(host: _Host) -> Array:
    previous = np.full(len(host.start), _NONE, np.int64)
    for number in np.unique(host.thread).tolist():
        own = np.flatnonzero(host.thread == number)
        previous[own[1:]] = own[:-1]
    return previous


def _find_needs(trace: Trace, step: RecordedStep, host: _Host) -> Array:
    """Return for each call the last call on another thread that it waits for.

    These are the calls that write what it reads, and those that ran while its thread did nothing, as the thread of
    backward runs while the thread of forward waits.
    """
    needs = np.full(len(host.start), _NONE, np.int64)
    if len(np.unique(host.thread)) < 2:
        return needs
    end = host.start + host.duration
    previous = _previous_on_thread(host)
    order = np.argsort(end, kind="stable")
    latest = order[np.maximum(np.searchsorted(end[order], host.start, side="right") - 1, 0)]
    idle_since = np.where(previous >= 0, end[previous], 0)
    ran_in_gap = (host.thread[latest] != host.thread) & (host.start[latest] >= idle_since)
    ran_in_gap &= end[latest] <= host.start
    needs[ran_in_gap] = latest[ran_in_gap]
    reader, writer = _find_writers(trace, step, host)
    crosses = (host.thread[reader] != host.thread[writer]) & (end[writer] <= host.start[reader])
    reader, writer = reader[crosses], writer[crosses]
    by_end = np.argsort(end[writer], kind="stable")
    written = np.full(len(needs), _NONE, np.int64)
    written[reader[by_end]] = writer[by_end]
    later = (written >= 0) & ((needs < 0) | (end[written] > end[needs]))
    return np.where(later, written, needs)


def _find_writers(trace: Trace, step: RecordedStep, host: _Host) -> tuple[Array, Array]:
    """Return pairs of calls: one reads a block, the other is the last to have written it before."""
    events = trace.columns("events", "kind", "block_id", "op_id")
    rows = slice(step.first_row, step.end_row)
    kind, block = events["kind"][rows], events["block_id"][rows]
    place = _find_places(host.op_id, events["op_id"][rows])
    is_write = (kind == KIND["write"]) | (kind == KIND["alloc"])
    used = np.flatnonzero((is_write | (kind == KIND["read"])) & (place >= 0) & (block >= 0))
    used = used[np.lexsort((used, block[used]))]
    same = np.append(False, block[used][1:] == block[used][:-1])
    # The position of the last write so far; one of another block does not count.
    last = np.maximum.accumulate(np.where(is_write[used], np.arange(len(used)), -1)) if len(used) else used
    first_of_block = np.maximum.accumulate(np.where(same, 0, np.arange(len(used)))) if len(used) else used
    reads = np.flatnonzero(~is_write[used] & (last >= first_of_block))
    return place[used[reads]], place[used[last[reads]]]


def _find_places(ids: Array, wanted: Array) -> Array:
    """Return the position of each wanted id in ``ids``, -1 where it is not there."""
    if not len(ids):
        return np.full(len(wanted), _NONE, np.int64)
    order = np.argsort(ids, kind="stable")
    where = np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)
    return np.where(ids[order][where] == wanted, order[where], _NONE)


def _last_ended(start: Array, end: Array, device: Array) -> Array:
    """Return for each task of a device the one that ended last before it began; tasks of other streams overlap."""
    previous = np.full(len(start), _NONE, np.int64)
    for number in np.unique(device).tolist():
        own = np.flatnonzero(device == number)
        order = own[np.argsort(end[own], kind="stable")]
        position = np.searchsorted(end[order], start[own], side="right") - 1
        previous[own] = np.where(position >= 0, order[np.maximum(position, 0)], _NONE)
    # A task without duration ends when it begins and must not wait for itself or a later one.
    return np.where(previous < np.arange(len(start)), previous, _NONE)


def _find_waits(host: _Host, launch: Array, device_end: Array, offset: int) -> Array:
    """Return for each call on the host the device task that it waits for; -1: none.

    A call waits if the last task that was launched before its end ends while the call runs.
    """
    waits = np.full(len(host.start), _NONE, np.int64)
    if not len(launch):
        return waits
    order = np.argsort(host.start[launch], kind="stable")
    ends = device_end[order]
    latest = np.maximum.accumulate(ends)
    # Which task set the running maximum.
    holder = order[np.maximum.accumulate(np.where(ends == latest, np.arange(len(ends)), 0))]
    end = host.start + host.duration
    count = np.searchsorted(host.start[launch][order], host.start, side="left")
    known = count > 0
    last = np.where(known, latest[np.maximum(count - 1, 0)], -1)
    is_wait = known & (last > host.start) & (last <= end)
    waits[is_wait] = holder[np.maximum(count - 1, 0)][is_wait] + offset
    return waits
