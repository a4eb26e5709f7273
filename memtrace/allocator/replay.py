"""Does the model reproduce a history? Every answer about other settings rests on this check.

The model is told what was asked for and on which stream; the recorded addresses only say where new segments
lie and which block a free is about. Anything less than exact equality is a fault: of the file, or of the
model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.allocator.blocks import Block
from memtrace.allocator.capacity import (
    Bracket,
    Releases,
    bracket,
    failed_requests,
    refused_requests,
    releases,
)
from memtrace.allocator.checks import broken_laws
from memtrace.allocator.compile import compile_history
from memtrace.allocator.devices import INVENTED_FROM, RecordedDevice, Taken
from memtrace.allocator.history import (
    ALLOC,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    History,
    Int64s,
    resolve_pools,
)
from memtrace.allocator.layout import lay_out
from memtrace.allocator.model import Allocator, ListMaker
from memtrace.allocator.program import Program, run
from memtrace.allocator.rules import TORCH, Rules
from memtrace.allocator.start_state import StartState, rebuild

_SEGMENT_KINDS: Final = (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How exactly the model reproduced a history."""

    allocations: int
    allocations_exact: int
    """At their recorded address."""
    segment_events: int
    """segment_* and oom entries of the history."""
    segment_events_exact: int
    """Foretold at their moment, in their order, with their address and size."""
    segment_events_extra: int
    """Foretold but not in the history."""
    peak_reserved_bytes: int
    recorded_peak_reserved_bytes: int
    final_blocks_match: bool
    """Segments and live blocks at the end equal those the history ends with."""
    reason: str | None
    """Why the history cannot be reproduced; None: it is."""
    rules: Rules
    """The rules it was replayed by."""

    @property
    def is_exact(self) -> bool:
        """Every allocation, every segment event and the peak are as recorded."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A history taken apart: start state, releases, capacity, and the program behind it."""

    history: History
    start: StartState
    runs: Releases
    bracket: Bracket
    program: Program
    rules: Rules
    is_cued: bool = False
    """The device refuses when the history says so, for no capacity explains its refusals."""


def prepare(history: History, rules: Rules = TORCH) -> Prepared:
    """Take a history apart."""
    start = rebuild(history, rules)
    runs = releases(history)
    program = compile_history(history, start, runs, rules)
    ends = bracket(history, runs)
    return Prepared(history, start, runs, ends, program, rules, is_cued=not ends.is_consistent)


def fresh_allocator(prepared: Prepared, capacity: int | None = None, make_list: ListMaker | None = None) -> Allocator:
    """An empty allocator whose device answers as the recorded one; the start state goes in with `lay_out`.

    `capacity`: bytes the device gives; None: the least the history allows.
    """
    history, ends = prepared.history, prepared.bracket
    refuses: frozenset[int] = frozenset()
    if prepared.is_cued:
        refuses = frozenset(refused_requests(history, prepared.runs)) | frozenset(failed_requests(history))
    elif capacity is None and ends.high is not None:
        capacity = ends.low
    device = RecordedDevice(_taken(history), capacity, refuses, history.device_bytes)
    settings = history.settings if history.device_bytes else replace(history.settings, memory_fraction=None)
    return Allocator(settings, device, prepared.rules, make_list=make_list)


def replay(prepared: Prepared, capacity: int | None = None) -> tuple[Replay, Allocator | None]:
    """Replay a history and compare; the allocator is in the state at its end (None: no state could be built).

    `capacity`: bytes the device gives; None: the least that the history allows.
    """
    if prepared.start.num_misplaced:
        return _refusal(prepared), None
    allocator = fresh_allocator(prepared, capacity)
    blocks = lay_out(allocator, prepared.start)
    addresses = run(prepared.program, allocator, blocks)
    return _compare(prepared, allocator, addresses, recorded_log(prepared)), allocator


