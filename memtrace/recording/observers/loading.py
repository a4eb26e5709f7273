"""Loads a compiled module from bytes, so that what is loaded is exactly what was checked."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType


def load_extension(name: str, content: bytes) -> ModuleType:
    """Return the extension module whose shared library is ``content``.

    The library is loaded from memory, which also works where the cache lies on a file system that forbids execution and
    where the cached file is overwritten during the run; or else from a private temporary file.

    Raises:
        ImportError: it cannot be loaded.
    """
    with suppress(OSError, AttributeError, ImportError):  # no memfd_create, or forbidden
        return _load_from_memory(name, content)
    try:
        with tempfile.TemporaryDirectory(prefix="memtrace-load-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / f"{name}.so"
            path.write_bytes(content)
            return _load_file(name, path)
    except OSError as error:
        raise ImportError(f"no temporary file can be written: {error}") from error


def _load_from_memory(name: str, content: bytes) -> ModuleType:
    with os.fdopen(os.memfd_create(name), "wb") as file:
        file.write(content)
        file.flush()
        # With the process's number, so that no other library of this process has the same path.
        return _load_file(name, Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"))


def _load_file(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
