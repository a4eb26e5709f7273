"""Programs of more than a hundred kinds compute the same bits with a recording as without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import memtrace
from memtrace.analysis.peak import find_peak
from tests.programs.kinds import load_kinds

ROOT = Path(__file__).parents[2]
WITHOUT_MEMORY = {"fake_tensors"}
"""Programs whose own tensors take no memory."""

pytestmark = pytest.mark.slow
RunKinds = Callable[[str], dict[str, str]]


@pytest.fixture(scope="session")
def run_kinds(tmp_path_factory: pytest.TempPathFactory) -> RunKinds:
    """Runs all programs in one process under an observer, or without a recording if its name is empty."""
    folder = tmp_path_factory.mktemp("kinds")

    @cache
    def run(observer: str) -> dict[str, str]:
        command = [sys.executable, "-m", "tests.programs.run_kinds"]
        if observer:
            command += ["--record", str(folder / observer), "--observer", observer]
        # Every process generates code for itself, so that no cache decides which code runs; equal code is compiled once.
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        }
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        if result.returncode != 0:
            return dict.fromkeys(load_kinds(), f"the process failed: {result.stderr[-2000:]}")
        digests: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
        for name in digests if observer else ():
            digests[name] += _fault_of_trace(folder / observer / f"{name}.memtrace", name)
        return digests

    return run


def _fault_of_trace(path: Path, name: str) -> str:
    try:
        trace = memtrace.load(path)
        peak_bytes = find_peak(trace, "cpu").requested.bytes if "cpu" in trace.devices else None
    except memtrace.MemtraceError as error:
        return f" ({error})"
    return "" if peak_bytes or name in WITHOUT_MEMORY else " (the trace is empty)"


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_programs_compute_the_same_bits_with_a_recording(run_kinds: RunKinds, observer: str) -> None:
    expected, recorded = run_kinds(""), run_kinds(observer)
    assert {name: result for name, result in expected.items() if len(result) != 64} == {}, "fail without a recording"
    assert {name: result for name, result in recorded.items() if result != expected[name]} == {}
    assert expected.keys() == recorded.keys() == load_kinds().keys()
