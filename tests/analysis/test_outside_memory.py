"""Memory outside torch's allocator in the explanation of an out-of-memory error."""

from __future__ import annotations

from typing import Any

import pytest

from memtrace.analysis.oom import OutOfMemory, explain_out_of_memory
from memtrace.analysis.outside_memory import OutsideMemory, describe_outside_memory
from memtrace.format.manifest import DeviceInfo
from tests.builders import event, trace_of, with_manifest

GIB = 1 << 30


def explain(
    *, total_bytes: int | None, free_bytes: int | None, readings: list[int] | None = None, asked_bytes: int = GIB
) -> OutOfMemory:
    """Explain a request that failed at 100 ns with 4 GiB reserved; ``readings`` are outside memory at 10, 20, ... ns."""
    events = [
        event("segment_alloc", None, 0, 4 * GIB, device="cuda:0", address=0, stream=0, pool=0),
        event("alloc", 0, 1, 4 * GIB, device="cuda:0", address=0, stream=0, pool=0),
        event("oom", None, 100, asked_bytes, device="cuda:0", stream=0, pool=0, device_free=free_bytes),
    ]
    counters: list[dict[str, Any]] = []
    for number, outside in enumerate(readings or []):
        values = {"allocated": 4 * GIB, "reserved": 4 * GIB, "device_used": 4 * GIB + outside}
        counters += [
            {"time_ns": 10 * (number + 1), "device": "cuda:0", "name": name, "value": value}
            for name, value in values.items()
        ]
    trace = with_manifest(
        trace_of(events=events, counters=counters), devices={"cuda:0": DeviceInfo(total_bytes=total_bytes)}
    )
    (failure,) = explain_out_of_memory(trace)
    return failure


def test_memory_outside_the_allocator_is_what_is_neither_free_nor_reserved() -> None:
    failure = explain(total_bytes=8 * GIB, free_bytes=GIB // 2, readings=[GIB // 4, GIB // 4])
    assert failure.outside == OutsideMemory(7 * GIB // 2, 13 * GIB // 4, is_exact=True)


def test_memory_that_another_process_took_may_be_the_reason() -> None:
    failure = explain(total_bytes=8 * GIB, free_bytes=GIB // 2, readings=[GIB // 4])
    assert failure.advice[0].startswith("Check for other processes on the device")
    assert "3.25 GiB more than when the recording began" in failure.advice[0]
    assert "with 512 MiB of them" in failure.advice[0]


def test_a_request_that_other_processes_leave_no_room_for_is_not_called_too_large() -> None:
    failure = explain(total_bytes=16 * GIB, free_bytes=GIB, readings=[GIB // 4], asked_bytes=6 * GIB)
    assert failure.outside is not None and failure.outside.bytes == 11 * GIB
    assert failure.advice[0].startswith("Check for other processes")
    assert not any(sentence.startswith("Request less") for sentence in failure.advice)


def test_the_context_of_the_process_itself_is_not_blamed() -> None:
    failure = explain(total_bytes=5 * GIB, free_bytes=GIB // 2, readings=[GIB // 2])
    assert failure.outside == OutsideMemory(GIB // 2, 0, is_exact=True)
    assert not any("other processes" in sentence for sentence in failure.advice)


def test_much_memory_that_was_in_use_from_the_beginning_is_blamed_too() -> None:
    failure = explain(total_bytes=8 * GIB, free_bytes=0, readings=[4 * GIB])
    assert "4.00 GiB are in use outside torch's allocator. The request" in failure.advice[0]


def test_without_the_size_of_the_device_the_last_reading_counts() -> None:
    failure = explain(total_bytes=None, free_bytes=0, readings=[GIB, 3 * GIB])
    assert failure.outside == OutsideMemory(3 * GIB, 2 * GIB, is_exact=False)
    assert "when it was last read" in describe_outside_memory(failure.outside)


@pytest.mark.parametrize("free_bytes", [None, 0])
def test_what_is_not_known_is_unknown(free_bytes: int | None) -> None:
    failure = explain(total_bytes=None, free_bytes=free_bytes)
    assert failure.outside is None
    assert "unknown" in describe_outside_memory(failure.outside)
    assert not any("other processes" in sentence for sentence in failure.advice)
