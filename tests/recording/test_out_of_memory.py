"""Out-of-memory errors are recorded, and explained when the recording ends."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.oom import explain_out_of_memory
from memtrace.analysis.peak import find_peak
from memtrace.recording import writer
from memtrace.recording.reserve import AddressSpaceReserve
from memtrace.units import format_bytes
from tests.recording.helpers import MIB, PROGRAMS, wait_until

HUGE = 10**15
"""Number of floats that no machine can allocate."""


def test_an_out_of_memory_error_is_explained_and_propagates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(RuntimeError, match="can't allocate memory") as caught,
        memtrace.record(tmp_path / "run.memtrace"),
    ):
        tensor = torch.ones(3 * MIB // 4)
        torch.empty(HUGE)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    del tensor
    printed = capfd.readouterr().err
    assert "out of memory on cpu" in printed.lower() and "test_out_of_memory.py" in printed
    assert format_bytes(3 * MIB) in printed
    trace = memtrace.load(tmp_path / "run.memtrace")
    (failure,) = explain_out_of_memory(trace)
    baseline_bytes = compute_coverage(trace).baseline_bytes  # tensors of modules that other tests imported
    assert (failure.asked_bytes, failure.live_bytes, failure.room) == (4 * HUGE, 3 * MIB + baseline_bytes, None)
    assert failure.device_free_bytes is None
    assert failure.site is not None and "test_an_out_of_memory_error" in failure.site
    assert compute_coverage(trace).stop_reason == "RuntimeError left the recorded block"


def test_every_recording_that_an_error_leaves_explains_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second error is the same object, as if it had got the address of one that is gone."""
    try:
        torch.empty(HUGE)
    except RuntimeError as error:
        for name in ("first", "second"):
            with pytest.raises(RuntimeError), memtrace.record(tmp_path / f"{name}.memtrace"):
                with suppress(RuntimeError):
                    torch.empty(HUGE)
                raise error
            assert "out of memory on cpu" in capfd.readouterr().err.lower(), name


@pytest.mark.skipif(sys.platform != "linux", reason="needs the limit on address space of Linux")
def test_the_explanation_needs_no_memory_of_the_recorded_process(tmp_path: Path) -> None:
    """The frames of the exception keep all tensors alive, so the process has no memory left for an analysis."""
    command = [sys.executable, PROGRAMS / "exhaust_memory.py", tmp_path / "run.memtrace"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "can't allocate memory" in result.stderr.splitlines()[-1]
    assert "out of memory on cpu" in result.stderr.lower() and "exhaust_memory.py" in result.stderr, result.stderr


def program_takes_the_reserve(monkeypatch: pytest.MonkeyPatch, num_times: int) -> None:
    """Let the writer fail to reserve address space ``num_times``, once the recording has begun."""
    acquire, attempts = AddressSpaceReserve.acquire, count()

    def acquire_later(reserve: AddressSpaceReserve) -> None:
        if 0 < next(attempts) <= num_times:
            raise MemoryError("the process is close to its limit")
        acquire(reserve)

    monkeypatch.setattr(AddressSpaceReserve, "acquire", acquire_later)


def test_an_error_is_explained_although_the_program_has_taken_the_reserve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program_takes_the_reserve(monkeypatch, sys.maxsize)
    with pytest.raises(RuntimeError), memtrace.record(tmp_path / "run.memtrace"):
        torch.empty(HUGE)
    assert "out of memory on cpu" in capfd.readouterr().err.lower()
    assert (
        compute_coverage(memtrace.load(tmp_path / "run.memtrace")).stop_reason == "RuntimeError left the recorded block"
    )


def test_a_recording_goes_on_when_there_is_address_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program_takes_the_reserve(monkeypatch, 3)
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.01):
        time.sleep(0.5)
        torch.ones(MIB)
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert compute_coverage(trace).finished
    assert 4 * MIB in trace.events["size"].to_numpy()


def test_a_recording_without_address_space_ends_with_what_it_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program_takes_the_reserve(monkeypatch, sys.maxsize)
    monkeypatch.setattr(writer, "SPACE_SECONDS", 0.2)
    with memtrace.record(tmp_path / "run.memtrace"):
        torch.ones(MIB)
        wait_until(lambda: "close to its limit" in caplog.text)
        torch.ones(2 * MIB)
    trace = memtrace.load(tmp_path / "run.memtrace")
    stop_reason = compute_coverage(trace).stop_reason
    assert stop_reason is not None and stop_reason.startswith("out of memory: the process is close to its limit")
    sizes = trace.events["size"].to_numpy()
    assert 4 * MIB in sizes and 8 * MIB not in sizes


def test_a_failing_explanation_does_not_hide_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memtrace.recording.out_of_memory.run_python", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(RuntimeError, match="can't allocate memory"), memtrace.record(tmp_path / "run.memtrace"):
        torch.empty(HUGE)
    assert "cannot explain the out-of-memory error: division by zero" in caplog.text


def test_a_handled_out_of_memory_error_is_recorded_but_not_explained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with memtrace.record(tmp_path / "run.memtrace"):
        with pytest.raises(RuntimeError):
            torch.empty(HUGE)
        torch.ones(1000)
    assert "out of memory" not in capfd.readouterr().err.lower()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert compute_coverage(trace).finished
    assert len(explain_out_of_memory(trace)) == 1
    assert find_peak(trace, "cpu").requested.bytes == 4000 + compute_coverage(trace).baseline_bytes


def test_other_exceptions_are_not_explained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="mine"), memtrace.record(tmp_path / "run.memtrace"):
        raise ValueError("mine")
    assert "out of memory" not in capfd.readouterr().err.lower()
