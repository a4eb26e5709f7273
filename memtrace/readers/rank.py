"""What a reader returns for each rank in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ReadRank:
    """The manifest and the tables of one rank."""

    manifest: dict[str, Any]
    """The manifest, made by ``memtrace.readers.tables.new_manifest``."""
    tables: dict[str, pa.Table]
    """Each table of ``memtrace.format.schema.TABLES`` by its name."""
