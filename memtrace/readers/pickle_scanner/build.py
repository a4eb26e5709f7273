"""Builds the scanner, once per version of memtrace, and loads it.

It needs a C++ compiler, but neither torch nor Python's headers. A build takes a few seconds, so it is worth its time
only for large files; for others the scanner is used if it has been built before. Without it, files are read in Python.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from memtrace.native_build.build_cache import BuildCache, CachedModule, CacheError, cache_folders
from memtrace.native_build.compilation import CompileError, Recipe, compile_module
from memtrace.native_build.compilers import find_compilers
from memtrace.native_build.loading import load_library
from memtrace.readers.pickle_scanner.library import Scanner

logger = logging.getLogger("memtrace")

SOURCES: Final = Path(__file__).parent / "native"
NAME: Final = "memtrace_scanner"
COMPILE_FLAGS: Final = ("-std=c++17", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden")
LINK_FLAGS: Final = ("-shared",)
# Python reads a smaller file before the scanner is loaded.
MIN_SCANNED_BYTES: Final = 4 << 20
# Python needs longer than a build for a file of this size, and programs that write such files write more than one.
MIN_BUILD_BYTES: Final = 64 << 20

_loaded: Scanner | None = None
_has_failed = False


class ScannerError(Exception):
    """The scanner cannot be built or loaded. The message says why."""


def find_scanner(num_bytes: int) -> Scanner | None:
    """Return the scanner for files of this size; None where Python reads them.

    Args:
        num_bytes: size of all files that are to be read, decompressed.
    """
    global _has_failed
    if _loaded is not None:
        return _loaded
    if num_bytes < MIN_SCANNED_BYTES or _has_failed:
        return None
    try:
        return load_scanner(build=num_bytes >= MIN_BUILD_BYTES)
    except ScannerError as error:
        _has_failed = True
        logger.debug("memtrace: pickles are read in Python: %s", error)
        return None


def load_scanner(*, build: bool = True) -> Scanner | None:
    """Return the scanner, which is loaded once per process.

    Args:
        build: build it if it is not in the cache.

    Returns:
        The scanner; None if it is not in the cache and not to be built.

    Raises:
        ScannerError: it cannot be built or loaded.
    """
    global _loaded
    if _loaded is None:
        if sys.platform != "linux":
            raise ScannerError("the scanner needs Linux")
        key = _module_key()
        try:
            with _open_caches() as caches:
                _loaded = _from_cache(caches, key) or (_build(caches, key) if build else None)
        except (CacheError, OSError) as error:
            raise ScannerError(f"the scanner cannot be built ({error})") from error
    return _loaded


def recipe() -> Recipe:
    """Return how the scanner is compiled."""
    return Recipe(tuple(sorted(SOURCES.glob("*.cpp"))), {}, COMPILE_FLAGS, LINK_FLAGS)


def _module_key() -> str:
    """Return the name under which the scanner is cached; it changes with the sources."""
    digest = hashlib.sha256("\0".join((*COMPILE_FLAGS, *LINK_FLAGS, platform.machine(), *platform.libc_ver())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"scanner-{digest.hexdigest()[:32]}"


@contextmanager
def _open_caches() -> Iterator[list[BuildCache]]:
    with ExitStack() as stack:
        caches = []
        for folder in cache_folders():
            with suppress(CacheError):
                caches.append(stack.enter_context(closing(BuildCache(folder))))
        yield caches


def _from_cache(caches: list[BuildCache], key: str) -> Scanner | None:
    for cache in caches:
        module = cache.read_module(key)
        if module is not None:
            with suppress(ImportError):
                return Scanner(load_library(NAME, module.content))
    return None


def _build(caches: list[BuildCache], key: str) -> Scanner:
    compilers = find_compilers()
    if not compilers:
        raise ScannerError("no C++ compiler found")
    failure = hashlib.sha256("\0".join((key, *(compiler.identity for compiler in compilers))).encode()).hexdigest()[:32]
    for cache in caches:
        if (message := cache.read_failure(failure)) is not None:
            raise ScannerError(message)
        with suppress(CacheError), cache.locked(lambda: None) as touch:
            if (scanner := _from_cache([cache], key)) is not None:  # another process has built it
                return scanner
            try:
                content, compiler = compile_module(compilers, recipe(), touch)
                scanner = Scanner(load_library(NAME, content))
            except (CompileError, ImportError) as error:
                with suppress(CacheError):
                    is_transient = isinstance(error, CompileError) and error.is_transient
                    cache.store_failure(failure, str(error), is_transient=is_transient)
                raise ScannerError(str(error)) from error
            cache.store_module(key, CachedModule(content, str(compiler), None))
            return scanner
    raise ScannerError("no folder for compiled modules can be written to")
