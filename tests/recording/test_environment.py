"""Versions outside the tested range, the choice of the observer, and what ``memtrace doctor`` reports about it."""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import memtrace
from memtrace.errors import MemtraceError
from memtrace.recording import environment
from memtrace.recording.environment import examine_environment
from memtrace.recording.observers import build, native_observer, select, versions
from memtrace.recording.observers.build import BuildError, NativeBuild
from memtrace.recording.observers.versions import describe_untested_versions, format_version

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("torch_version", ["2.9.0", "2.9.1+cu128", "2.13.0+cpu", "2.15.0", "2.15.0.dev20270101+cpu"])
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, torch_version: str) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    assert describe_untested_versions() is None


@pytest.mark.parametrize("torch_version", ["2.8.1", "1.13.0", "2.16.0", "2.16.0a0+git1234567", "3.0", "unknown", ""])
def test_other_versions_of_torch_are_recorded_in_pure_python_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, torch_version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    with memtrace.record(tmp_path / "run.memtrace"):
        result = torch.ones(1000).mul(2)
    assert result.sum() == 2000
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"torch {torch_version} is outside the tested range 2.9 to 2.15" in warning
    assert memtrace.load(tmp_path / "run.memtrace").manifest.source.observer == "dispatch"


@pytest.mark.parametrize("python", [(3, 9), (3, 15), (4, 0)])
def test_other_versions_of_python_are_outside_the_range(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int]
) -> None:
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    assert describe_untested_versions() == f"Python {python[0]}.{python[1]} is outside the tested range 3.10 to 3.14"


def test_every_minor_version_of_the_range_is_tried() -> None:
    pythons, torches = (set(column) for column in zip(*versions.TESTED, strict=True))
    for tried, oldest, newest in (
        (pythons, versions.OLDEST_PYTHON, versions.NEWEST_PYTHON),
        (torches, versions.OLDEST_TORCH, versions.NEWEST_TORCH),
    ):
        assert sorted(tried) == [(oldest[0], minor) for minor in range(oldest[1], newest[1] + 1)]


def test_the_package_and_ci_declare_the_tested_range() -> None:
    package = configparser.ConfigParser()
    package.read(ROOT / "setup.cfg")
    oldest_python, newest_python = map(format_version, (versions.OLDEST_PYTHON, versions.NEWEST_PYTHON))
    oldest_torch, newest_torch = map(format_version, (versions.OLDEST_TORCH, versions.NEWEST_TORCH))
    assert package["options"]["python_requires"] == f">={oldest_python}"
    assert f"torch >= {oldest_torch}" in package["options"]["install_requires"].splitlines()
    classifiers = re.findall(r"Python :: (3\.\d+)", package["metadata"]["classifiers"])
    minors = range(versions.OLDEST_PYTHON[1], versions.NEWEST_PYTHON[1] + 1)
    assert classifiers == [f"3.{minor}" for minor in minors]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.findall(r'- python: "([\d.]+)".*\n\s+torch: "([\d.]+)"', workflow)
    wheels = re.findall(r'- \{python: "([\d.]+)", torch: "([\d.]+)"\}', workflow)
    assert wheels == [(format_version(python), format_version(torch)) for python, torch in versions.TESTED]
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    pythons, torches = (re.search(rf"^\| {name} \| (\d.+) \|$", page, re.MULTILINE) for name in ("Python", "torch"))
    assert pythons is not None and torches is not None
    assert list(zip(pythons[1].split(" | "), torches[1].split(" | "), strict=True)) == wheels
    assert {matrix[0], matrix[-1]} == {(oldest_python, f"{oldest_torch}.0"), (newest_python, f"{newest_torch}.0")}


class FakeModule(ModuleType):
    """Stands in for the compiled module."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: {"cuda": False, "device_time": False}


def loads(result: NativeBuild | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading the native observer give a result."""

    def load_native(*, rebuild: bool = False) -> NativeBuild:
        if isinstance(result, Exception):
            raise result
        return result

    for module in (environment, native_observer):
        monkeypatch.setattr(module, "load_native", load_native)


WITHOUT_CUDA = NativeBuild(FakeModule("memtrace_native"), Path("/cache"), "c++", None, "no headers of CUDA 13.0 found")
WITH_CUDA = NativeBuild(FakeModule("memtrace_native"), Path("/cache"), "c++", "/cuda/include", None)


def test_a_native_observer_without_cuda_is_used_and_the_trace_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(WITHOUT_CUDA, monkeypatch)
    observer, notes = select.select_observer("auto")
    assert observer.kind == "native"
    assert notes == ["the native observer was built without CUDA: no headers of CUDA 13.0 found"]


@pytest.mark.parametrize("error", [BuildError("c++ failed"), OSError("disk"), RuntimeError("bug"), AttributeError("x")])
def test_whatever_prevents_loading_leaves_pure_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    loads(error, monkeypatch)
    observer, notes = select.select_observer("auto")
    assert observer.kind == "dispatch"
    assert [f"memtrace: {note}" for note in notes] == [record.getMessage() for record in caplog.records]
    assert str(error) in notes[0]
    with pytest.raises(MemtraceError, match="is not available"):
        select.select_observer("native")


def test_the_native_observer_on_request_is_used_outside_the_range_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads(WITH_CUDA, monkeypatch)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    observer, notes = select.select_observer("native")
    assert observer.kind == "native" and "outside the tested range" in notes[0]
    assert "outside the tested range" in caplog.text


@pytest.mark.parametrize(
    ("loaded", "cuda", "expected", "advice"),
    [
        (WITH_CUDA, None, ("native", None), ""),
        (WITH_CUDA, "13.0", ("native", "observer"), ""),
        (WITHOUT_CUDA, "13.0", ("native", "history"), "CUDA events come from torch's allocator history"),
        (BuildError("c++ failed"), "13.0", ("dispatch", "history"), "several times slower: c++ failed."),
        (BuildError("c++ failed"), None, ("dispatch", None), "several times slower: c++ failed."),
    ],
)
def test_doctor_names_the_source_of_events(
    monkeypatch: pytest.MonkeyPatch,
    loaded: NativeBuild | Exception,
    cuda: str | None,
    expected: tuple[str, str | None],
    advice: str,
) -> None:
    loads(loaded, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    report = examine_environment()
    assert (report.observer, report.cuda_events) == expected
    assert (advice in report.advice[0]) if advice else report.advice == ()


def test_doctor_reports_untested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(WITH_CUDA, monkeypatch)
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    report = examine_environment()
    assert report.observer == "dispatch" and "2.16.0 is outside the tested range" in report.advice[0]


def test_doctor_uses_what_the_recording_uses() -> None:
    report = examine_environment()
    loaded = build.load_native()
    assert (report.build_cache, report.compiler) == (str(loaded.cache_folder), loaded.compiler)
