"""Chooses the observer for a recording."""

from __future__ import annotations

import logging

from memtrace.errors import MemtraceError
from memtrace.recording.observers import Observer
from memtrace.recording.observers.build import BuildError

logger = logging.getLogger("memtrace")


def select_observer(kind: str) -> tuple[Observer, list[str]]:
    """The observer to use, and notes for the manifest on why it is not the native one.

    Args:
        kind: "auto", "native" or "dispatch"; see ``memtrace.record``.

    Raises:
        MemtraceError: ``kind`` is "native" and the native observer cannot be built or loaded.
    """
    from memtrace.recording.observers.dispatch_blocks import fake_mode_active
    from memtrace.recording.observers.dispatch_observer import DispatchObserver

    if kind == "dispatch":
        return DispatchObserver(), []
    if kind == "auto" and fake_mode_active():
        return DispatchObserver(), ["fake tensors: sizes are those of a real run, but nothing was computed"]
    try:
        from memtrace.recording.observers.native_observer import NativeObserver

        return NativeObserver(), []
    except BuildError as error:
        if kind == "native":
            raise MemtraceError(f'observer="native" is not available: {error}') from error
        note = f"recording in pure Python, which is several times slower: {error}"
        logger.warning("memtrace: %s", note)
        return DispatchObserver(), [note]
