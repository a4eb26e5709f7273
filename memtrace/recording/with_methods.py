"""``__enter__`` and ``__exit__`` of a recording, which an interrupt of the program can reach at any instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Entered = TypeVar("Entered")


class WithMethod:
    """``__enter__`` or ``__exit__`` of a recording, as the ``with`` statement looks it up.

    A signal handler can raise at the first instruction of a Python function, before any ``try`` in it. The ``with``
    statement is therefore given a function written in C; where the native observer cannot be used, a Python function.

    Args:
        bind: makes the method of a recording.
    """

    def __init__(self, bind: Callable[[Any], Callable[..., Any]]) -> None:
        self._bind = bind

    def __get__(self, recording: Any, owner: type | None = None) -> Callable[..., Any]:
        if recording is None:  # contextlib.ExitStack asks the class, and passes the recording
            return lambda recording, *arguments: self._bind(recording)(*arguments)
        return self._bind(recording)


def call_or_undo(enter: Callable[[], Entered], undo: Callable[[], None]) -> Entered:
    """``call_or_undo`` of the native observer, for recordings without it."""
    try:
        return enter()
    except BaseException:
        call_until_done(undo)
        raise


def call_until_done(function: Callable[..., None], *arguments: Any) -> None:
    """``call_until_done`` of the native observer, for recordings without it."""
    try:
        function(*arguments)
    finally:
        try:
            function(*arguments)
        finally:
            function(*arguments)
