"""The sources of the native observer, and the flags that compile and link it."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Final

from memtrace.allocator.rules import MAX_SLACK_BYTES, MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES
from memtrace.format.schema import CATEGORIES
from memtrace.native_build.build_id import read_build_id
from memtrace.native_build.compilation import Recipe
from memtrace.native_build.compilers import Compiler
from memtrace.recording.observers.columns_header import HEADER_NAME, columns_header
from memtrace.recording.observers.cuda_headers import CudaHeaders
from memtrace.recording.observers.typed_operators import typed_sources

SOURCES: Final = Path(__file__).parent / "native"


def recipe(headers: CudaHeaders | None) -> Recipe:
    """Return how the native observer is compiled, with CUDA's part if headers for it are given."""
    kernels = typed_sources(torch_headers())
    return Recipe(
        sources=(*map(Path, kernels), *sorted(SOURCES.glob("*.cpp"))),  # what takes longest to compile comes first
        generated={HEADER_NAME: columns_header(), **kernels},
        compile_flags=(*compile_flags(headers), "-I.", f"-I{SOURCES}"),
        link_flags=tuple(link_flags(headers is not None)),
    )


def torch_headers() -> Path:
    """Return the folder of torch's headers."""
    import torch

    return Path(torch.__file__).parent / "include"


def python_headers() -> Path:
    """Return the folder of Python's headers, which a package of their own may have to bring."""
    return Path(sysconfig.get_paths()["include"])


def compile_flags(headers: CudaHeaders | None) -> list[str]:
    """Return the flags that compile a source, with CUDA's part if headers for it are given."""
    root = torch_headers()
    folders = [root, root / "torch" / "csrc" / "api" / "include", python_headers()]
    cuda = [f"-I{folder}" for folder in headers.include_folders] if headers is not None else []
    return [*_language_flags(), *(f"-I{folder}" for folder in folders), *cuda, *_cuda_flags(headers is not None)]


def _language_flags() -> list[str]:
    import torch

    return [
        "-std=c++20",
        "-O2",
        "-DNDEBUG",  # without it RecordFunction's layout differs from that in the wheel, and every callback throws
        "-fPIC",
        "-fno-plt",  # the functions of torch are called directly
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
    return ["-shared", f"-L{_torch_libraries()}", *(f"-l{name}" for name in _library_names(with_cuda))]


def _torch_libraries() -> Path:
    import torch

    return Path(torch.__file__).parent / "lib"


def _library_names(with_cuda: bool) -> list[str]:
    return ["c10", "torch", "torch_cpu", "torch_python"] + (["c10_cuda"] if with_cuda else [])


def module_key(with_cuda: bool) -> str:
    """Return the name under which a build is cached: equal for builds that can stand in for each other.

    It covers the sources, torch and Python, but not the compiler, and not where torch and CUDA's headers lie: all
    virtual environments with the same torch share one build.
    """
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes())
    generated = (columns_header(), *typed_sources(torch_headers()).values())
    identity = (*generated, *_language_flags(), *_cuda_flags(with_cuda), *_interpreter(), *_torch(with_cuda))
    digest.update("\0".join(identity).encode())
    return digest.hexdigest()[:32]


def _interpreter() -> tuple[str, ...]:
    return sys.version, platform.machine(), str(sysconfig.get_config_var("SOABI"))


def _torch(with_cuda: bool) -> tuple[str, ...]:
    """What changes when another torch is installed, also one that calls itself the same version."""
    import torch

    version = (str(torch.__version__), str(torch.version.git_version), str(torch.version.cuda))
    libraries = (_torch_libraries() / f"lib{name}.so" for name in _library_names(with_cuda))
    return (*version, *map(_identify, libraries))


def _identify(library: Path) -> str:
    """What differs from one build of a library to another: the id that the linker gave it, else path, size and time."""
    if not library.is_file():
        return f"{library.name} is missing"
    status = library.stat()
    # Whole seconds: the layers of a container image keep no fractions.
    return read_build_id(library) or f"{library} {status.st_size} {int(status.st_mtime)}"


def failure_key(module: str, headers: CudaHeaders | None, compilers: tuple[Compiler, ...]) -> str:
    """Return the name under which the failure of a build is remembered.

    It covers everything that could let the next attempt succeed: the module's key, CUDA's headers and the compilers.
    """
    parts = [module, str(headers), *(compiler.identity for compiler in compilers)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
