"""``memtrace doctor --build``: what it reports and its exit status, for images of containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner, Result
from memtrace.cli import cli

from memtrace.recording import environment
from memtrace.recording.observers.build import BuildError, NativeBuild

BUILT = NativeBuild(ModuleType("memtrace_native"), Path("/opt/memtrace"), "/usr/bin/c++", None, None, 41.7)
CACHED = NativeBuild(ModuleType("memtrace_native"), Path("/opt/memtrace"), "/usr/bin/c++", None, None)


def doctor(monkeypatch: pytest.MonkeyPatch, outcome: NativeBuild | Exception, *options: str) -> Result:
    """Run ``memtrace doctor`` where loading the native observer has this outcome."""

    def load_native(*, rebuild: bool = False) -> NativeBuild:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(environment, "load_native", load_native)
    return CliRunner().invoke(cli, ["doctor", *options])


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (BUILT, "observer       native, built in 42 s"),
        (CACHED, "observer       native, from the cache"),
        (
            BuildError("no C++ compiler found"),
            "Recording is in pure Python, several times slower: no C++ compiler found.",
        ),
        (RuntimeError("odd"), "Recording is in pure Python, several times slower: RuntimeError: odd."),
    ],
    ids=["built", "cached", "no compiler", "unexpected"],
)
def test_the_exit_status_says_whether_a_recording_is_native(
    monkeypatch: pytest.MonkeyPatch, outcome: NativeBuild | Exception, text: str
) -> None:
    is_native = isinstance(outcome, NativeBuild)
    for option in ("--build", "--rebuild"):
        result = doctor(monkeypatch, outcome, option)
        assert result.exit_code == (0 if is_native else 1)
        assert text in result.output and f"torch headers  {Path(torch.__file__).parent / 'include'}" in result.output
        assert json.loads(doctor(monkeypatch, outcome, option, "--json").output)["environment"]["observer"] == (
            "native" if is_native else "dispatch"
        )
    assert doctor(monkeypatch, outcome).exit_code == 0  # a description of the machine is no failure


def test_the_time_of_a_build_is_in_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome, seconds in ((BUILT, 41.7), (CACHED, None)):
        report = json.loads(doctor(monkeypatch, outcome, "--build", "--json").output)
        assert report["environment"]["build_seconds"] == seconds


def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object')")
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "memtrace.cli", "doctor", "--build", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    report = json.loads(result.stdout)["environment"]
    assert (result.returncode, report["observer"], report["torch_headers"]) == (1, None, None)
    assert "torch cannot be imported (ImportError: libcudart.so.13: cannot open" in report["advice"][0]
    assert "Traceback" not in result.stderr
