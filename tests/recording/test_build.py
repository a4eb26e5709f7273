"""Building the native observer: concurrently, without a compiler, and its CUDA part without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.recording.observers import build
from memtrace.recording.observers.columns_header import HEADER_NAME, columns_header

EMPTY_MODULE = """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "memtrace_native", nullptr, -1};
PyMODINIT_FUNC PyInit_memtrace_native() { return PyModule_Create(&module); }
"""


def test_concurrent_processes_build_the_module_once(tmp_path: Path) -> None:
    """With an empty module, which takes seconds to build instead of half a minute."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "module.cpp").write_text(EMPTY_MODULE)
    code = (
        "from pathlib import Path; from memtrace.recording.observers import build; "
        f"build.SOURCES = Path({str(sources)!r}); print(build.native_module().__file__)"
    )
    environment = os.environ | {"MEMTRACE_CACHE": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs, errors = zip(*(process.communicate(timeout=300) for process in processes), strict=True)
    assert [process.returncode for process in processes] == [0, 0], errors
    assert sum("building the native observer" in text for text in errors) == 1
    (built,) = (tmp_path / "cache").glob("*.so")
    assert outputs == (f"{built}\n",) * 2


def test_the_native_observer_is_the_default(tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.memtrace"):
        torch.ones(1000).mul(2)
    assert memtrace.load(tmp_path / "run.memtrace").manifest.source.observer == "native"


def test_without_a_compiler_the_recording_is_pure_python_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, build.MODULE, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    with memtrace.record(tmp_path / "run.memtrace"):
        torch.ones(1000).mul(2)
    assert "no C++ compiler found" in caplog.text
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert trace.manifest.source.observer == "dispatch"
    assert any("no C++ compiler found" in note for note in compute_coverage(trace).notes)


def test_the_native_observer_on_request_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, build.MODULE, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(memtrace.MemtraceError, match="no C"), memtrace.record(tmp_path / "run", observer="native"):
        pass
    with memtrace.record(tmp_path / "run.memtrace", observer="dispatch") as recording:
        assert recording.is_recording


def test_a_change_of_the_source_needs_a_new_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._key("c++")
    (tmp_path / "state.cpp").write_text("// another source")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key("c++") != before


@pytest.mark.parametrize("source", ["cuda_allocator.cpp", "device_time.cpp"])
def test_the_cuda_part_compiles(source: str, tmp_path: Path) -> None:
    toolkit, cxx = Path("/usr/local/cuda/include"), build.compiler()
    if cxx is None or not (toolkit / "cuda_runtime_api.h").is_file():
        pytest.skip("no C++ compiler or no CUDA toolkit in /usr/local/cuda")
    # CUDA wheels of torch contain this header and CPU wheels do not. Its content does not matter for the syntax.
    (tmp_path / "c10" / "cuda" / "impl").mkdir(parents=True)
    (tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h").touch()
    (tmp_path / HEADER_NAME).write_text(columns_header())
    includes = [tmp_path, Path(torch.__file__).parent / "include", toolkit, Path(sysconfig.get_paths()["include"])]
    command = [cxx, "-std=c++20", "-DNDEBUG", "-DMEMTRACE_CUDA", "-fsyntax-only", *(f"-I{path}" for path in includes)]
    result = subprocess.run([*command, str(build.SOURCES / source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
