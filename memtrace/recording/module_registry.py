"""The modules of the recorded process, found without looking at the program's variables."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch

from memtrace.recording.plain_access import module_members, walk_modules


class ModuleRegistry:
    """Weak references to the modules that exist, by id. An entry disappears together with its module."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._unnamed: set[int] = set()

    def add(self, module: torch.nn.Module) -> None:
        """Take note of a module that the program has created."""
        key = id(module)
        # The callback is implemented in C: an interrupt that arrives in a Python callback would be lost.
        self._references[key] = weakref.ref(module, partial(self._references.pop, key))
        self._unnamed.add(key)

    def named(self, module: torch.nn.Module) -> None:
        """Take note that a module has a name."""
        self._unnamed.discard(id(module))

    def unnamed_modules(self) -> list[torch.nn.Module]:
        """The modules without a name."""
        unnamed, self._unnamed = self._unnamed, set()
        modules = [module for key in unnamed if (module := self.find(key)) is not None]
        self._unnamed.update(id(module) for module in modules)
        return modules

    def find(self, key: int) -> torch.nn.Module | None:
        """The module with the id ``key``; None if there is none."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def _modules(self) -> list[torch.nn.Module]:
        return [module for reference in list(self._references.values()) if (module := reference()) is not None]

    def root_of(self, module: torch.nn.Module) -> torch.nn.Module:
        """The largest module that contains ``module``; ``module`` itself if none does.

        A call such as ``model.encode(x)`` calls parts of ``model`` without a call of ``model`` itself.
        """
        candidates = self.unnamed_modules()
        containing = _ancestors(module, candidates) or _ancestors(module, self._modules())
        sizes = [(sum(1 for _ in walk_modules(ancestor)), ancestor) for ancestor in containing]
        return max(sizes, key=lambda item: item[0])[1] if sizes else module

    def roots(self, modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
        """Those of ``modules`` that no other module contains."""
        children = {id(child) for parent in self._modules() for _, child in module_members(parent, "_modules")}
        return [module for module in modules if id(module) not in children]


def _ancestors(module: torch.nn.Module, candidates: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of ``candidates`` that contain ``module`` and are themselves in none of them."""
    parents: dict[int, list[torch.nn.Module]] = {}
    for parent in candidates:
        for _, child in module_members(parent, "_modules"):
            parents.setdefault(id(child), []).append(parent)
    ancestors: dict[int, torch.nn.Module] = {}
    open_modules = [module]
    while open_modules:
        for parent in parents.get(id(open_modules.pop()), ()):
            if id(parent) not in ancestors and parent is not module:
                ancestors[id(parent)] = parent
                open_modules.append(parent)
    return [ancestor for key, ancestor in ancestors.items() if key not in parents]
