"""Steps found in the events alone, without marks.

Where stacks lead through an optimizer, a step ends where it has made its last allocation (``optimizers``). Else, where
reads and writes are there, the beat is that of updates: the same long-lived blocks are read and written in place once
in every step by operators that allocate nothing, which is what an optimizer does to parameters, and a step ends with
the last of them. Else it is that of allocations (site, size, rough lifetime), on the shortest cycle whose blocks do not
regularly outlive the next one, and a step ends where the least is live, or where a backward is told, behind it, before
what a step begins with. All are n log n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column
from memtrace.analysis.optimizers import find_optimizer_bursts, find_step_ends
from memtrace.analysis.periodicity import MIN_TICKS, Clock, clocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MIN_CONFIDENCE = 0.5
_TINY_BYTES = 8
_MIN_OTHER_READS = 0.25
_ENDLESS = 62
_MAX_RATED = 4
_MAX_RATIO = 4
_MAX_DRIFT = 0.5
_PLACED = 0.95
_SEVERAL = 0.6
_UNPLACED = 0.8
_MAYBE_LAYERS = 0.4


@dataclass(frozen=True)
class Detection:
    """Steps found in the events: step k is [rows[k], rows[k + 1]) of ``events``; empty where nothing repeats.

    ``confidence`` is the agreement of the symbols of the beat times the usual likeness of neighbouring steps, from 0 to
    1; below MIN_CONFIDENCE the run is reported as not iterative, with ``rows`` empty. ``method``: 'updates',
    'allocations' or 'none'.
    """

    rows: Array
    confidence: float
    method: str

    @property
    def num_steps(self) -> int:
        """Complete steps."""
        return max(len(self.rows) - 1, 0)

    @property
    def period_events(self) -> int | None:
        """Events of a usual step (median); None where no steps were found."""
        return int(np.median(np.diff(self.rows))) if self.num_steps else None


_NO_ROWS = np.empty(0, np.int64)
_NOTHING = Detection(_NO_ROWS, 0.0, "none")


@dataclass(frozen=True)
class _Lives:
    """Of every block its size, the rows in which it begins and ends (the number of rows: never), and whether an
    operator of the recording made it."""

    size: Array
    begin: Array
    end: Array
    made: Array


def detect(trace: Trace) -> Detection:
    """The steps of a single-rank trace by its events alone, worked out once; marks are not looked at.

    'none' for a file of totals: what repeats in it are totals, not blocks.
    """
    return trace.cached(_detect) if trace.has_blocks else _NOTHING


def _detect(trace: Trace) -> Detection:
    events = trace.columns("events", "kind", "block_id", "size", "op_id")
    lives = _lives(events["kind"], events["block_id"], events["size"])
    likeness = _Likeness(trace, lives)
    tried: list[Detection] = []
    # Where accesses are told, the updates say better where an optimizer ends that has no beat of its own.
    by_stacks = [_by_optimizers, _by_updates]
    for way in by_stacks if find_optimizer_bursts(trace).is_periodic or not likeness.accesses else by_stacks[::-1]:
        if not tried or tried[-1].confidence < MIN_CONFIDENCE:
            tried.append(way(trace, lives, likeness))
    if tried[-1].confidence < MIN_CONFIDENCE:
        tried.append(_by_allocations(trace, lives, likeness))
    best = max(tried, key=lambda one: one.confidence)
    return best if best.confidence >= MIN_CONFIDENCE else Detection(_NO_ROWS, best.confidence, "none")


def _rated(likeness: _Likeness, ends: Array, agreement: float, method: str, *, least: bool = False) -> Detection:
    """The steps between ``ends``, which are places of least memory or told by what updates. Where they hold less than
    half of the events they are taken as less certain, and by least memory as none: the layers of one step have a beat
    of their own, in its backward say.
    """
    if len(ends) < 2:
        return _NOTHING
    rows = _with_cut(ends, likeness.total, least)
    held = float(rows[-1] - rows[0]) / likeness.total
    if least:  # a beat within steps, with something long between them, is none of steps
        length = np.diff(rows)
        held *= float(length[length <= _MAX_RATIO * np.median(length)].sum() / max(length.sum(), 1))
        held = held if held >= 0.5 and likeness.come_again(rows) >= 0.5 else 0.0
    return Detection(rows, round(agreement * likeness.usual(rows) * min(1.0, 2 * held), 4), method)


def _lives(kind: Array, block: Array, size: Array) -> _Lives:
    count, total = int(block.max(initial=-1)) + 1, len(kind)
    begins = np.flatnonzero(((kind == KIND["alloc"]) | (kind == KIND["baseline"])) & (block >= 0))
    ends = np.flatnonzero((kind == KIND["free"]) & (block >= 0))
    sizes, begin = np.zeros(count, np.int64), np.zeros(count, np.int64)
    end, made = np.full(count, total, np.int64), np.zeros(count, bool)
    sizes[block[begins]], begin[block[begins]] = np.maximum(size[begins], 0), begins
    end[block[ends]] = ends
    made[block[begins]] = kind[begins] == KIND["alloc"]
    return _Lives(sizes, begin, end, made)


def _with_cut(ends: Array, total: int, least: bool) -> Array:
    """The first step begins with the trace where what comes before the first end can be a step, and where the ends are
    only the places of least memory the last step ends with it."""
    usual = float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0
    if ends[0] >= 0.5 * min(usual, *np.diff(ends[:2])):
        ends = np.concatenate([[0 if ends[0] <= 3 * usual else ends[0] - int(usual)], ends])
    if least and 0.5 * usual <= total - ends[-1] <= 2 * usual:
        ends = np.append(ends, total)
    return ends


# -- by the stacks of optimizers -----------------------------------------------------------------------------------


def _by_optimizers(trace: Trace, _: _Lives, likeness: _Likeness) -> Detection:
    """The steps by what optimizers allocate, where stacks tell it."""
    ends = find_step_ends(find_optimizer_bursts(trace))
    if len(ends) < MIN_TICKS:
        return _NOTHING
    return _rated(likeness, ends, 1.0, "updates" if likeness.accesses else "allocations")


# -- by updates ----------------------------------------------------------------------------------------------------


def _by_updates(trace: Trace, lives: _Lives, likeness: _Likeness) -> Detection:
    """The steps by the beat of the updated blocks: they end after the last update of each."""
    rows = _update_rows(trace, lives)
    if len(rows) < MIN_TICKS:
        return _NOTHING
    events = trace.columns("events", "block_id", "op_id")
    block = events["block_id"][rows].astype(np.int64)
    name = op_column(trace, events["op_id"][rows], "name").astype(np.int64) + 1
    keys, symbol = np.unique(block * (int(name.max()) + 1) + name, return_inverse=True)
    size = lives.size[keys // (int(name.max()) + 1)].astype(np.float64)
    found = clocks(symbol, rows, size)
    if not found or len(found[0].ticks) < MIN_TICKS:
        return _NOTHING
    clock = found[0]
    followers = np.isin(symbol, clock.symbols)
    return _rated(likeness, _ends_of_bursts(symbol[followers], rows[followers], clock), clock.agreement, "updates")


def _update_rows(trace: Trace, lives: _Lives) -> Array:
    """Writes of long-lived blocks by operators that read the same block and allocate nothing. Those of a backward are
    not meant: they add up gradients.

    Tiny blocks count where others read them too: the parameters of a narrow last layer do, counters of batches do not.
    """
    events = trace.columns("events", "kind", "block_id", "op_id")
    kind, block, op = events["kind"], events["block_id"], events["op_id"]
    long_lived = lives.end - lives.begin >= 0.4 * len(kind)
    rows = np.flatnonzero((kind == KIND["write"]) & (op >= 0))
    rows = rows[long_lived[block[rows]]]
    if not len(rows):
        return rows
    allocates = np.zeros(int(op.max()) + 1, bool)
    allocates[op[(kind == KIND["alloc"]) & (op >= 0)]] = True
    rows = rows[~allocates[op[rows]]]
    rows = rows[op_column(trace, op[rows], "phase") != PHASE["backward"]]
    reads = np.flatnonzero((kind == KIND["read"]) & (op >= 0))
    reads = reads[long_lived[block[reads]]]
    width = len(lives.size)
    num_reads = np.bincount(block[reads], minlength=width)
    reads = reads[~allocates[op[reads]]]
    read_pairs = op[reads].astype(np.int64) * width + block[reads]
    updates: Array = rows[np.isin(op[rows].astype(np.int64) * width + block[rows], read_pairs)]
    num_updates = np.bincount(block[updates], minlength=width)
    telling = (lives.size > _TINY_BYTES) | (num_reads - num_updates >= _MIN_OTHER_READS * num_updates)
    return updates[telling[block[updates]]]


def _ends_of_bursts(symbol: Array, rows: Array, clock: Clock) -> Array:
    """Where each cycle ends: after the symbol behind which the widest pause comes.

    Of several wide pauses (two optimizers that take turns) the one is taken behind which the trace itself begins.
    """
    cycle = np.searchsorted(clock.ticks, rows, side="right") - 1
    inside = (cycle >= 0) & (cycle < len(clock.ticks) - 1)
    length = np.diff(clock.ticks)
    offset = (rows[inside] - clock.ticks[cycle[inside]]) / length[cycle[inside]]
    numbers, local = np.unique(symbol[inside], return_inverse=True)
    order = np.lexsort((offset, local))
    firsts = np.searchsorted(local[order], np.arange(len(numbers)))
    counts = np.bincount(local)
    middle = offset[order][firsts + counts // 2]
    around = np.argsort(middle, kind="stable")
    pause = np.diff(np.append(middle[around], middle[around][0] + 1))
    wide = np.flatnonzero(pause >= 0.5 * pause.max())
    first_seen = np.full(int(symbol.max()) + 1, len(rows))
    first_seen[symbol[::-1]] = rows[::-1]
    after = numbers[around[(wide + 1) % len(around)]]
    last = numbers[around[wide[np.argmin(first_seen[after])]]]
    ends: Array = rows[symbol == last] + 1
    return ends


# -- by allocations ------------------------------------------------------------------------------------------------


def _by_allocations(trace: Trace, lives: _Lives, likeness: _Likeness) -> Detection:
    """The steps by the beat of allocations."""
    made = np.flatnonzero(lives.made)
    if len(made) < 2 * MIN_TICKS:
        return _NOTHING
    made = made[np.argsort(lives.begin[made], kind="stable")]
    begin, end = lives.begin[made], lives.end[made]
    lasts = np.searchsorted(begin, end) - np.arange(len(made))
    never = end >= likeness.total
    bucket = np.where(never, _ENDLESS, np.log2(np.maximum(lasts, 1)).astype(np.int64) // 2)
    site = np.unique(site_of_rows(trace, begin), return_inverse=True)[1]
    size_code = np.unique(lives.size[made], return_inverse=True)[1]
    symbol = np.unique((site * (int(size_code.max()) + 1) + size_code) * 64 + bucket, return_inverse=True)[1]
    found = clocks(symbol, np.arange(len(made)), np.ones(int(symbol.max()) + 1))
    usable = [clock for clock in found if len(clock.ticks) >= MIN_TICKS and len(clock.symbols) > 1][:_MAX_RATED]
    live = _live_bytes(trace, lives)
    phases = _Phases(trace, begin, site)
    rated, certainty = [], []
    for clock in usable:
        least = _least_live(live, begin[clock.ticks])
        certainty.append(phases.certainty(least, np.isin(symbol, clock.symbols)))
        none = certainty[-1] == 0 or _piles_up(live, least)
        agreement = 0.0 if none else clock.agreement
        rated.append((clock, _rated(likeness, phases.placed(least), agreement, "allocations", least=True)))
    if not rated:
        return _NOTHING
    steps = _shortest_whole(rated, symbol, np.where(never, 0, lasts))
    sure = next(one for one, (_, of_clock) in zip(certainty, rated, strict=True) if of_clock is steps)
    return replace(steps, confidence=round(sure * steps.confidence, 4))


class _Phases:
    """What is told of backward and optimizer beside the beat of allocations, at the rows of all allocations."""

    def __init__(self, trace: Trace, rows: Array, site: Array) -> None:
        op = trace.columns("events", "op_id")["op_id"][rows]
        self._rows, self._bursts = rows, find_optimizer_bursts(trace)
        in_backward = op_column(trace, op, "phase") == PHASE["backward"]
        self._backward = rows[in_backward]
        self._in_module = op_column(trace, op, "module") >= 0
        self._told = site > 0
        # What a step begins with is what the trace has before its first backward.
        before = rows < self._backward[0] if len(self._backward) else np.zeros(len(rows), bool)
        named = rows[self._told & ~in_backward]
        begins = np.isin(site[self._told & ~in_backward], site[before & self._told])
        # An optimizer has one or the other operator of the forward too, but not several in a row.
        several = begins & np.append(begins[1:], True) & np.append(begins[2:], [True, True])[: len(begins)]
        self._begins = named[several]

    def placed(self, ends: Array) -> Array:
        """The ends of least memory, put behind the optimizer: before the first allocation after the last backward that
        a step may begin with. Gradients may be freed only then, and data be made before."""
        if not len(self._backward) or not len(self._begins):
            return ends
        last = np.searchsorted(self._backward, ends) - 1
        ends, last = ends[last >= 0], last[last >= 0]
        after = np.searchsorted(self._begins, self._backward[last])
        known = after < len(self._begins)
        return np.unique(np.where(known, self._begins[np.minimum(after, len(self._begins) - 1)], ends))

    def certainty(self, ends: Array, followers: Array) -> float:
        """How far the ends may be those of steps: 0 where they cut an optimizer's step, or where there is a backward
        and most have none; less where they have several, after each of which the optimizer may have been; little where
        neither backward nor modules tell a step from one layer of many."""
        burst = np.searchsorted(self._bursts.first, ends, side="right") - 1
        cuts = (burst >= 0) & (ends < np.append(self._bursts.end, 0)[burst])
        if 2 * cuts.sum() > len(ends):
            return 0.0
        if len(self._backward):
            # Each is told by its first row; where nothing is known that a step begins with, every row must do.
            after = np.unique(np.searchsorted(self._backward, self._begins))
            passes = self._backward[after[after < len(self._backward)]] if len(after) else self._backward
            each = np.diff(np.searchsorted(passes, ends))
            if 2 * (each > 0).sum() < len(each):
                return 0.0
            return _PLACED if not len(after) or 2 * (each > 1).sum() <= len(each) else _SEVERAL
        if self._told[followers].any() and not self._in_module[followers].any():
            return _MAYBE_LAYERS
        return _UNPLACED


def site_of_rows(trace: Trace, rows: Array) -> Array:
    """A number for the site of each row of events: its operator's stack, module and name; 0 where none is known.

    One line may call every layer of a model: the module tells them apart, so that they are no steps.
    """
    op = trace.columns("events", "op_id")["op_id"][rows]
    site = np.zeros(len(rows), np.int64)
    for column in ("stack", "module", "name"):
        code = op_column(trace, op, column).astype(np.int64) + 1
        site = site * (int(code.max(initial=0)) + 1) + code
    return site


def _shortest_whole(rated: list[tuple[Clock, Detection]], symbol: Array, lasts: Array) -> Detection:
    """The steps of the quickest likely beat, or of a slower one when blocks on that live through several of its cycles.

    Gradients that live through the micro-batches of one step show that those are not steps.
    """
    best = max(one.confidence for _, one in rated)
    likely = [pair for pair in rated if pair[1].confidence >= 0.9 * best and pair[0].weight >= 0.2 * rated[0][0].weight]
    likely = sorted(likely, key=lambda pair: -len(pair[0].ticks)) or rated
    places = np.arange(len(symbol))
    clock, steps = likely[0]
    while True:
        crossed = np.searchsorted(clock.ticks, places + lasts) - np.searchsorted(clock.ticks, places)
        outliving = np.unique(symbol[crossed >= 2])
        slower = [
            pair
            for pair in likely
            if len(pair[0].ticks) <= 0.6 * len(clock.ticks) and len(np.intersect1d(pair[0].symbols, outliving)) > 1
        ]
        if not slower:
            return steps
        clock, steps = slower[0]


def _piles_up(live: Array, ends: Array) -> bool:
    """Whether what is live from cycle to cycle changes by most of what a cycle needs: so do the layers of one forward,
    whose activations stay, and those of one backward, which frees them."""
    if len(ends) < 2:
        return False
    level = live[ends[:-1] - 1]
    top = np.maximum.reduceat(live, ends[:-1])
    drift = abs(float(np.median(np.diff(level)))) if len(level) > 1 else 0.0
    return drift > _MAX_DRIFT * float(np.median(top - level))


def _live_bytes(trace: Trace, lives: _Lives) -> Array:
    """The bytes live after each row, less those of the start."""
    events = trace.columns("events", "kind", "block_id")
    kind, block = events["kind"], events["block_id"]
    change = np.where(kind == KIND["alloc"], 1, np.where(kind == KIND["free"], -1, 0))
    live: Array = np.cumsum(np.where(block >= 0, change * lives.size[block], 0))
    return live


def _least_live(live: Array, ticks: Array) -> Array:
    """The row in each cycle after which the least is live, the last of equals: steps end there.

    A cycle whose least is elsewhere than in most (in the first one nothing is kept yet) ends where the others do.
    """
    inside, length = live[ticks[0] : ticks[-1]], np.diff(ticks)
    low = np.minimum.reduceat(inside, ticks[:-1] - ticks[0])
    cycle = np.repeat(np.arange(len(low)), length)
    lowest = np.flatnonzero(inside == low[cycle])
    last = np.zeros(len(low), np.int64)
    last[cycle[lowest]] = lowest
    offset = last + ticks[0] - ticks[:-1]
    usual = int(np.median(offset[len(offset) // 2 :]))
    elsewhere = np.abs(offset - usual) > 0.1 * length
    offset[elsewhere] = np.minimum(usual, length[elsewhere] - 1)
    ends = ticks[:-1] + offset + 1
    return np.append(ends, ticks[-1] + usual + 1) if ticks[-1] + usual < len(live) else ends


class _Likeness:
    """How alike neighbouring steps are: the share of allocations and accesses of one site that both have, and of the
    blocks."""

    def __init__(self, trace: Trace, lives: _Lives) -> None:
        kind = trace.columns("events", "kind")["kind"]
        self.total = len(kind)
        self.accesses = bool((kind == KIND["write"]).any())
        self._trace, self._lives = trace, lives
        self._rows = np.flatnonzero((kind == KIND["alloc"]) | (kind == KIND["write"]))
        site = site_of_rows(trace, self._rows)
        self._symbol = np.unique(site * 16 + kind[self._rows], return_inverse=True)[1]
        if not len(self._symbol) or self._symbol.max() <= 1:  # no sites are told: sizes must do
            size = trace.columns("events", "size")["size"][self._rows]
            self._symbol = np.unique(size, return_inverse=True)[1]

    def usual(self, bounds: Array) -> float:
        """The median over the steps of the better likeness to the one before and the one after."""
        steps = len(bounds) - 1
        if steps < 2:
            return 0.0
        step = np.searchsorted(bounds, self._rows, side="right") - 1
        inside = (step >= 0) & (step < steps)
        keys, number = np.unique(self._symbol[inside].astype(np.int64) * (steps + 1) + step[inside], return_counts=True)
        total = np.maximum(np.bincount(step[inside], minlength=steps), 1)
        follows = np.flatnonzero(np.diff(keys) == 1)
        shared = np.bincount(
            keys[follows] % (steps + 1), weights=np.minimum(number[follows], number[follows + 1]), minlength=steps
        )[: steps - 1]
        alike = shared / np.maximum(total[:-1], total[1:])
        return float(np.median(np.maximum(np.append(alike, 0), np.append(0, alike))))

    def come_again(self, bounds: Array) -> float:
        """The median over the steps of the share of the older blocks which a step touches that the one before touched
        or made: steps share the weights, a loop over layers or parameters goes on to others. 1 without accesses."""
        kind, block = (self._trace.columns("events", "kind", "block_id")[name] for name in ("kind", "block_id"))
        rows = np.flatnonzero((kind == KIND["alloc"]) | (kind == KIND["read"]) | (kind == KIND["write"]))
        rows = rows[(rows >= bounds[0]) & (rows < bounds[-1])]
        if (kind[rows] == KIND["alloc"]).all():
            return 1.0
        rows = rows[np.argsort(block[rows], kind="stable")]
        step, mine = np.searchsorted(bounds, rows, side="right") - 1, block[rows]
        same = np.append(False, mine[1:] == mine[:-1])
        since = np.where(same, np.diff(step, prepend=0), -1)
        older = ~self._lives.made[mine] | (self._lives.begin[mine] < bounds[step])
        count = len(bounds) - 1
        touched = np.bincount(step[older & (since != 0)], minlength=count)[1:]
        again = np.bincount(step[older & (since == 1)], minlength=count)[1:]
        told = touched > 0
        return float(np.median(again[told] / touched[told])) if told.any() else 1.0
