"""Finds the CUDA headers that the native observer needs to observe torch's CUDA allocator."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SHIM: Final = Path(__file__).parent / "native" / "cuda_shim"
"""Stands before headers that lack the part of the CUDA compiler, ``crt/``, as those of NVIDIA's wheels do."""
SYSTEM_TOOLKITS: Final = Path("/usr/local")
"""Folder in which NVIDIA's installers put toolkits."""
_REQUIRED: Final = "cuda_runtime_api.h"
_COMPILER_PART: Final = ("cuda_runtime.h", "crt/host_defines.h", "crt/host_config.h")
_VERSION: Final = re.compile(rb"^\s*#\s*define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class CudaHeaders:
    """A folder of CUDA headers that fit torch."""

    folder: Path
    is_complete: bool
    """Whether the part of the CUDA compiler is there; if not, the shim takes its place."""

    @property
    def include_folders(self) -> tuple[Path, ...]:
        """Folders for the compiler's include path, in order."""
        return (self.folder,) if self.is_complete else (SHIM, self.folder)

    def __str__(self) -> str:
        """The folder, for users."""
        return f"{self.folder}" if self.is_complete else f"{self.folder} (without crt/, which memtrace replaces)"


def find_cuda_headers() -> tuple[CudaHeaders, ...]:
    """Return the headers to try, in order; empty if torch is not a CUDA build or there are none of its CUDA version.

    The order is: complete headers in $CUDA_HOME or $CUDA_PATH, complete ones that torch's wheel depends on, which have
    exactly its version, complete ones of a toolkit elsewhere, then incomplete ones. Where CUDA_HOME or
    CUDA_PATH is set, even to nothing, no toolkit is searched for elsewhere.
    """
    import torch

    if torch.version.cuda is None:
        return ()
    major = int(torch.version.cuda.split(".")[0])
    folders = list(_existing([*_configured(), *_wheels(major), *_toolkits(major)], major))
    complete = [CudaHeaders(folder, True) for folder in folders if _is_complete(folder)]
    incomplete = [CudaHeaders(folder, False) for folder in folders if not _is_complete(folder)]
    # One of each: every failing attempt costs the user as much time as a build.
    return (*complete[:1], *incomplete[:1])


def _configured() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            yield Path(home) / "include"


def _wheels(major: int) -> Iterator[Path]:
    """Folders of the packages ``nvidia-cuda-runtime`` (CUDA 13 and newer) and ``nvidia-cuda-runtime-cu12``."""
    import torch

    roots = [Path(torch.__file__).parent.parent / "nvidia"]
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    roots += [Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []
    for root in roots:
        yield root / f"cu{major}" / "include"
        yield root / "cuda_runtime" / "include"


def _toolkits(major: int) -> Iterator[Path]:
    if "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ:
        return
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parent.parent / "include"
    yield SYSTEM_TOOLKITS / "cuda" / "include"
    for toolkit in sorted(SYSTEM_TOOLKITS.glob(f"cuda-{major}*"), reverse=True):
        yield toolkit / "include"
    environment = Path(sys.prefix)  # conda installs its toolkit there
    yield environment / "include"
    yield from sorted(environment.glob("targets/*/include"))


def _existing(folders: Iterable[Path], major: int) -> Iterator[Path]:
    """The folders that have headers of a major version, each once."""
    seen = set()
    for folder in folders:
        real = os.path.realpath(folder)
        if real not in seen and _major_version(folder / _REQUIRED) == major:
            seen.add(real)
            yield folder.absolute()


def _major_version(header: Path) -> int | None:
    try:
        version = _VERSION.search(header.read_bytes())
    except OSError:
        return None
    return int(version[1]) // 1000 if version else None


def _is_complete(folder: Path) -> bool:
    try:
        return all((folder / name).is_file() for name in _COMPILER_PART)
    except OSError:  # no permission
        return False
