"""Infers which completed frees before a release belong to a wait for the streams, where the entries allow both.

A replay shows the first request that the model serves differently. The cause is mostly the last ambiguous release
before it, so the ambiguous ones are read the other way in turn, the last first, and a reading is kept where the replay
then gets further.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from memtrace.allocator.history import ALLOC
from memtrace.allocator.history_operations import extract_operations, find_waits
from memtrace.allocator.replay import PreparedHistory, recorded_segment_events, run_history

_MAX_REPLAYS: Final = 40
_MAX_ENTRIES: Final = 4_000_000  # entries replayed in all: a few seconds


def infer_waits(prepared: PreparedHistory) -> PreparedHistory:
    """Return the history with the reading of ambiguous waits under which its replay gets furthest."""
    history = prepared.history
    ambiguous = [wait.served for wait in find_waits(history, prepared.start, prepared.releases) if wait.is_ambiguous]
    request = _first_inexact_request(prepared) if ambiguous else None
    number, reversed_waits = history.request_numbers(), frozenset[int]()
    for _ in range(min(_MAX_REPLAYS, _MAX_ENTRIES // max(1, len(history)))):
        candidates = [row for row in ambiguous if request is not None and number[row] <= request]
        if not candidates or request is None:
            break
        ambiguous.remove(candidates[-1])
        readings = reversed_waits | {candidates[-1]}
        operations = extract_operations(
            history, prepared.start, prepared.releases, prepared.rules, reversed_waits=readings
        )
        attempt = replace(prepared, operations=operations)
        reached = _first_inexact_request(attempt)
        if reached is None or reached > request:
            prepared, request, reversed_waits = attempt, reached, readings
    return prepared


def _first_inexact_request(prepared: PreparedHistory) -> int | None:
    """Return the number of the first request that the model serves differently, or before which it releases other
    segments; None: there is none."""
    history, (allocator, placed) = prepared.history, run_history(prepared)
    allocs = np.flatnonzero(history.kind == ALLOC)
    num_older = prepared.operations.num_older
    is_wrong = placed.address[num_older : num_older + len(allocs)] != history.address[allocs]
    requests = history.request_numbers()[allocs[is_wrong]][:1].tolist()
    recorded, predicted = recorded_segment_events(prepared), allocator.log
    for wanted, event in zip(recorded, predicted, strict=False):
        if wanted != event:
            requests.append(min(wanted.request, event.request))
            break
    else:
        shorter = min(len(recorded), len(predicted))
        requests += [event.request for event in (*recorded[shorter:], *predicted[shorter:])][:1]
    return min(requests, default=None)
