"""Building the native observer: at once in two processes, without a compiler, and its CUDA part without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from memtrace.recording.observers import build

RECORD = "import memtrace, torch\nwith memtrace.record({path!r}): torch.ones(1000).mul(2)\n"


def started(path: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RECORD.format(path=str(path))],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_build_once_and_both_record(tmp_path):
    cache = str(tmp_path / "cache")
    both = [started(tmp_path / f"{number}.memtrace", MEMTRACE_CACHE=cache) for number in range(2)]
    told = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sum("building the native observer" in text for text in told) == 1
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    for number in range(2):
        assert '"observer": "native"' in (tmp_path / f"{number}.memtrace" / "rank=0" / "manifest.json").read_text()


def test_without_a_compiler_the_recording_is_pure_python_and_says_so(tmp_path):
    process = started(tmp_path / "run.memtrace", MEMTRACE_CACHE=str(tmp_path / "cache"), PATH="/nowhere", CXX="")
    told = process.communicate(timeout=120)[1]
    assert process.returncode == 0, told
    assert "no C++ compiler found" in told
    manifest = (tmp_path / "run.memtrace" / "rank=0" / "manifest.json").read_text()
    assert '"observer": "dispatch"' in manifest
    assert "no C++ compiler found" in manifest


def test_a_change_of_the_source_is_another_build(tmp_path, monkeypatch):
    before = build._key("c++")
    (tmp_path / "state.cpp").write_text("// another source")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key("c++") != before


def test_the_cuda_part_compiles(tmp_path):
    toolkit, cxx = Path("/usr/local/cuda/include"), build.compiler()
    if cxx is None or not (toolkit / "cuda_runtime_api.h").is_file():
        pytest.skip("no C++ compiler or no CUDA toolkit in /usr/local/cuda")
    # CUDA wheels ship this header, CPU wheels do not; nothing in it matters here.
    (tmp_path / "c10" / "cuda" / "impl").mkdir(parents=True)
    (tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h").touch()
    includes = [tmp_path, Path(torch.__file__).parent / "include", toolkit, Path(sysconfig.get_paths()["include"])]
    command = [cxx, "-std=c++20", "-DNDEBUG", "-DMEMTRACE_CUDA", "-fsyntax-only", *(f"-I{path}" for path in includes)]
    done = subprocess.run(
        [*command, str(build.SOURCES / "cuda_allocator.cpp")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