def _taken(history: History) -> list[Taken]:
    rows = np.flatnonzero((history.kind == SEGMENT_ALLOC) | (history.kind == SEGMENT_MAP))
    request = np.cumsum((history.kind == ALLOC) | (history.kind == OOM))[rows] + 1
    mapped = history.kind[rows] == SEGMENT_MAP
    pools = resolve_pools(history)[rows]
    columns = (request, mapped, history.address[rows], history.size[rows], history.stream[rows], pools)
    return [Taken(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def recorded_log(prepared: Prepared) -> list[tuple[int, int, int, int]]:
    """The history's segment events as the model logs them: (requests so far, kind, address, size)."""
    history = prepared.history
    rows = np.flatnonzero(np.isin(history.kind, _SEGMENT_KINDS))
    count = np.cumsum((history.kind == ALLOC) | (history.kind == OOM))
    explicit = np.zeros(len(history) + 1, np.int64)
    ours = prepared.runs.by_program
    np.add.at(explicit, prepared.runs.first[ours], 1)
    np.add.at(explicit, prepared.runs.end[ours], -1)
    within_request = (np.cumsum(explicit)[rows] == 0) & (history.kind[rows] != OOM)
    address = np.where(history.kind[rows] == OOM, 0, history.address[rows])
    columns = (count[rows] + within_request, history.kind[rows], address, history.size[rows])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _compare(
    prepared: Prepared, allocator: Allocator, addresses: Int64s, recorded: list[tuple[int, int, int, int]]
) -> Replay:
    history, program = prepared.history, prepared.program
    allocs = np.flatnonzero(history.kind == ALLOC)
    got = addresses[program.num_older : program.num_older + len(allocs)]
    exact = got == history.address[allocs]
    expected, foretold = _numbered(recorded), _numbered(allocator.log)
    common = len(expected & foretold)
    result = Replay(
        allocations=len(allocs),
        allocations_exact=int(exact.sum()),
        segment_events=len(expected),
        segment_events_exact=common,
        segment_events_extra=len(foretold) - common,
        peak_reserved_bytes=allocator.peak_reserved,
        recorded_peak_reserved_bytes=history.peak_reserved,
        final_blocks_match=_final_match(history, allocator),
        reason=None,
        rules=prepared.rules,
    )
    return replace(result, reason=_reason(result, history, allocs, exact, got, prepared.start))


def _numbered(log: list[tuple[int, int, int, int]]) -> set[tuple[int, int, int, int, int]]:
    """Each event with its place among those of the same request, so that order counts."""
    place, numbered, last = 0, set(), -1
    for event in log:
        place = place + 1 if event[0] == last else 0
        last = event[0]
        numbered.add((place, *event))
    return numbered


def _final_match(history: History, allocator: Allocator) -> bool:
    held = [
        (s[0].address, sum(b.size for b in s), s[0].home.stream, s[0].home.pool.small) for s in allocator.segments()
    ]
    final = history.segments
    columns = (final.address, final.size, final.stream, final.small)
    recorded = zip(*(column.tolist() for column in columns), strict=True)
    blocks = history.blocks
    live = zip(blocks.address.tolist(), blocks.size.tolist(), blocks.requested.tolist(), strict=True)
    return sorted(held) == sorted(recorded) and sorted(map(_true, allocator.live)) == sorted(live)


def _true(block: Block) -> tuple[int, int, int]:
    return block.address, block.size, block.requested


def _reason(
    result: Replay,
    history: History,
    allocs: Int64s,
    exact: np.ndarray[tuple[int], np.dtype[np.bool_]],
    got: Int64s,
    start: StartState,
) -> str | None:
    if result.allocations_exact < result.allocations:
        first = int(np.argmin(exact))
        row = int(allocs[first])
        laws = broken_laws(history, result.rules)
        told = f"; moreover {', '.join(laws)}" if laws else ""
        told += f"; {start.num_contradictions} entries contradict the end" if start.num_contradictions else ""
        return (
            f"the allocator's rules put {result.allocations_exact} of {result.allocations} allocations at "
            f"their recorded address; the first that differs is entry {row} ({history.size[row]} bytes, "
            f"recorded at {history.address[row]:#x}, expected at {_place(int(got[first]))}){told}"
        )
    if result.segment_events_exact < result.segment_events or result.segment_events_extra:
        return (
            f"{result.segment_events_exact} of {result.segment_events} segment events follow from the "
            f"requests, and {result.segment_events_extra} that should have happened are not in the history"
        )
    if result.peak_reserved_bytes != result.recorded_peak_reserved_bytes:
        return f"the peak is {result.recorded_peak_reserved_bytes} bytes, expected {result.peak_reserved_bytes}"
    return None


def _place(address: int) -> str:
    """An address as text; one that the device of a replay made up is of a segment the history knows nothing
    of."""
    return "none" if address < 0 else hex(address) if address < INVENTED_FROM else "a new segment"


def _refusal(prepared: Prepared) -> Replay:
    history = prepared.history
    return Replay(
        allocations=int((history.kind == ALLOC).sum()),
        allocations_exact=0,
        segment_events=int(np.isin(history.kind, _SEGMENT_KINDS).sum()),
        segment_events_exact=0,
        segment_events_extra=0,
        peak_reserved_bytes=0,
        recorded_peak_reserved_bytes=history.peak_reserved,
        final_blocks_match=False,
        reason=f"its segments and entries exclude each other: {prepared.start.num_misplaced} blocks or "
        "segments lie over another or in none, so no allocator can have been in this state",
        rules=prepared.rules,
    )
