"""The model against what torch 2.13's own allocator answered (golden.jsonl.gz; see oracle/README.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from memtrace.planning.allocator.plan import case_of
from memtrace.planning.allocator.reproduce import reproduce
from memtrace.planning.allocator.settings import Settings
from memtrace.planning.allocator.what_if import outcome
from tests.allocator.oracle.machine import Answer, Operation
from tests.allocator.recorded import Follower, cut, history_of

GOLDEN = Path(__file__).parent / "golden.jsonl.gz"


@dataclass(frozen=True)
class Golden:
    name: str
    settings: str
    capacity: int
    order: int
    operations: list[Operation]
    answer: Answer

    def __str__(self) -> str:
        return f"{self.name} {self.settings or 'default'}"


def _cases() -> Iterator[Golden]:
    for line in gzip.decompress(GOLDEN.read_bytes()).decode().splitlines():
        case = json.loads(line)
        operations = [tuple(operation) for operation in case.pop("operations")]
        yield Golden(operations=operations, answer=Answer(**case.pop("answer")), **case)


CASES = list(_cases())
REPLAYABLE = [case for case in CASES if "fraction" not in case.settings]  # the fraction is in no snapshot


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_model_does_what_the_allocator_does(case: Golden) -> None:
    follower = Follower(case.settings, case.capacity, case.order)
    for operation, entries in zip(case.operations, case.answer.entries, strict=True):
        follower.follow(operation, entries)
    follower.check_state(case.answer)


@pytest.mark.parametrize("case", REPLAYABLE, ids=str)
def test_its_history_replays_exactly(case: Golden) -> None:
    history = history_of(case.operations, case.answer, case.settings, case.capacity)
    prepared, result = reproduce(history)
    assert result.is_exact, result.reason
    assert result.final_blocks_match
    assert result.peak_reserved_bytes == case.answer.peak_reserved
    assert not prepared.start.num_contradictions
    ends = prepared.bracket.ends
    assert ends is None or ends[0] <= case.capacity <= ends[1]


@pytest.mark.parametrize("case", REPLAYABLE, ids=str)
@pytest.mark.parametrize("share", (0.1, 0.25, 0.5, 0.75, 0.9))
def test_a_cut_history_replays_exactly(case: Golden, share: float) -> None:
    history = history_of(case.operations, case.answer, case.settings, case.capacity)
    _, result = reproduce(cut(history, int(share * len(history))))
    assert result.is_exact, result.reason
    assert result.final_blocks_match


def test_other_settings_are_predicted_from_the_default_recording() -> None:
    """One program recorded under the defaults; its peak under each setting as torch itself had it."""
    runs = {case.settings: case for case in CASES if case.name.startswith("training") and case.capacity > 1 << 31}
    default = runs[""]
    prepared, result = reproduce(history_of(default.operations, default.answer, "", default.capacity))
    assert result.is_exact
    asked = replace(case_of(prepared), capacity=None)
    predicted = {text: outcome(asked, Settings.parse(text)).peak_reserved for text in runs}
    assert predicted == {text: case.answer.peak_reserved for text, case in runs.items()}
    assert len(set(predicted.values())) > 5, "the settings must differ for this to show anything"
