"""An action that only notes when it is in effect, in place of a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memtrace.execution import application
from memtrace.execution.target import Target
from memtrace.planning.actions import Recompute

events: list[str] = []


@contextmanager
def apply_action(action: Recompute, target: Target) -> Iterator[None]:
    """Note the begin and the end of the action with the classes of the modules that it names."""
    names = ",".join(type(module).__name__ for module in target.find_modules(action.modules).values())
    events.append(f"begin {names} {len(target.optimizers)}")
    try:
        yield
    finally:
        events.append(f"end {names}")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the action noted, while it stands in for recomputation."""
    monkeypatch.setitem(application._APPLIERS, "recompute", __name__)
    events.clear()
    return events
