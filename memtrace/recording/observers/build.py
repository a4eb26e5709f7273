"""Builds the native observer for the installed torch, once, and caches it. Concurrent processes build it only once."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from memtrace.allocator.rules import MAX_SLACK_BYTES, MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES
from memtrace.format.schema import CATEGORIES
from memtrace.recording.observers.columns_header import HEADER_NAME, columns_header

SOURCES = Path(__file__).parent / "native"
MODULE = "memtrace_native"


class BuildError(Exception):
    """The native observer cannot be built or loaded. The message says why and what to do."""


def compiler() -> str | None:
    """Path of the C++ compiler to use ($CXX, otherwise c++, g++ or clang++); None if there is none."""
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and (path := shutil.which(candidate)):
            return path
    return None


def cuda_include() -> Path | None:
    """Folder of the CUDA headers; None if torch is not a CUDA build or the headers are not installed."""
    import torch

    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    site = Path(torch.__file__).parent.parent
    candidates = [
        *(Path(home) / "include" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home),
        site / "nvidia" / f"cu{major}" / "include",
        site / "nvidia" / "cuda_runtime" / "include",
        Path("/usr/local/cuda/include"),
    ]
    return next((path for path in candidates if (path / "cuda_runtime_api.h").is_file()), None)


def cache_folder() -> Path:
    """Folder of built observers: $MEMTRACE_CACHE, otherwise ``memtrace`` in the user's cache folder."""
    if configured := os.environ.get("MEMTRACE_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memtrace"


def _include_flags() -> list[str]:
    import torch

    root = Path(torch.__file__).parent / "include"
    folders = [root, root / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    flags = [f"-I{folder}" for folder in folders]
    if (cuda := cuda_include()) is not None:
        flags += [f"-I{cuda}", "-DMEMTRACE_CUDA"]
    return flags


def _compile_flags() -> list[str]:
    import torch

    # Without NDEBUG, RecordFunction's layout differs from that in the wheel, and every callback throws.
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        "-std=c++20",
        "-O2",
        "-DNDEBUG",
        "-fPIC",
        "-fvisibility=hidden",
        "-ftls-model=initial-exec",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-DMEMTRACE_MIN_BLOCK_BYTES={MIN_BLOCK_BYTES}",
        f"-DMEMTRACE_SMALL_REQUEST_BYTES={SMALL_REQUEST_BYTES}",
        f"-DMEMTRACE_MAX_SLACK_BYTES={MAX_SLACK_BYTES}",
        f"-DMEMTRACE_GRADIENT_CATEGORY={CATEGORIES.index('gradient')}",
        *_include_flags(),
    ]


def _link_flags() -> list[str]:
    import torch

    libraries = ["c10", "torch", "torch_cpu", "torch_python"] + (["c10_cuda"] if cuda_include() else [])
    return ["-shared", f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in libraries)]


def _key(cxx: str) -> str:
    import torch

    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(columns_header().encode())
    for part in (torch.__version__, sys.version, cxx, *_compile_flags(), *_link_flags()):
        digest.update(str(part).encode())
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise BuildError(f"{Path(command[0]).name} failed: {errors[0] if errors else 'no message'}")


def _compile(cxx: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = {source: Path(folder) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            (Path(folder) / HEADER_NAME).write_text(columns_header())
            flags = [*_compile_flags(), f"-I{folder}"]
            list(pool.map(lambda item: _run([cxx, *flags, "-c", str(item[0]), "-o", str(item[1])]), objects.items()))
        linked = Path(folder) / target.name
        _run([cxx, *(str(path) for path in objects.values()), *_link_flags(), "-o", str(linked)])
        linked.replace(target)  # atomic: another process sees the complete file or none


def _build_if_missing(cxx: str) -> Path:
    import torch

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_path = folder / "lock"
        lock_file = lock_path.open("w")
    except OSError as error:
        raise BuildError(
            f"cannot write to the cache folder {folder} ({error}); set MEMTRACE_CACHE to a writable folder"
        ) from error
    target = folder / f"{MODULE}-{_key(cxx)}.so"
    with lock_file:
        if target.exists():
            return target
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not target.exists():
            started = time.monotonic()
            print(
                f"memtrace: building the native observer for torch {torch.__version__} (once, up to a minute) ...",
                end="",
                file=sys.stderr,
                flush=True,
            )
            try:
                _compile(cxx, target)
            except BaseException:
                print(" failed", file=sys.stderr, flush=True)
                raise
            print(f" done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return target


def native_module() -> ModuleType:
    """The compiled observer, built first if it is not in the cache.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found; install one (Debian: apt-get install g++) or set CXX")
    path = _build_if_missing(cxx)
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"the native observer {path} cannot be loaded ({error}); delete it to rebuild it") from error
    sys.modules[MODULE] = module
    return module
