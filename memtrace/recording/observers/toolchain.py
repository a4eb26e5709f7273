"""The compilers that may build the native observer, and the flags and sources of a build."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memtrace.allocator.rules import MAX_SLACK_BYTES, MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES
from memtrace.format.schema import CATEGORIES
from memtrace.recording.observers.columns_header import columns_header
from memtrace.recording.observers.cuda_headers import CudaHeaders

SOURCES: Final = Path(__file__).parent / "native"
_COMPILERS: Final = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that is installed. Whether it works shows when it is used."""

    command: tuple[str, ...]
    """Path of the program and any arguments that $CXX gives it."""

    def __str__(self) -> str:
        """The command, for users."""
        return shlex.join(self.command)

    @property
    def identity(self) -> str:
        """Changes when another program takes its place, such as a newer version."""
        with suppress(OSError):
            status = Path(self.command[0]).resolve().stat()
            return f"{self} {status.st_size} {status.st_mtime_ns}"
        return str(self)


def find_compilers() -> tuple[Compiler, ...]:
    """Return the compilers to try, in order: $CXX, which may have arguments (``ccache g++``), c++, g++ and clang++."""
    commands = []
    with suppress(ValueError):  # unbalanced quotes
        commands.append(shlex.split(os.environ.get("CXX", "")))
    commands += [[name] for name in _COMPILERS]
    found: dict[str, Compiler] = {}
    for command in commands:
        if command and (path := shutil.which(command[0])):
            # The real path tells apart, but is not called: programs such as ccache look at the name they are called by.
            key = shlex.join([os.path.realpath(path), *command[1:]])
            found.setdefault(key, Compiler((str(Path(path).absolute()), *command[1:])))
    return tuple(found.values())


def compile_flags(headers: CudaHeaders | None) -> list[str]:
    """Return the flags that compile a source, with CUDA's part if headers for it are given."""
    import torch

    root = Path(torch.__file__).parent / "include"
    folders = [root, root / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    cuda = [f"-I{folder}" for folder in headers.include_folders] if headers is not None else []
    return [*_language_flags(), *(f"-I{folder}" for folder in folders), *cuda, *_cuda_flags(headers is not None)]


def _language_flags() -> list[str]:
    import torch

    return [
        "-std=c++20",
        "-O2",
        "-DNDEBUG",  # without it RecordFunction's layout differs from that in the wheel, and every callback throws
        "-fPIC",
        "-fvisibility=hidden",
        "-ftls-model=initial-exec",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DMEMTRACE_MIN_BLOCK_BYTES={MIN_BLOCK_BYTES}",
        f"-DMEMTRACE_SMALL_REQUEST_BYTES={SMALL_REQUEST_BYTES}",
        f"-DMEMTRACE_MAX_SLACK_BYTES={MAX_SLACK_BYTES}",
        f"-DMEMTRACE_GRADIENT_CATEGORY={CATEGORIES.index('gradient')}",
    ]


def _cuda_flags(with_cuda: bool) -> list[str]:
    return ["-DMEMTRACE_CUDA"] if with_cuda else []


def link_flags(with_cuda: bool) -> list[str]:
    """Return the flags that link the module against torch."""
    import torch

    libraries = ["c10", "torch", "torch_cpu", "torch_python"] + (["c10_cuda"] if with_cuda else [])
    return ["-shared", f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in libraries)]


def module_key(with_cuda: bool) -> str:
    """Return the name under which a build is cached: equal for builds that can stand in for each other.

    It covers the sources, torch and Python, but not the compiler and not where CUDA's headers lie.
    """
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes())
    identity = (columns_header(), *_language_flags(), *_cuda_flags(with_cuda), *link_flags(with_cuda), *_interpreter())
    digest.update("\0".join((*identity, *_torch())).encode())
    return digest.hexdigest()[:32]


def _interpreter() -> tuple[str, ...]:
    return sys.version, platform.machine(), str(sysconfig.get_config_var("SOABI"))


def _torch() -> tuple[str, ...]:
    """What changes when another torch is installed, also one that calls itself the same version."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    status = library.stat() if library.is_file() else None
    version = (str(torch.__version__), str(torch.version.git_version), str(torch.version.cuda))
    return (*version, str((status.st_size, status.st_mtime_ns)) if status else "")


def failure_key(module: str, headers: CudaHeaders | None, compilers: tuple[Compiler, ...]) -> str:
    """Return the name under which the failure of a build is remembered.

    It covers everything that could let the next attempt succeed: the module's key, CUDA's headers and the compilers.
    """
    parts = [module, str(headers), *(compiler.identity for compiler in compilers)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
