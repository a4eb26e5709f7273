"""Small programs of the kinds that people run: each must compute the same bits with a recording as without.

``tests/programs/run_kinds.py`` runs them in a process of their own; ``tests/recording/test_kinds_of_programs.py`` compares.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Final

Result = object
"""What a program returns: tensors, numbers, texts and lists, tuples or dictionaries of them."""

KINDS: Final[dict[str, Callable[[], Result]]] = {}
"""The programs by name; ``load_kinds`` fills it."""

_MODULES: Final = (
    "autograd",
    "compilers",
    "libraries",
    "models",
    "modules",
    "parallel",
    "python_features",
    "tensors",
    "training",
)


def kind(program: Callable[[], Result]) -> Callable[[], Result]:
    """Register a program under the name of its function."""
    assert program.__name__ not in KINDS, f"two programs are called {program.__name__}"
    KINDS[program.__name__] = program
    return program


def kind_with(*libraries: str) -> Callable[[Callable[[], Result]], Callable[[], Result]]:
    """Register a program if the libraries that it needs are installed."""
    is_installed = all(importlib.util.find_spec(library) for library in libraries)
    return kind if is_installed else lambda program: program


def load_kinds() -> dict[str, Callable[[], Result]]:
    """Import the modules of this package, which register their programs, and return all programs by name."""
    for name in _MODULES:
        importlib.import_module(f"{__name__}.{name}")
    return KINDS
