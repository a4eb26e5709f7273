"""Chooses the observer for a recording."""

from __future__ import annotations

import logging

from memtrace.errors import MemtraceError
from memtrace.recording.observers import Observer
from memtrace.recording.observers.build import BuildError
from memtrace.recording.observers.versions import describe_untested_versions

logger = logging.getLogger("memtrace")


def select_observer(kind: str) -> tuple[Observer, list[str]]:
    """The observer to use, and notes for the manifest on what is missing and why.

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
    untested = describe_untested_versions()
    if kind == "auto" and untested is not None:
        return _select_pure_python(f'{untested}; observer="native" uses the native observer nevertheless')
    try:
        from memtrace.recording.observers.native_observer import NativeObserver

        observer = NativeObserver()
    except Exception as error:  # whatever goes wrong here must not break the program
        reason = str(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
        if kind == "native":
            raise MemtraceError(f'observer="native" is not available: {reason}') from error
        return _select_pure_python(reason)
    if untested is not None:
        logger.warning("memtrace: the native observer may fail: %s", untested)
    notes = [untested] if untested is not None else []
    if observer.cuda_obstacle is not None:
        notes.append(f"the native observer was built without CUDA: {observer.cuda_obstacle}")
    return observer, notes


def _select_pure_python(reason: str) -> tuple[Observer, list[str]]:
    from memtrace.recording.observers.dispatch_observer import DispatchObserver

    note = f"recording in pure Python, which is several times slower: {reason}"
    logger.warning("memtrace: %s", note)
    return DispatchObserver(), [note]
