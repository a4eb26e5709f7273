"""Loads a compiled module from bytes, so that what is loaded is exactly what was checked."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

_loads = itertools.count(1)


def load_extension(name: str, content: bytes) -> ModuleType:
    """Return the extension module whose shared library is ``content``.

    The library is loaded from memory, which also works where the cache lies on a file system that forbids execution and
    where the cached file is overwritten during the run; or else from a private temporary file.

    Raises:
        ImportError: it cannot be loaded.
    """
    return _load(name, content, lambda path: _load_file(name, path))


def load_library(name: str, content: bytes) -> ctypes.CDLL:
    """Return the shared library ``content``, which is loaded in the same way and needs no headers of Python.

    Raises:
        ImportError: it cannot be loaded.
    """
    try:
        return _load(name, content, ctypes.CDLL)
    except OSError as error:
        raise ImportError(f"{name} cannot be loaded: {error}") from error


def _load(name: str, content: bytes, load_file: Callable[[str], T]) -> T:
    with suppress(OSError, AttributeError, ImportError):  # no memfd_create, or forbidden
        return _load_from_memory(name, content, load_file)
    try:
        with tempfile.TemporaryDirectory(prefix="memtrace-load-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / f"{name}.so"
            path.write_bytes(content)
            return load_file(str(path))
    except OSError as error:
        raise ImportError(f"no temporary file can be written: {error}") from error


def _load_from_memory(name: str, content: bytes, load_file: Callable[[str], T]) -> T:
    with os.fdopen(os.memfd_create(name), "wb") as file:
        file.write(content)
        file.flush()
        # The loader returns a library that it knows by the same path, and descriptors are used again: each load has a
        # path of its own.
        return load_file(f"/proc/{os.getpid()}{'/.' * next(_loads)}/fd/{file.fileno()}")


def _load_file(name: str, path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
