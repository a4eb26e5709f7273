"""The timeline of a step whose parameters, gradients and optimizer state are split over the ranks of a job.

ZeRO stage 1 splits the optimizer state, stage 2 also the gradients, stage 3 also the parameters. FSDP2
(``fully_shard``) does what stage 3 does for groups of modules, and holds buffers for its collectives. Their lifetimes
follow ``torch.distributed.fsdp._fully_shard`` of torch 2.9 to 2.13:

* Before a unit runs forward, its parameters are gathered into one buffer, then copied out into one block each. The
  buffer lives until the next unit is gathered, the copies until the unit has run. The root keeps its copies for
  backward.
* Before a unit runs backward, its copies are made from a buffer that was gathered when the unit before it (in
  backward) began, and that is freed after the copies are made.
* After a unit has run backward, its copies are freed, its gradients are copied into one buffer, freed, and reduced
  into the shard. The buffer lives until the next unit has run backward.

Source of the stages: ZeRO (SC 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.timeline import TICKS_PER_ROW, Timeline
from memtrace.planning.timeline_moments import Interval, StepMoments
from memtrace.planning.timeline_parameters import Parameters, find_parameters, gradient_blocks
from memtrace.planning.timeline_selection import matches_module
from memtrace.trace import Trace

Method = Literal["zero1", "zero2", "zero3", "fsdp"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)

# Positions within a row, before the first event of a unit (negative) and after its last one (positive).
_GATHER: Final = -8
_STAGED: Final = -7
_RELEASE_PREVIOUS: Final = -6
_COPY_OUT: Final = -5
_RELEASE: Final = -4
_PREFETCH: Final = -3
_PREFETCH_STAGED: Final = -2
_PREFETCHED: Final = -1
_RESHARD: Final = 1
_REDUCE_RELEASE: Final = 2
_COPY_IN: Final = 3
_GRADIENTS_FREED: Final = 4
_REDUCE: Final = 5
_REDUCED: Final = 6


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered and reduced together."""

    name: str
    """Empty: the root, which owns what no other unit does."""
    parameters: Array
    """Positions in ``Parameters``."""
    num_bytes: int
    """Bytes of its parameters, padded to a multiple of the ranks."""
    gradient_bytes: int
    """The same of its trained parameters."""
    forward: Interval
    backward: Interval | None
    """None: no parameter of the unit is trained."""


def shard_category(timeline: Timeline, category: str, num_ranks: int) -> Timeline:
    """Return a timeline in which each rank holds an equal part of the blocks of a category."""
    return timeline.resize(timeline.of_category(category), 1 / num_ranks)


def shard(
    trace: Trace, timeline: Timeline, moments: StepMoments, method: Method, num_ranks: int, units: Sequence[str] = ()
) -> Timeline:
    """Return the timeline of one rank of a sharded job; the batch of the rank is that of the recorded step.

    Args:
        trace: the trace of an unsharded run.
        timeline: the timeline of one of its steps.
        moments: the moments of this step.
        method: what is split, and how.
        num_ranks: over how many ranks.
        units: for ``fsdp`` patterns of the modules that ``fully_shard`` wraps, besides the model itself.

    Raises:
        MemtraceError: the trace lacks what the method needs, or a pattern matches no module.
    """
    if num_ranks == 1:
        return timeline
    parameters = find_parameters(trace, timeline)
    if method == "zero1":
        return _shard_optimizer(trace, timeline, moments, num_ranks)
    if method == "zero2":
        return _shard_gradients(_shard_optimizer(trace, timeline, moments, num_ranks), num_ranks)
    if method == "zero3":
        units = tuple(dict.fromkeys(module for module in parameters.module if module))
        grouped = [[module] for module in units]
    else:
        grouped = [[name] for name in _matching_modules(parameters, units)]
    found = _find_units(moments, parameters, grouped, num_ranks)
    staged = trace.devices[int(blocks(trace).device[parameters.block[0]])] == "cpu"
    sharded = _shard_optimizer(trace, _shard_state(timeline, parameters, num_ranks), moments, num_ranks)
    return _add_collectives(trace, sharded, moments, found, parameters, num_ranks, staged)


def find_default_units(trace: Trace, timeline: Timeline) -> tuple[str, ...]:
    """Return the modules that are wrapped if the user names none: the repeated blocks that have parameters.

    Raises:
        TraceError: the trace has no step with module calls and a backward.
        MemtraceError: the trace names no parameters.
    """
    from memtrace.pipeline.layer_passes import find_passes

    owners = set(find_parameters(trace, timeline).module)
    names = find_passes(trace)[-1].names
    return tuple(name for name in names if any(matches_module(owner, name) for owner in owners))


