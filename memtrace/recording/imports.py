"""Calls a function when the program imports a module that memtrace does not import itself because that takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[ModuleType], None], undo: ExitStack) -> None:
    """Call ``call`` with the module ``name``: now if it has been imported, else as soon as it is.

    Args:
        name: full name of the module.
        call: must not raise.
        undo: ends the wait for the import.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        call(module)
        return
    finder = _Finder(name, call)
    sys.meta_path.insert(0, finder)

    def remove() -> None:
        sys.meta_path[:] = [other for other in sys.meta_path if other is not finder]

    undo.callback(remove)


class _Finder(MetaPathFinder):
    """Leaves the search for a module to the other finders, and its loader a successor."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module, with a loader that reports when the module is loaded; None for other modules."""
        if fullname != self._name:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Reporting(spec.loader, self._call)
                return spec
        return None


class _Reporting(Loader):
    """Loads a module with its own loader, which the module has again before its code runs."""

    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``importlib.abc.Loader.create_module``."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader.exec_module``."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call(module)
