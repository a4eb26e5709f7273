"""Unpickles plain values only: it never looks up a class, a function or a persistent id."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from memtrace.errors import TraceError
from memtrace.readers.tables import clean

_MAX_MESSAGE_CHARS: Final = 80


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        requested = f"{module}.{name}"[:_MAX_MESSAGE_CHARS]
        raise TraceError(
            f"{self._path}: the pickle asks to import {requested!r}, so it was not loaded. A memory snapshot contains "
            "plain values only. Pass a file that torch.cuda.memory._dump_snapshot wrote."
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise TraceError(
            f"{self._path}: the pickle refers to objects outside of itself, so it was not loaded. Pass a file that "
            "torch.cuda.memory._dump_snapshot wrote."
        )


def load_plain(stream: BinaryIO, path: Path) -> Any:
    """Return the pickled value, made of dicts, lists, tuples, sets, strings, numbers and None.

    An unpickler cannot limit its memory and time; ``memtrace.readers.limits`` does.

    Args:
        stream: the pickle.
        path: the file that error messages name.

    Raises:
        TraceError: the stream is not a complete pickle of plain values.
    """
    try:
        return _PlainUnpickler(stream, path).load()
    except (TraceError, MemoryError):
        raise
    except EOFError:
        raise TraceError(f"{path}: the pickle is truncated. Copy the file again, or dump it again.") from None
    except Exception as error:
        reason = clean(str(error) or type(error).__name__)[:_MAX_MESSAGE_CHARS]
        if "truncated" in reason or "exhausted" in reason:
            raise TraceError(
                f"{path}: the pickle is truncated ({reason}). Copy the file again, or dump it again."
            ) from None
        raise TraceError(
            f"{path}: not a valid pickle of plain values ({type(error).__name__}: {reason}). Copy the file again, or "
            "dump it again."
        ) from None
