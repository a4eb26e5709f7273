"""Replays and predictions compared with what torch's allocator does on the null device (tests/nullcuda) or a GPU."""

from __future__ import annotations

import ctypes
import os

import pytest

from tests.allocator.replay_fuzz import SETTINGS, run_setting
from tests.allocator.what_if_truth import compare_settings

pytestmark = pytest.mark.cuda
NUM_SEEDS = int(os.environ.get("MEMTRACE_REPLAY_SEEDS", "2"))


def is_null_device() -> bool:
    """Whether the null device stands in for the driver, so that the memory of the device can be chosen."""
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "nullcuda_used")
    except OSError:
        return False


@pytest.mark.parametrize("setting", SETTINGS)
def test_recordings_of_random_programs_replay_exactly(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLCUDA_MEMORY", "2GiB")
    for result in run_setting(setting, range(NUM_SEEDS), 150):
        lacks_ages = result.is_mid_run and any("ages of" in difference for difference in result.differences)
        assert not result.differences or lacks_ages, result


@pytest.mark.slow
@pytest.mark.skipif(not is_null_device(), reason="chooses the memory of the device: needs the null device")
def test_settings_do_after_an_out_of_memory_error_what_was_predicted() -> None:
    rows = list(compare_settings())
    assert len(rows) >= 12
    assert not [row for row in rows if not row.is_exact]
