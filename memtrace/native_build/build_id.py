"""The build id of an ELF file: what identifies a library wherever it is installed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MAGIC: Final = b"\x7fELF\x02\x01"
"""A 64-bit, little-endian ELF file."""
_PROGRAM_HEADER: Final = struct.Struct("<IIQQQQQQ")
_PT_NOTE: Final = 4
_NT_GNU_BUILD_ID: Final = 3
_MAX_NOTE_BYTES: Final = 1 << 16


def read_build_id(path: Path) -> str | None:
    """Return the build id of a library, a hash of its content that the linker wrote.

    Returns:
        The id in hexadecimal digits; None where the file has none, is damaged or cannot be read.
    """
    try:
        return next((note.hex() for kind, note in _notes(path) if kind == _NT_GNU_BUILD_ID), None)
    except (OSError, ValueError, struct.error):  # the latter two: places outside the file
        return None


def _notes(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the content of each note of GNU's, as elf(5) describes them."""
    with path.open("rb") as file:
        header = file.read(64)
        if header[: len(_MAGIC)] != _MAGIC:
            return
        (table_start,) = struct.unpack_from("<Q", header, 32)
        entry_bytes, num_entries = struct.unpack_from("<HH", header, 54)
        if entry_bytes != _PROGRAM_HEADER.size:
            return
        file.seek(table_start)
        table = file.read(entry_bytes * num_entries)
        for place in range(num_entries):
            kind, _, start, _, _, length, _, alignment = _PROGRAM_HEADER.unpack_from(table, place * entry_bytes)
            if kind == _PT_NOTE:
                file.seek(start)
                yield from _notes_in(file.read(min(length, _MAX_NOTE_BYTES)), max(alignment, 4))


def _notes_in(segment: bytes, alignment: int) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(segment):
        name_bytes, content_bytes, kind = struct.unpack_from("<III", segment, place)
        name_start = place + 12
        content_start = _aligned(name_start + name_bytes, alignment)
        if segment[name_start : name_start + name_bytes] == b"GNU\0":
            yield kind, segment[content_start : content_start + content_bytes]
        place = _aligned(content_start + content_bytes, alignment)


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
