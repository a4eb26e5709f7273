"""What this machine offers for recording: package versions, the compiler, the observer, GPUs, and what is missing."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

from memtrace.native_build.build_cache import cache_folders
from memtrace.native_build.compilers import find_compilers
from memtrace.recording.observers.build import BuildError, NativeBuild, load_native
from memtrace.recording.observers.cuda_headers import find_cuda_headers
from memtrace.recording.observers.toolchain import torch_headers
from memtrace.recording.observers.versions import describe_untested_versions

PACKAGES: Final = ("memtrace", "torch", "numpy", "pandas", "pyarrow", "plotly")


@dataclass(frozen=True)
class Environment:
    """Versions and tools that a recording on this machine would use."""

    versions: dict[str, str | None]
    """Version of Python and of each package; None: not installed."""
    compiler: str | None
    """Command of the C++ compiler that built the native observer, or would build it; None: not found."""
    torch_headers: str | None
    """Folder of torch's headers; None: not found."""
    build_cache: str
    """Folder of the built native observers."""
    build_seconds: float | None
    """Time that building the native observer took just now; None: it was in the cache, or it was not built."""
    observer: Literal["native", "dispatch"] | None
    """Observer that a recording would use; None: nothing can be recorded, because torch cannot be imported."""
    cuda_events: Literal["observer", "history"] | None
    """Source of the events of the CUDA allocator: the native observer, or torch's own allocator history, whose times
    are in microseconds; None: torch is built for neither CUDA nor ROCm, or cannot be imported."""
    cuda_headers: str | None
    """Folder of the CUDA headers that the native observer is built with, or that were found; None: not found."""
    gpus: tuple[str, ...]
    """Names of the CUDA GPUs."""
    advice: tuple[str, ...]
    """What is missing and how to get it; empty where recording works fully."""


def examine_environment(*, rebuild: bool = False) -> Environment:
    """Return what this machine offers for recording. Builds the native observer if it is not in the cache.

    Args:
        rebuild: build it anew, even if it is in the cache or its build has failed before.
    """
    if (obstacle := _torch_obstacle()) is not None:
        return _without_torch(obstacle)
    build, advice = _load_observer(rebuild)
    headers = [str(candidate) for candidate in find_cuda_headers()]
    return Environment(
        versions=_versions(),
        compiler=build.compiler if build else _first_compiler(),
        torch_headers=str(torch_headers()) if torch_headers().is_dir() else None,
        build_cache=str(build.cache_folder if build else cache_folders()[0]),
        build_seconds=build.build_seconds if build else None,
        observer="native" if build else "dispatch",
        cuda_events=_cuda_events(build),
        cuda_headers=(build.cuda_headers if build else None) or next(iter(headers), None),
        gpus=_gpu_names(),
        advice=tuple(advice),
    )


def _torch_obstacle() -> str | None:
    try:
        import torch  # noqa: F401
    except Exception as error:  # a damaged installation can raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _without_torch(obstacle: str) -> Environment:
    return Environment(
        versions=_versions(),
        compiler=_first_compiler(),
        torch_headers=None,
        build_cache=str(cache_folders()[0]),
        build_seconds=None,
        observer=None,
        cuda_events=None,
        cuda_headers=None,
        gpus=(),
        advice=(f"Nothing can be recorded, because torch cannot be imported ({obstacle}). Install torch again.",),
    )


def _first_compiler() -> str | None:
    return next((str(compiler) for compiler in find_compilers()), None)


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _load_observer(rebuild: bool) -> tuple[NativeBuild | None, list[str]]:
    """Return the native observer that a recording would use, if any, and advice about it."""
    if (untested := describe_untested_versions()) is not None:
        return None, [f"Recording is in pure Python, several times slower: {untested}."]
    try:
        build = load_native(rebuild=rebuild)
    except Exception as error:  # a recording would go on without the native observer
        reason = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
        return None, [f"Recording is in pure Python, several times slower: {reason}."]
    if build.cuda_obstacle is not None:
        history = "CUDA events come from torch's allocator history, with times in microseconds"
        return build, [f"{history}: the native observer was built without CUDA: {build.cuda_obstacle}."]
    return build, []


def _cuda_events(build: NativeBuild | None) -> Literal["observer", "history"] | None:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return None
    return "observer" if build is not None and torch.version.cuda and build.cuda_obstacle is None else "history"


def _gpu_names() -> tuple[str, ...]:
    import torch

    with suppress(RuntimeError):  # a driver that does not fit, or a GPU that failed
        if torch.cuda.is_available():
            return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
