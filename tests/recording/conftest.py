from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_objects_are_frozen() -> Iterator[None]:
    """Garbage collections before every test skip the million objects of imported modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