def _matching_modules(parameters: Parameters, patterns: Sequence[str]) -> list[str]:
    """Return the modules that match the patterns exactly: ``blocks.*`` is ``blocks.0``, not ``blocks.0.mlp``."""
    prefixes = dict.fromkeys(
        ".".join(module.split(".")[:depth])
        for module in parameters.module
        for depth in range(1, module.count(".") + 2)
        if module
    )
    chosen: list[str] = []
    for pattern in patterns:
        depth = pattern.count(".")
        matches = [name for name in prefixes if name.count(".") == depth and matches_module(name, pattern)]
        if not matches:
            raise MemtraceError(
                f"no module with parameters matches {pattern!r}: its modules are {', '.join(list(prefixes)[:8])}."
            )
        chosen += [name for name in matches if name not in chosen]
    return chosen


def _find_units(moments: StepMoments, parameters: Parameters, grouped: list[list[str]], num_ranks: int) -> list[Unit]:
    """Return the units that have parameters, in the order of their forward; the root comes first."""
    owner = np.full(len(parameters), -1)
    names = [modules[0] for modules in grouped]
    # The innermost unit owns a parameter.
    for number in sorted(range(len(names)), key=lambda number: names[number].count(".")):
        inside = [matches_module(module, names[number]) for module in parameters.module]
        owner[np.array(inside, bool)] = number
    forward, backward = moments.require("forward"), moments.within_module("backward")
    units = []
    for number, name in enumerate(names):
        own = np.flatnonzero(owner == number)
        runs = moments.find("forward", (name,))
        if len(own) and runs is not None:
            units.append(_unit(name, own, parameters, runs, moments.find("backward", (name,)), num_ranks))
    units.sort(key=lambda unit: unit.forward.begin)
    used = np.concatenate([np.zeros(0, np.int64), *(unit.parameters for unit in units)])
    root = _unit("", np.setdiff1d(np.arange(len(parameters)), used), parameters, forward, backward, num_ranks)
    return [root, *units]


