"""What a reader returns for each rank in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.format.manifest import Manifest


@dataclass(frozen=True)
class ReadRank:
    """The manifest and the tables of one rank."""

    manifest: Manifest
    tables: dict[str, pa.Table]
    """Each table of ``memtrace.format.schema.TABLES`` by its name."""
