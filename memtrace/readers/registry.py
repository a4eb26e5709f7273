"""Which reader a file needs, told by what it holds.

A reader of another package joins by an entry point of the group ``memtrace.readers`` that names an object with the
shape of ``Reader``; it is asked after memtrace's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol

from memtrace.errors import TraceError
from memtrace.readers.content import Content

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.format.manifest import Manifest

    Rank = tuple[Manifest, dict[str, pa.Table]]

GROUP: Final = "memtrace.readers"
_OWN: Final = (
    "memtrace.readers.cuda_snapshot:PickledSnapshot",
    "memtrace.readers.viz_page:VizPage",
    "memtrace.readers.json_files:JsonFile",
)


class Reader(Protocol):
    """Reads one kind of foreign file. It runs in a process of its own, with bounded memory and time."""

    def recognises(self, content: Content) -> bool:
        """Whether ``content.head`` looks like this kind; cheap, and False for everything else."""
        ...

    def read(self, content: Content) -> list[Rank]:
        """The manifest and the tables (``memtrace.format.schema.TABLES``) of each rank in the file.

        Raises TraceError with a sentence that names the file, the fault and the way out.
        """
        ...


def reader_for(content: Content) -> Reader:
    """The reader of a file; TraceError where no reader knows it."""
    for home in _OWN:
        module, _, name = home.partition(":")
        reader: Reader = getattr(import_module(module), name)()
        if reader.recognises(content):
            return reader
    # Not at the top: it takes longer to import than a small file to read, and few files get here.
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        foreign: Reader = point.load()()
        if foreign.recognises(content):
            return foreign
    raise TraceError(
        f"{content.path} is of no kind that memtrace knows. It reads traces of its own, CUDA memory snapshots (pickle, "
        "JSON, or a memory_viz page), Chrome traces of torch.profiler, and what export_memory_timeline writes as JSON."
    )
