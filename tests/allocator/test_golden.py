"""The model against what torch 2.13's own allocator answered (golden.jsonl.gz; see oracle/README.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from memtrace.allocator.history import History
from memtrace.allocator.infer_rules import reproduce
from memtrace.allocator.plan import case_of
from memtrace.allocator.replay import prepare, replay
from memtrace.allocator.rules import TORCH_2_13, Rules
from memtrace.allocator.settings import MIB, Settings
from memtrace.allocator.what_if import outcome
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


def of(settings: str, cases: list[Golden] = CASES) -> list[Golden]:
    found = [case for case in cases if case.settings == settings]
    assert found
    return found


def history(case: Golden) -> History:
    return history_of(case.operations, case.answer, case.settings, case.capacity)


@pytest.mark.parametrize("settings", sorted({case.settings for case in CASES}))
def test_the_model_does_what_the_allocator_does(settings: str) -> None:
    for case in of(settings):
        follower = Follower(case.settings, case.capacity, case.order)
        for operation, entries in zip(case.operations, case.answer.entries, strict=True):
            follower.follow(operation, entries)
        follower.check_state(case.answer)


@pytest.mark.parametrize("settings", sorted({case.settings for case in CASES}))
def test_its_history_replays_exactly(settings: str) -> None:
    for case in of(settings):
        prepared, result = reproduce(history(case))
        assert result.is_exact, (str(case), result.reason)
        assert result.final_blocks_match
        assert result.peak_reserved_bytes == case.answer.peak_reserved
        assert not prepared.start.num_contradictions
        ends = prepared.bracket.ends
        allowed = int(case.capacity * (Settings.parse(settings).memory_fraction or 1))
        assert ends is None or ends[0] <= allowed <= ends[1]


@pytest.mark.parametrize("settings", sorted({case.settings for case in CASES}))
def test_a_cut_history_replays_exactly(settings: str) -> None:
    for case in of(settings):
        whole = history(case)
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            _, result = reproduce(cut(whole, int(share * len(whole))))
            assert result.is_exact, (str(case), share, result.reason)
            assert result.final_blocks_match


BROKEN = {
    "ties by the highest address": replace(TORCH_2_13, tie="highest"),
    "ties by the lowest address": replace(TORCH_2_13, tie="address"),
    "first fit by address": replace(TORCH_2_13, fit="first"),
    "no merging": replace(TORCH_2_13, merge=False),
    "large blocks are never split": replace(TORCH_2_13, split_large=False),
    "large blocks are split when 512 bytes are left": replace(TORCH_2_13, min_large_remainder_bytes=512),
    "a remainder of exactly 1 MiB is split off": replace(TORCH_2_13, min_large_remainder_bytes=MIB),
    "expandable segments keep the 1 MiB rule": replace(TORCH_2_13, expandable_splits_as_small=False),
    "1 MiB goes to the large pool": replace(TORCH_2_13, small_limit_bytes=MIB - 1),
    "10 MiB takes a segment of 20": replace(TORCH_2_13, own_segment_bytes=10 * MIB + 1),
    "segments are not rounded to 2 MiB": replace(TORCH_2_13, segment_round_bytes=512),
    "requests are rounded to 256": replace(TORCH_2_13, round_bytes=256),
    "streams are ignored": replace(TORCH_2_13, separate_streams=False),
    "the small pool is given back first": replace(TORCH_2_13, release_large_first=False),
    "a block is free when the program gives it back": replace(TORCH_2_13, free_at="requested"),
}


def holds(recorded: History, rules: Rules) -> bool:
    result = replay(prepare(recorded, rules))[0]
    return result.is_exact and result.final_blocks_match


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found_out(rule: str) -> None:
    """By a history of the allocator that only the true rules replay; cut too, for what is older than that."""
    for case in CASES:
        whole = history(case)
        for recorded in (whole, cut(whole, len(whole) // 2), cut(whole, len(whole) // 4)):
            if holds(recorded, TORCH_2_13) and not holds(recorded, BROKEN[rule]):
                return
    pytest.fail("no history tells this rule from the true one")


def test_other_settings_are_predicted_from_the_default_recording() -> None:
    """One program recorded under the defaults; its peak under each setting as torch itself had it."""
    runs = {case.settings: case for case in CASES if case.name.startswith("training") and case.capacity > 1 << 31}
    default = runs[""]
    prepared, result = reproduce(history(default))
    assert result.is_exact
    asked = replace(case_of(prepared), capacity=None)
    predicted = {text: outcome(asked, Settings.parse(text)).peak_reserved for text in runs}
    assert predicted == {text: case.answer.peak_reserved for text, case in runs.items()}
    assert len(set(predicted.values())) > 5, "the settings must differ for this to show anything"
