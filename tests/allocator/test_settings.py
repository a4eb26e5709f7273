"""Settings: parsing, formatting, and agreement with PyTorch's own parser."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.allocator.rules import TORCH, round_size
from memtrace.allocator.settings import MIB, AllocatorSettings
from memtrace.errors import MemtraceError

POWERS = st.sampled_from([0, 1, 2, 4, 8, 16])
DIVISIONS = st.one_of(
    st.just(()),
    st.lists(POWERS, min_size=16, max_size=16).map(tuple).filter(lambda counts: any(c > 1 for c in counts)),
)


@st.composite
def allocator_settings(draw: st.DrawFn) -> AllocatorSettings:
    large = draw(st.sampled_from([12, 20, 40])) * MIB
    return AllocatorSettings(
        expandable_segments=draw(st.booleans()),
        max_split_bytes=draw(st.none() | st.integers(41, 4096).map(lambda n: n * MIB)),
        roundup_power2_divisions=draw(DIVISIONS),
        garbage_collection_threshold=draw(st.sampled_from([0.0, 0.25, 0.8])),
        memory_fraction=draw(st.sampled_from([None, 0.5, 0.95])),
        large_segment_bytes=large,
        max_non_split_rounding_bytes=draw(st.none() | st.integers(40, 99).map(lambda n: n * MIB)),
    )


@given(allocator_settings())
def test_settings_survive_formatting_and_parsing(settings: AllocatorSettings) -> None:
    assert AllocatorSettings.parse(str(settings)) == settings


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
    ("large_segment_size_mb:10", "must be above 10"),
    ("max_non_split_rounding_mb:19", "at least 20"),
    ("garbage_collection_threshold:0", "between 0 and 1"),
    ("garbage_collection_threshold:1", "between 0 and 1"),
    ("garbage_collection_threshold:half", "must be a number"),
    ("per_process_memory_fraction:1.5", "between 0 and 1"),
    ("roundup_power2_divisions:3", "power of two"),
    ("roundup_power2_divisions:[3:2]", "power of two"),
    ("roundup_power2_divisions:[64:3]", "power of two"),
    ("roundup_power2_divisions:[64:4", "closing bracket"),
    ("max_split_size_mb:99999999999999999999", "whole number of MiB"),
    ("max_split_size_mb:\u00b2", "whole number of MiB"),
    ("expandable_segments:true", "True or False"),
    ("expandable:True", "unknown allocator setting"),
    ("backend:cudaMallocAsync", "different allocator"),
]


@pytest.mark.parametrize("text", VALID)
def test_settings_that_pytorch_accepts_are_parsed(text: str) -> None:
    AllocatorSettings.parse(text)


@pytest.mark.parametrize(("text", "why"), INVALID)
def test_settings_that_pytorch_rejects_raise_an_error_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(MemtraceError, match=why):
        AllocatorSettings.parse(text)


def test_the_installed_pytorch_agrees_on_what_is_valid() -> None:
    """PyTorch's own parser, in a separate process. torch 2.10 and later accept max_split_size_mb:20, earlier ones do not."""
    program = (
        "import sys, torch\n"
        "set_settings = torch._C._accelerator_setAllocatorSettings\n"
        "for text in sys.stdin.read().splitlines():\n"
        "    try:\n        set_settings(text)\n        print('yes')\n"
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


def test_the_list_form_of_roundup_divisions_fills_intervals_like_pytorch() -> None:
    # Observed in torch 2.13: [64:8,256:4] leaves the intervals between and above unset.
    assert AllocatorSettings.parse("roundup_power2_divisions:[64:8,256:4]").roundup_power2_divisions == (
        *[8] * 7, 0, 4, *[0] * 7,
    )  # fmt: skip
    assert AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions == (
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
def test_settings_are_read_from_a_snapshot(recorded: dict[str, object] | None, text: str) -> None:
    assert str(AllocatorSettings.from_snapshot(recorded)) == text


def rounded_by_hand(size: int, divisions: int) -> int:
    """Return the smallest boundary at or above `size`: a multiple of 512, or of a power of two divided by `divisions`."""
    if divisions <= 1 or size <= 512 * divisions or size & (size - 1) == 0:
        return max(512, -(-size // 512) * 512)
    power = 1 << (size.bit_length() - 1)
    return next(edge for k in range(divisions + 1) if (edge := power + k * (power // divisions)) >= size)


@given(st.integers(1, 1 << 36), st.sampled_from([1, 2, 4, 8, 16]))
def test_requests_are_rounded_to_the_next_boundary(size: int, divisions: int) -> None:
    assert round_size(size, (divisions,) * 16, TORCH) == rounded_by_hand(size, divisions)
