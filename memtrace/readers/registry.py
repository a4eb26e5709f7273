"""Selects the reader for a file by the content of the file.

Another package adds a reader through an entry point of the group ``memtrace.readers`` that names a class of the shape
of ``Reader``. Its readers are asked after memtrace's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, Protocol

from memtrace.errors import TraceError
from memtrace.readers.content import Content
from memtrace.readers.rank import ReadRank

ENTRY_POINT_GROUP: Final = "memtrace.readers"
_OWN_READERS: Final = (
    "memtrace.readers.cuda_snapshot:PickledSnapshot",
    "memtrace.readers.viz_page:VizPage",
    "memtrace.readers.json_files:JsonFile",
)


class Reader(Protocol):
    """Reads one kind of file. It runs in a separate process with limits on memory and time."""

    def recognises(self, content: Content) -> bool:
        """Return whether ``content.head`` looks like this kind of file; must be cheap and False for other files."""
        ...

    def read(self, content: Content) -> list[ReadRank]:
        """Read each rank in the file.

        Raises:
            TraceError: the file cannot be read; the message names the file, what is wrong and what to do.
        """
        ...


def find_reader(content: Content) -> Reader:
    """Return the reader for a file.

    Raises:
        TraceError: no reader recognises the file.
    """
    for reader_path in _OWN_READERS:
        module, _, class_name = reader_path.partition(":")
        reader: Reader = getattr(import_module(module), class_name)()
        if reader.recognises(content):
            return reader
    # Imported here because the import takes longer than reading a small file, and few files get to this line.
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        added_reader: Reader = entry_point.load()()
        if added_reader.recognises(content):
            return added_reader
    raise TraceError(
        f"{content.path}: unrecognised file format. memtrace reads its own traces, CUDA memory snapshots (pickle, JSON "
        "or a memory_viz page), Chrome traces of torch.profiler, and the JSON files of export_memory_timeline."
    )
