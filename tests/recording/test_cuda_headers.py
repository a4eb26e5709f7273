"""Which CUDA headers the native observer is built with."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from memtrace.recording.observers.cuda_headers import SHIM, find_cuda_headers


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a CUDA 13 build of torch in ``site`` and no toolkit; returns its root."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "site" / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    return tmp_path


def install(folder: Path, version: int, *, complete: bool) -> Path:
    """Install headers of a CUDA version such as 13000."""
    (folder / "crt").mkdir(parents=True)
    names = ["cuda_runtime.h", "crt/host_defines.h", "crt/host_config.h"] if complete else ["cuda_runtime.h"]
    for name in names:
        (folder / name).touch()
    (folder / "cuda_runtime_api.h").write_text(f"#pragma once\n#define CUDART_VERSION  {version}\n")
    return folder


def found() -> list[tuple[Path, bool]]:
    return [(headers.folder, headers.is_complete) for headers in find_cuda_headers()]


def test_the_headers_of_torchs_wheels_are_used_with_the_shim(machine: Path) -> None:
    wheel = install(machine / "site/nvidia/cu13/include", 13000, complete=False)
    (headers,) = find_cuda_headers()
    assert headers.include_folders == (SHIM, wheel)
    assert str(headers) == f"{wheel} (without crt/, which memtrace replaces)"


def test_complete_headers_of_torchs_wheels_are_used_alone(machine: Path) -> None:
    wheel = install(machine / "site/nvidia/cu13/include", 13000, complete=True)
    (headers,) = find_cuda_headers()
    assert headers.include_folders == (wheel,)
    assert str(headers) == str(wheel)


def test_wheels_of_cuda_12_lie_elsewhere(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = install(machine / "site/nvidia/cuda_runtime/include", 12080, complete=False)
    assert found() == []
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert found() == [(wheel, False)]


def test_wheels_outside_torchs_folder_are_found(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = install(machine / "other/nvidia/cu13/include", 13000, complete=False)
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(machine / "other/nvidia")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: {"nvidia": spec}[name])
    assert found() == [(wheel, False)]


def test_a_complete_toolkit_comes_before_an_incomplete_wheel(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = install(machine / "site/nvidia/cu13/include", 13000, complete=False)
    toolkit = install(machine / "toolkit/include", 13010, complete=True)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.setenv(name, str(machine / "toolkit"))
        assert found() == [(toolkit, True), (wheel, False)]
        monkeypatch.delenv(name)


def test_the_configured_toolkit_comes_before_a_complete_wheel(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine / "site/nvidia/cu13/include", 13000, complete=True)
    toolkit = install(machine / "toolkit/include", 13010, complete=True)
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    assert found() == [(toolkit, True)]


@pytest.mark.parametrize("text", ["", "#define CUDART_VERSION", "#define CUDART_VERSION 12080", "#define OTHER 13000"])
def test_headers_of_another_version_are_not_used(machine: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    toolkit = install(machine / "toolkit/include", 13010, complete=True)
    (toolkit / "cuda_runtime_api.h").write_text(text)
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    assert found() == []


def test_a_toolkit_is_found_by_its_compiler_unless_one_is_configured(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = install(machine / "toolkit/include", 13010, complete=True)
    nvcc = machine / "toolkit/bin/nvcc"
    for path in (nvcc, machine / "bin/nvcc"):
        path.parent.mkdir()
    nvcc.touch(0o755)
    (machine / "bin/nvcc").symlink_to(nvcc)
    assert found() == []  # CUDA_HOME is set, to nothing
    monkeypatch.delenv("CUDA_HOME")
    assert found()[0] == (toolkit, True)


def test_the_headers_of_a_conda_environment_are_found(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.recording.observers.cuda_headers.SYSTEM_TOOLKITS", machine / "usr")
    monkeypatch.delenv("CUDA_HOME")
    assert found() == []
    folder = install(machine / "environment/targets/x86_64-linux/include", 13000, complete=True)
    assert found() == [(folder, True)]
    system = install(machine / "usr/cuda-13.1/include", 13010, complete=True)
    assert found() == [(system, True)]


def test_a_torch_without_cuda_needs_none(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine / "site/nvidia/cu13/include", 13000, complete=True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found() == []
