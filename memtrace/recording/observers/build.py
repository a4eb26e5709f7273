"""Builds the native observer for the installed torch, once, and loads it.

A build with CUDA's headers observes the allocator of CUDA. Where they are missing, or that build fails, one without
them observes the CPU, and torch's own allocator history serves CUDA. Failures are remembered, so that a build that
cannot succeed does not delay every run.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Final

from memtrace.native_build.build_cache import BuildCache, CachedModule, CacheError, cache_folders
from memtrace.native_build.compilation import CompileError, compile_module
from memtrace.native_build.compilers import find_compilers
from memtrace.native_build.loading import load_extension
from memtrace.recording.observers.cuda_headers import CudaHeaders, find_cuda_headers
from memtrace.recording.observers.toolchain import failure_key, module_key, python_headers, recipe

logger = logging.getLogger("memtrace")

MODULE: Final = "memtrace_native"
_RETRY: Final = "to try again: memtrace doctor --rebuild"


class BuildError(Exception):
    """The native observer cannot be built or loaded. The message says why and what to do."""


@dataclass(frozen=True)
class NativeBuild:
    """The native observer that this process has loaded."""

    module: ModuleType
    cache_folder: Path
    """Folder of the cache that it is kept in."""
    compiler: str
    """Command of the compiler that built it."""
    cuda_headers: str | None
    """CUDA headers that it was built with; None: without CUDA."""
    cuda_obstacle: str | None
    """Why it cannot observe CUDA's allocator; None if it can, and where torch is not a CUDA build."""
    build_seconds: float | None = None
    """Time that this process needed to build it; None: it was in the cache."""


_loaded: NativeBuild | None = None


