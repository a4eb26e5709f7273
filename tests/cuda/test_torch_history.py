"""CUDA recordings equal torch's own history, event by event, and the allocator's model replays them exactly.

Every case runs in a process of its own, on a GPU or on the null device (``make test-cuda``, ``make test-cuda-null``).
CUDA_FUZZ_SEEDS is the number of random programs for each setting.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.cuda.case import Case
from tests.cuda.case_server import CaseServer
from tests.cuda.programs import PROGRAMS, RANDOM
from tests.cuda.settings import SETTINGS, on_null_device

pytestmark = pytest.mark.cuda
NUM_SEEDS = int(os.environ.get("CUDA_FUZZ_SEEDS", "3"))


def skip_unless_possible(program: str, setting: str) -> None:
    """Skip a case that needs the null device or more devices than there are; the null device has any number."""
    if on_null_device():
        return
    if SETTINGS[setting].null_device:
        pytest.skip("only the null device can delay events")
    num_devices = max(PROGRAMS[program].min_devices, SETTINGS[setting].num_devices)
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"needs {num_devices} GPUs")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != RANDOM])
def test_a_recording_equals_the_history_of_torch(
    program: str, setting: str, tmp_path: Path, cases: CaseServer, record_property: pytest.RecordProperty
) -> None:
    skip_unless_possible(program, setting)
    check(Case(program, setting, str(tmp_path / "run.memtrace")), cases, record_property)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_recording_of_a_random_program_equals_the_history_of_torch(
    seed: int, setting: str, tmp_path: Path, cases: CaseServer, record_property: pytest.RecordProperty
) -> None:
    skip_unless_possible(RANDOM, setting)
    check(Case(RANDOM, setting, str(tmp_path / "run.memtrace"), seed), cases, record_property)


def check(case: Case, cases: CaseServer, record_property: pytest.RecordProperty) -> None:
    """Run a case; its result becomes a cell of the table that is printed at the end."""
    result = cases.run(case)
    outcome = "recording" if result.differences else "plan" if result.plan_difference else "equal"
    record_property("cuda_case", (case.program, case.setting, outcome))
    assert result.num_events > 0
    assert not result.differences, "\n".join(result.differences)
    assert result.plan_difference is None, result.plan_difference