def _unit(
    name: str, own: Array, parameters: Parameters, forward: Interval, backward: Interval | None, num_ranks: int
) -> Unit:
    padded = -(-parameters.size[own] // num_ranks) * num_ranks
    trained = parameters.is_trained[own]
    return Unit(name, own, int(padded.sum()), int(padded[trained].sum()), forward, backward)


def _shard_optimizer(trace: Trace, timeline: Timeline, moments: StepMoments, num_ranks: int) -> Timeline:
    """Split the state of the optimizer and what it allocates for its update."""
    state = timeline.of_category("optimizer_state") & (timeline.size > _SCALAR_BYTES)
    return shard_update(trace, timeline.resize(state, 1 / num_ranks), moments, num_ranks)


def shard_update(trace: Trace, timeline: Timeline, moments: StepMoments, num_ranks: int) -> Timeline:
    """Return the timeline in which the optimizer allocates for a part of the parameters only."""
    columns = blocks(trace)
    phase = np.where(timeline.block >= 0, columns.phase[np.maximum(timeline.block, 0)], -1)
    of_update = (phase == PHASE["optimizer"]) & timeline.of_category("temporary", "workspace", "unknown")
    update = moments.find("optimizer")
    if update is not None:
        inserted = (timeline.block < 0) & timeline.of_category("temporary")
        of_update |= inserted & (timeline.begin >= update.begin)
    # A number such as the learning rate is the same on every rank.
    of_update &= timeline.size > _SCALAR_BYTES
    return timeline.resize(of_update, 1 / num_ranks)


_SCALAR_BYTES: Final = 8


def _shard_gradients(timeline: Timeline, num_ranks: int) -> Timeline:
    """Reduce each gradient as soon as it is computed: what lives on is the part of the rank."""
    gradient = timeline.of_category("gradient")
    is_new = gradient & (timeline.begin >= timeline.start) & (timeline.begin < timeline.stop)
    freed = timeline.begin + TICKS_PER_ROW
    shards = timeline.size[is_new]
    reduced = timeline.cut(is_new, end=freed).resize(gradient & ~is_new, 1 / num_ranks)
    return reduced.insert(-(-shards // num_ranks), timeline.begin[is_new], timeline.end[is_new], "gradient")


def _shard_state(timeline: Timeline, parameters: Parameters, num_ranks: int) -> Timeline:
    """Split parameters, and the gradients that the step before left behind."""
    is_parameter = np.isin(timeline.block, parameters.block)
    is_old = timeline.of_category("gradient") & (timeline.begin < timeline.start)
    return timeline.resize(is_parameter | is_old, 1 / num_ranks)


class _Inserted:
    """Blocks that are collected to be inserted at once."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, int, int]]] = {}

    def add(self, category: str, num_bytes: int, begin: int, end: int) -> None:
        if num_bytes and end > begin:
            self.rows.setdefault(category, []).append((num_bytes, begin, end))

    def into(self, timeline: Timeline) -> Timeline:
        for category, rows in self.rows.items():
            size, begin, end = np.array(rows, np.int64).T
            timeline = timeline.insert(size, begin, end, category)
        return timeline


def _add_collectives(
    trace: Trace, timeline: Timeline, moments: StepMoments, units: list[Unit], parameters: Parameters,
    num_ranks: int, staged: bool,
) -> Timeline:  # fmt: skip
    """Insert gathered parameters and the buffers of all-gather and reduce-scatter.

    Args:
        trace: the trace.
        timeline: a timeline with sharded state.
        moments: the moments of the step.
        units: the units, the root first.
        parameters: the parameters.
        num_ranks: the number of ranks.
        staged: whether a collective stages its data in a further buffer: Gloo does, on the CPU.
    """
    inserted = _Inserted()
    order = sorted((unit for unit in units if unit.backward is not None), key=_backward_begin)
    forward_end, backward_end = moments.require("forward").end, moments.require("backward").end
    _add_forward(inserted, units, forward_end, staged)
    for place, unit in enumerate(order):
        assert unit.backward is not None
        done = unit.backward.end if unit.name else backward_end + TICKS_PER_ROW
        is_last = place + 1 == len(order)
        next_done = _done(order[place + 1], backward_end) if not is_last else done + 2 * TICKS_PER_ROW
        _add_backward(inserted, unit, order[place - 1] if place else None, done, next_done, staged)
        names = {parameters.name[number] for number in unit.parameters.tolist()}
        gradients = gradient_blocks(trace, timeline, names) & (timeline.begin >= timeline.start)
        ends = timeline.end[gradients]
        inserted.add(
            "gradient", unit.gradient_bytes // num_ranks, done + _REDUCE, int(ends.max(initial=done + TICKS_PER_ROW))
        )
        timeline = timeline.cut(gradients, end=done + _GRADIENTS_FREED)
    return inserted.into(timeline)


def _backward_begin(unit: Unit) -> int:
    """Order units as backward reaches them: the root first."""
    assert unit.backward is not None
    return unit.backward.begin if unit.name else -1


def _done(unit: Unit, backward_end: int) -> int:
    """Return the last position of the backward of a unit; the root is done when all of backward is."""
    assert unit.backward is not None
    return unit.backward.end if unit.name else backward_end + TICKS_PER_ROW


def _add_forward(inserted: _Inserted, units: list[Unit], forward_end: int, staged: bool) -> None:
    """Insert the buffers of the all-gathers of forward, and the copies that live in forward."""
    running = [unit for unit in units if unit.num_bytes]
    for place, unit in enumerate(running):
        begin = unit.forward.begin
        is_last = place + 1 == len(running)
        released = forward_end + _RESHARD if is_last else running[place + 1].forward.begin + _RELEASE_PREVIOUS
        inserted.add("temporary", unit.num_bytes, begin + _GATHER, released)
        if staged:
            inserted.add("workspace", unit.num_bytes, begin + _STAGED, begin + _RELEASE_PREVIOUS)
        if unit.name:
            inserted.add("temporary", unit.num_bytes, begin + _COPY_OUT, unit.forward.end + _RESHARD)


def _add_backward(
    inserted: _Inserted, unit: Unit, previous: Unit | None, done: int, next_done: int, staged: bool
) -> None:
    """Insert the copies and buffers of the backward of one unit.

    Args:
        inserted: receives them.
        unit: the unit.
        previous: the unit before it in backward; None: the unit is the first.
        done: position at which the unit has run backward.
        next_done: position at which the unit after it has.
        staged: as in ``_add_collectives``.
    """
    assert unit.backward is not None
    if unit.name:
        begin = unit.backward.begin
        inserted.add("temporary", unit.num_bytes, begin + _COPY_OUT, done + _RESHARD)
        gather = begin + _GATHER
        if previous is not None and previous.backward is not None:
            gather = min(gather, previous.backward.begin + _PREFETCH)
        inserted.add("temporary", unit.num_bytes, gather, begin + _RELEASE)
        if staged:
            inserted.add("workspace", unit.num_bytes, gather, gather + 1)
    else:
        inserted.add("temporary", unit.num_bytes, unit.forward.begin + _COPY_OUT, done + _RESHARD)
    inserted.add("temporary", unit.gradient_bytes, done + _COPY_IN, next_done + _REDUCE_RELEASE)
    if staged:
        inserted.add("workspace", unit.gradient_bytes, done + _REDUCE, done + _REDUCED)
