"""The table of names that a reader builds, text that is safe to show, and the manifest of a file that was read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.format.encode import encode_lists, encode_numbers, encode_strings, encode_text
from memtrace.format.manifest import Manifest, TraceSource
from memtrace.format.schema import NAME_KINDS, arrow_schema
from memtrace.text import to_printable

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, np.dtype[Any]]

MAX_TEXT: Final = 4096


def clean(text: object) -> str:
    """Return ``text`` as one printable line of bounded length; text in a file may be hostile."""
    # A nested value is not printed: its text can be exponentially long.
    spelled = text if isinstance(text, str) else f"<{type(text).__name__}>"
    line = to_printable(spelled[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "..."


class Names:
    """Builds the table ``names``: equal texts, frames and stacks share one id."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, Any], int] = {}
        self._entries: list[tuple[str, Any]] = []

    def text(self, kind: str, text: object) -> int:
        """Return the id of a text of one of NAME_KINDS other than ``stack``."""
        return self._id(kind, clean(text))

    def frame(self, file: object, line: object, function: object) -> int:
        """Return the id of a frame; an invalid line number becomes 0."""
        number = line if isinstance(line, int) and 0 <= line < 2**31 else 0
        return self._id("frame", f"{clean(file)}\t{number}\t{clean(function)}")

    def stack(self, frames: Iterable[int]) -> int:
        """Return the id of a stack, given its frames' ids, innermost first; -1 for an empty stack."""
        key = tuple(frames)
        return self._id("stack", key) if key else -1

    def value(self, identity: int) -> Any:
        """Return the text of an id; for a stack, the ids of its frames."""
        return self._entries[identity][1]

    def table(self) -> pa.Table:
        """Return the table ``names``."""
        import pyarrow as pa

        schema = arrow_schema("names")
        kinds = np.array([NAME_KINDS.index(kind) for kind, _ in self._entries], np.int8)
        columns = {
            "id": encode_numbers(np.arange(len(kinds)), None, pa.int32()),
            "kind": encode_text(kinds, NAME_KINDS),
            "text": encode_strings([value if kind != "stack" else None for kind, value in self._entries]),
            "frames": encode_lists([value if kind == "stack" else None for kind, value in self._entries]),
        }
        return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)

    def _id(self, kind: str, value: Any) -> int:
        key = (kind, value)
        number = self._ids.setdefault(key, len(self._entries))
        if number == len(self._entries):
            self._entries.append(key)
        return number


def new_manifest(kind: str, file: str, t0_epoch_ns: int | None) -> Manifest:
    """Return the manifest of a file; the reader adds devices, versions and coverage."""
    from memtrace import __version__

    return Manifest(
        memtrace_version=__version__,
        source=TraceSource(kind, None, file),
        t0_epoch_ns=t0_epoch_ns,
    )
