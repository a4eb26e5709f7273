"""The model compared with what the allocator of torch 2.13 did (golden.jsonl.gz; see oracle/README.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from memtrace.allocator.history import AllocatorHistory
from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.plan import workload_of
from memtrace.allocator.replay import prepare_history, replay_history
from memtrace.allocator.rules import TORCH_2_13, Rules
from memtrace.allocator.settings import MIB, AllocatorSettings
from memtrace.allocator.what_if import simulate_settings
from tests.allocator.oracle.machine import Answer, Operation
from tests.allocator.recorded import Follower, drop_first_entries, history_of

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


ALL_SETTINGS = sorted({case.settings for case in CASES})
QUICK_SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:64")
PARTIAL_SETTINGS = [
    pytest.param(text, marks=() if text in QUICK_SETTINGS else pytest.mark.slow) for text in ALL_SETTINGS
]


def cases_with(settings: str) -> list[Golden]:
    cases = [case for case in CASES if case.settings == settings]
    assert cases
    return cases


def history(case: Golden) -> AllocatorHistory:
    return history_of(case.operations, case.answer, case.settings, case.capacity)


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_model_matches_pytorch_after_every_operation(settings: str) -> None:
    for case in cases_with(settings):
        follower = Follower(case.settings, case.capacity, case.order)
        for operation, entries in zip(case.operations, case.answer.entries, strict=True):
            follower.follow(operation, entries)
        follower.check_state(case.answer)


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_history_replays_exactly(settings: str) -> None:
    for case in cases_with(settings):
        prepared, result = reproduce_history(history(case))
        assert result.is_exact, (str(case), result.reason)
        assert result.final_blocks_match
        assert result.peak_reserved_bytes == case.answer.peak_reserved
        assert not prepared.start.num_contradictions
        interval = prepared.capacity.interval
        allowed = int(case.capacity * (AllocatorSettings.parse(settings).memory_fraction or 1))
        assert interval is None or interval[0] <= allowed <= interval[1]


@pytest.mark.parametrize("settings", PARTIAL_SETTINGS)
def test_partial_history_replays_exactly(settings: str) -> None:
    for case in cases_with(settings):
        whole = history(case)
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            _, result = reproduce_history(drop_first_entries(whole, int(share * len(whole))))
            assert result.is_exact, (str(case), share, result.reason)
            assert result.final_blocks_match


BROKEN = {
    "equal blocks: highest address": replace(TORCH_2_13, tie_break="highest_address"),
    "equal blocks: lowest address": replace(TORCH_2_13, tie_break="address"),
    "first fit by address": replace(TORCH_2_13, fit="first"),
    "no merging": replace(TORCH_2_13, merges_neighbours=False),
    "large blocks are never split": replace(TORCH_2_13, splits_large=False),
    "large blocks are split for a remainder of 512 bytes": replace(TORCH_2_13, min_large_remainder_bytes=512),
    "a remainder of exactly 1 MiB is split off": replace(TORCH_2_13, min_large_remainder_bytes=MIB),
    "expandable segments keep the 1 MiB rule": replace(TORCH_2_13, splits_expandable_like_small=False),
    "1 MiB goes to the large pool": replace(TORCH_2_13, small_request_bytes=MIB - 1),
    "10 MiB takes a 20 MiB segment": replace(TORCH_2_13, min_large_alloc_bytes=10 * MIB + 1),
    "segments are not rounded to 2 MiB": replace(TORCH_2_13, round_large_bytes=512),
    "requests are rounded to 256": replace(TORCH_2_13, min_block_bytes=256),
    "streams are ignored": replace(TORCH_2_13, separates_streams=False),
    "the small pool is released first": replace(TORCH_2_13, releases_large_first=False),
    "a block is free when the program frees it": replace(TORCH_2_13, frees_at="request"),
}


def replays_exactly(recorded: AllocatorHistory, rules: Rules) -> bool:
    result = replay_history(prepare_history(recorded, rules))[0]
    return result.is_exact and result.final_blocks_match


@pytest.mark.parametrize("rule", BROKEN)
def test_changing_a_rule_breaks_a_replay(rule: str) -> None:
    """Some history, whole or partial, replays under the true rules only."""
    for case in CASES:
        whole = history(case)
        for recorded in (whole, drop_first_entries(whole, len(whole) // 2), drop_first_entries(whole, len(whole) // 4)):
            if replays_exactly(recorded, TORCH_2_13) and not replays_exactly(recorded, BROKEN[rule]):
                return
    pytest.fail("no history distinguishes this rule from the true one")


def test_peaks_under_other_settings_are_predicted_from_a_default_recording() -> None:
    """One program recorded with the default settings: its predicted peak under each setting is PyTorch's."""
    runs = {case.settings: case for case in CASES if case.name.startswith("training") and case.capacity > 1 << 31}
    default = runs[""]
    prepared, result = reproduce_history(history(default))
    assert result.is_exact
    workload = replace(workload_of(prepared), capacity=None)
    predicted = {text: simulate_settings(workload, AllocatorSettings.parse(text)).peak_reserved for text in runs}
    assert predicted == {text: case.answer.peak_reserved for text, case in runs.items()}
    assert len(set(predicted.values())) > 5, "the settings must have different peaks, or the test shows nothing"
