"""What this machine offers for recording: package versions, the compiler, the observer, GPUs, and what is missing."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

from memtrace.recording.observers import build

PACKAGES: Final = ("memtrace", "torch", "numpy", "pandas", "pyarrow", "plotly")


@dataclass(frozen=True)
class Environment:
    """Versions and tools that a recording on this machine would use."""

    versions: dict[str, str | None]
    """Version of Python and of each package; None: not installed."""
    compiler: str | None
    """Path of the C++ compiler that builds the native observer; None: not found."""
    build_cache: str
    """Folder of the built native observers."""
    observer: Literal["native", "dispatch"]
    """Observer that a recording would use."""
    gpus: tuple[str, ...]
    """Names of the CUDA GPUs."""
    cuda_headers: str | None
    """Folder of the CUDA headers that the native observer needs to record CUDA allocations; None: not found."""
    advice: tuple[str, ...]
    """What is missing and how to get it; empty where recording works fully."""


def examine_environment() -> Environment:
    """Return what this machine offers for recording. Builds the native observer if it is not in the cache."""
    import torch

    observer, advice = _choose_observer()
    headers = build.cuda_include()
    if torch.version.cuda and headers is None:
        advice.append("CUDA headers not found: CUDA allocations are not recorded. Set CUDA_HOME to a CUDA toolkit.")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Environment(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        compiler=build.compiler(),
        build_cache=str(build.cache_folder()),
        observer=observer,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(num_gpus)),
        cuda_headers=str(headers) if headers else None,
        advice=tuple(advice),
    )


def _choose_observer() -> tuple[Literal["native", "dispatch"], list[str]]:
    """Return the observer that a recording would use, and advice about it."""
    import torch

    try:
        native = build.native_module()
    except build.BuildError as error:
        return "dispatch", [f"Native observer unavailable: recording is several times slower. {error}"]
    if torch.version.cuda and not native.status()["cuda"]:
        return "native", ["The native observer was built without CUDA support: CUDA allocations are not recorded."]
    return "native", []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
