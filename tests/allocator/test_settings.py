from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.allocator.rules import TORCH, round_size
from memtrace.allocator.settings import MIB, Settings
from memtrace.errors import MemtraceError

POWERS = st.sampled_from([0, 1, 2, 4, 8, 16])
DIVISIONS = st.one_of(
    st.just(()),
    st.lists(POWERS, min_size=16, max_size=16).map(tuple).filter(lambda counts: any(c > 1 for c in counts)),
)


@st.composite
def settings(draw: st.DrawFn) -> Settings:
    large = draw(st.sampled_from([12, 20, 40])) * MIB
    return Settings(
        expandable_segments=draw(st.booleans()),
        max_split_bytes=draw(st.none() | st.integers(41, 4096).map(lambda n: n * MIB)),
        roundup_power2_divisions=draw(DIVISIONS),
        garbage_collection_threshold=draw(st.sampled_from([0.0, 0.25, 0.8])),
        memory_fraction=draw(st.sampled_from([None, 0.5, 0.95])),
        large_segment_bytes=large,
        max_non_split_rounding_bytes=draw(st.none() | st.integers(40, 99).map(lambda n: n * MIB)),
    )


@given(settings())
def test_settings_survive_being_written_and_read(one: Settings) -> None:
    assert Settings.parse(str(one)) == one


VALID = [
    "",
    "default",
    "expandable_segments:True",
    "max_split_size_mb:21",
    "max_split_size_mb: 64 , garbage_collection_threshold:0.5",
    "roundup_power2_divisions:[64:8,256:4,>:2]",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "backend:native,pinned_use_background_threads:True",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
]
INVALID = [
    ("max_split_size_mb:20", "at least 21"),
    ("max_split_size_mb:0", "at least 21"),
    ("max_split_size_mb:-5", "whole number"),
    ("max_split_size_mb:large", "whole number"),
    ("max_split_size_mb", "write key:value"),
    ("max_split_size_mb:30,large_segment_size_mb:40", "at least 40"),
    ("large_segment_size_mb:10", "above 10"),
    ("max_non_split_rounding_mb:19", "at least 20"),
    ("garbage_collection_threshold:0", "between 0 and 1"),
    ("garbage_collection_threshold:1", "between 0 and 1"),
    ("garbage_collection_threshold:half", "a number"),
    ("per_process_memory_fraction:1.5", "between 0 and 1"),
    ("roundup_power2_divisions:3", "power of two"),
    ("roundup_power2_divisions:[3:2]", "power of two"),
    ("roundup_power2_divisions:[64:3]", "power of two"),
    ("roundup_power2_divisions:[64:4", "closing bracket"),
    ("max_split_size_mb:99999999999999999999", "whole number of MiB"),
    ("max_split_size_mb:\u00b2", "whole number of MiB"),
    ("expandable_segments:true", "True or False"),
    ("expandable:True", "unknown allocator setting"),
    ("backend:cudaMallocAsync", "another allocator"),
]


@pytest.mark.parametrize("text", VALID)
def test_what_torch_takes_is_taken(text: str) -> None:
    Settings.parse(text)


@pytest.mark.parametrize(("text", "why"), INVALID)
def test_what_torch_refuses_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(MemtraceError, match=why):
        Settings.parse(text)


def test_torch_itself_agrees_on_what_is_valid() -> None:
    """The installed torch's own parser, in a process of its own; 20 MiB it takes since 2.10, before it did not."""
    program = (
        "import sys, torch\n"
        "for text in sys.stdin.read().splitlines():\n"
        "    try:\n        torch._C._accelerator_setAllocatorSettings(text)\n        print('yes')\n"
        "    except Exception:\n        print('no')\n"
    )
    known = [text for text in VALID if not text.startswith(("default", "PYTORCH", "backend"))]
    refused = [
        text for text, _ in INVALID
        if not text.startswith(("max_split_size_mb:20", "max_split_size_mb:-", "per_process", "backend", "expandable:"))
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], input="\n".join(known + refused), capture_output=True, text=True, check=False
    )
    if "_accelerator_setAllocatorSettings" in done.stderr:
        pytest.skip("this torch has no allocator settings without CUDA")
    answers = done.stdout.split()
    assert answers == ["yes"] * len(known) + ["no"] * len(refused), list(zip(known + refused, answers, strict=False))


def test_the_list_form_of_roundup_fills_as_torch_does() -> None:
    # Seen in torch 2.13: [64:8,256:4] leaves what lies between and above untouched.
    assert Settings.parse("roundup_power2_divisions:[64:8,256:4]").roundup_power2_divisions == (
        *[8] * 7, 0, 4, *[0] * 7,
    )  # fmt: skip
    assert Settings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions == (
        *[1] * 9, 2, 4, *[8] * 5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "text"),
    [
        (None, ""),
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:20,later:7"}, "max_split_size_mb:20"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": 64 * MIB}, "max_split_size_mb:64"),
        ({"max_split_size": -1, "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)}}, ""),
        ({"roundup_power2_divisions": {str(1 << i): 4 for i in range(16)}}, "roundup_power2_divisions:4"),
    ],
)  # fmt: skip
def test_recorded_settings_are_read(recorded: dict[str, object] | None, text: str) -> None:
    assert str(Settings.from_snapshot(recorded)) == text


def rounded_by_hand(size: int, divisions: int) -> int:
    """The least boundary at or above `size`: multiples of 512, or of a power of two over `divisions`."""
    if divisions <= 1 or size <= 512 * divisions or size & (size - 1) == 0:
        return max(512, -(-size // 512) * 512)
    power = 1 << (size.bit_length() - 1)
    return next(edge for k in range(divisions + 1) if (edge := power + k * (power // divisions)) >= size)


@given(st.integers(1, 1 << 36), st.sampled_from([1, 2, 4, 8, 16]))
def test_rounding(size: int, divisions: int) -> None:
    assert round_size(size, (divisions,) * 16, TORCH) == rounded_by_hand(size, divisions)