def native_module() -> ModuleType:
    """Return the compiled observer, built first if it is not in the cache.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    return load_native().module


def load_native(*, rebuild: bool = False) -> NativeBuild:
    """Load the native observer, once per process.

    Args:
        rebuild: build it anew, even if it is in the cache or its build has failed before.

    Raises:
        BuildError: it cannot be built or loaded.
    """
    global _loaded
    if _loaded is None:
        if sys.platform != "linux":
            raise BuildError("the native observer needs Linux")
        try:
            loaded = _find_or_build(rebuild)
        except OSError as error:
            raise BuildError(f"the native observer cannot be built ({error})") from error
        _loaded = _loaded or loaded  # if two threads load it, both use the first one's module
        sys.modules[MODULE] = _loaded.module
    return _loaded


def _find_or_build(rebuild: bool) -> NativeBuild:
    import torch

    obstacle = None
    with _open_caches() as caches:
        if torch.version.cuda is not None:
            with_cuda = _Build(caches, module_key(with_cuda=True), rebuild)
            if (build := with_cuda.from_cache()) is not None:
                return build
            obstacle = f"no headers of CUDA {torch.version.cuda} found; set CUDA_HOME to a toolkit of that version"
            for headers in find_cuda_headers():
                result = with_cuda.try_to_compile(headers)
                if isinstance(result, NativeBuild):
                    return result
                obstacle = str(result)
        without_cuda = _Build(caches, module_key(with_cuda=False), rebuild, obstacle)
        return without_cuda.from_cache() or without_cuda.compile(None)


@contextmanager
def _open_caches() -> Iterator[Sequence[BuildCache]]:
    with ExitStack() as stack:
        results = [_try_to_open(folder) for folder in cache_folders()]
        caches = [stack.enter_context(closing(result)) for result in results if isinstance(result, BuildCache)]
        if not caches:
            raise BuildError(str(results[0]))
        yield caches


def _try_to_open(folder: Path) -> BuildCache | CacheError:
    try:
        return BuildCache(folder)
    except CacheError as error:
        return error


@dataclass(frozen=True)
class _Build:
    """One variant of the module, with or without CUDA."""

    caches: Sequence[BuildCache]
    key: str
    rebuild: bool
    cuda_obstacle: str | None = None

    def from_cache(self) -> NativeBuild | None:
        """The module from the cache; None if it is not there, or cannot be loaded."""
        if self.rebuild:
            return None
        for cache in self.caches:
            cached = cache.read_module(self.key)
            if cached is not None:
                with suppress(ImportError):
                    return self._load(cached, cache)
        return None

    def _load(self, cached: CachedModule, cache: BuildCache) -> NativeBuild:
        module = load_extension(MODULE, cached.content)
        module.__file__ = str(cache.module_path(self.key))  # not that of the copy in memory
        return NativeBuild(module, cache.path, cached.compiler, cached.cuda_headers, self.cuda_obstacle)

    def try_to_compile(self, headers: CudaHeaders | None) -> NativeBuild | BuildError:
        """The module, or why it cannot be compiled."""
        try:
            return self.compile(headers)
        except BuildError as error:
            return error

    def compile(self, headers: CudaHeaders | None) -> NativeBuild:
        """Compile, cache and load the module.

        Raises:
            BuildError: that is not possible, or has failed before.
        """
        compilers = find_compilers()
        if not compilers:
            raise BuildError("no C++ compiler found; install one (Debian: apt-get install g++) or set CXX")
        if not (python_headers() / "Python.h").is_file():
            raise BuildError(f"{python_headers()} lacks Python.h; install it (Debian: apt-get install python3-dev)")
        failed = failure_key(self.key, headers, compilers)
        self._raise_remembered(failed)
        with self._locked() as (cache, touch):
            if (build := self.from_cache()) is not None:  # another process has built it
                return build
            self._raise_remembered(failed)
            started = time.monotonic()
            try:
                with _progress(headers):
                    content, compiler = compile_module(compilers, recipe(headers), touch)
                    compiled = CachedModule(content, str(compiler), str(headers) if headers else None)
                    build = replace(self._load(compiled, cache), build_seconds=time.monotonic() - started)
            except (CompileError, ImportError) as error:
                is_transient = isinstance(error, CompileError) and error.is_transient
                with suppress(CacheError):
                    cache.store_failure(failed, str(error), is_transient=is_transient)
                raise BuildError(f"{error} ({_RETRY})") from error
            try:
                cache.store_module(self.key, compiled)
            except CacheError as error:
                logger.warning("memtrace: the native observer was built for this run only: %s", error)
            return build

    def _raise_remembered(self, failed: str) -> None:
        for cache in self.caches if not self.rebuild else ():
            if (message := cache.read_failure(failed)) is not None:
                raise BuildError(f"{message} (remembered from an earlier run; {_RETRY})")

    @contextmanager
    def _locked(self) -> Iterator[tuple[BuildCache, Callable[[], None]]]:
        """Lock the first cache that can be written to."""
        with ExitStack() as stack:
            results = []
            for cache in self.caches:
                results.append(_try_to_lock(cache, stack))
                if not isinstance(results[-1], CacheError):
                    yield cache, results[-1]
                    return
        raise BuildError(str(results[0]))


def _try_to_lock(cache: BuildCache, stack: ExitStack) -> Callable[[], None] | CacheError:
    try:
        return stack.enter_context(cache.locked(_report_wait))
    except CacheError as error:
        return error


def _report_wait() -> None:
    if os.environ.get("RANK", "0") == "0":  # not once for each of a thousand ranks
        _report("memtrace: another process is building the native observer; waiting for it\n")


@contextmanager
def _progress(headers: CudaHeaders | None) -> Iterator[None]:
    import torch

    suffix = " without CUDA" if torch.version.cuda is not None and headers is None else ""
    started = time.monotonic()
    _report(
        f"memtrace: building the native observer{suffix} for torch {torch.__version__} (once, a minute or more) ..."
    )
    try:
        yield
    except BaseException:
        _report(" failed\n")
        raise
    _report(f" done in {time.monotonic() - started:.0f} s\n")


def _report(text: str) -> None:
    with suppress(Exception):  # the program may have replaced or closed its standard error
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
