"""Pickles of plain values, and nothing else: no class, no function, no persistent id is ever looked up."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from memtrace.errors import TraceError
from memtrace.readers.tables import clean

_CLIP = 80


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        wanted = f"{module}.{name}"[:_CLIP]
        raise TraceError(
            f"{self._path} asks for {wanted!r} to be imported while it is read. A memory snapshot holds plain values "
            "only, so this is another kind of pickle, or a hostile one: refused."
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise TraceError(f"{self._path} refers to objects outside of itself, which no memory snapshot does: refused.")


def load_plain(stream: BinaryIO, path: Path) -> Any:
    """The value pickled in ``stream``: dicts, lists, tuples, sets, strings, numbers, None.

    ``path`` is named in errors. Raises TraceError for anything that is no whole pickle of plain values. Memory and
    time are bounded from outside (``memtrace.readers.limits``): an unpickler cannot bound them.
    """
    try:
        return _PlainUnpickler(stream, path).load()
    except (TraceError, MemoryError):
        raise
    except EOFError:
        raise TraceError(f"{path} is truncated: the pickle in it has no end. Copy or dump it again.") from None
    except Exception as error:
        reason = clean(str(error) or type(error).__name__)[:_CLIP]
        if "truncated" in reason or "exhausted" in reason:
            raise TraceError(f"{path} is truncated ({reason}). Copy or dump it again.") from None
        raise TraceError(
            f"{path} is no whole pickle of plain values ({type(error).__name__}: {reason}). Copy or dump it again."
        ) from None
