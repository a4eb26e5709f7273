"""Indexes of large traces in the user's cache directory, so that a trace is read whole only once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from memtrace import __version__
from memtrace.analysis.trace_index import TraceIndex
from memtrace.format.part_files import part_name

_VERSION: Final = 1
MAX_CACHED: Final = 20
"""Most indexes in the cache; the ones that were used least recently are deleted."""


def cache_folder() -> Path:
    """Return the folder of the indexes; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "memtrace" / "indexes"


def _file_of(folder: Path) -> Path:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return cache_folder() / f"{digest}.npz"


def _identities(folder: Path, numbers: Sequence[int]) -> list[list[int]]:
    """Return what changes when a part is another one: size and time of change of its file of events."""
    files = [(folder / part_name("events", number)).stat() for number in numbers]
    return [[status.st_size, status.st_mtime_ns] for status in files]


def load_index(folder: Path) -> TraceIndex | None:
    """Return the cached index of the rank in a folder; None where there is none for the files as they are.

    The trace can have more parts than the index, and a ring can have deleted the first ones.
    """
    path = _file_of(folder)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        plain: dict[str, Any] = json.loads(bytes(arrays.pop("plain")).decode())
        if plain["version"] != [_VERSION, __version__]:
            return None
        index = TraceIndex.from_arrays(arrays, plain["index"])
        numbers = [part.number for part in index.parts]
        present = [number for number in numbers if (folder / part_name("events", number)).exists()]
        known = plain["identities"][len(numbers) - len(present) :]
        if not present or present != numbers[-len(present) :] or _identities(folder, present) != known:
            return None
        os.utime(path)
    except Exception:  # whatever is wrong with the file, the index is built again
        return None
    index.drop_before(present[0])
    return index


def save_index(folder: Path, index: TraceIndex) -> None:
    """Keep the index of the rank in a folder; where that is not possible, the next server builds it again."""
    path = _file_of(folder)
    temporary = path.with_name(f"{path.stem}-{os.getpid()}.tmp.npz")
    with suppress(OSError):
        identities = _identities(folder, [part.number for part in index.parts])
        arrays, plain = index.to_arrays()
        content = {"version": [_VERSION, __version__], "identities": identities, "index": plain}
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            np.savez(temporary, plain=np.frombuffer(json.dumps(content).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _delete_oldest(path.parent)


def _delete_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.npz"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MAX_CACHED:]:
        file.unlink(missing_ok=True)
