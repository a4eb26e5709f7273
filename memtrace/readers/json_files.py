"""JSON of several kinds, told apart by what it holds: Chrome traces, snapshots as JSON, memory timelines."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from memtrace.errors import TraceError
from memtrace.readers.chrome_trace import chrome_tables
from memtrace.readers.chrome_trace.collect import Collector
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot import snapshot_tables
from memtrace.readers.json_stream import JsonStream
from memtrace.readers.limits import too_large
from memtrace.readers.memory_timeline import timeline_tables

if TYPE_CHECKING:
    from memtrace.readers.registry import Rank

_SNAPSHOT_KEYS: Final = frozenset({"segments", "device_traces"})
_EVENTS_KEY: Final = "traceEvents"
_FRAME_KEYS: Final = 3
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class JsonFile:
    """Reads a JSON document that is one of the known kinds."""

    def recognises(self, content: Content) -> bool:
        """An object or an array, as all of them are."""
        head = content.head.removeprefix(_BYTE_ORDER_MARK).lstrip()
        return head[:1] in (b"{", b"[")

    def read(self, content: Content) -> list[Rank]:
        """The one rank in the file."""
        with content.open() as file:
            stream = JsonStream(file, content.path)
            rank = _chrome_object(stream, content) if stream.peek() == "{" else _chrome_array(stream, content)
        if rank is not None:
            return [rank]
        value = _whole(content)
        if isinstance(value, list) and value and isinstance(value[0], list):
            return [timeline_tables(value, content)]
        return [snapshot_tables(value, content)]


def _chrome_object(stream: JsonStream, content: Content) -> Rank | None:
    """The Chrome trace in the object that comes next; None where it is a snapshot."""
    about: dict[str, Any] = {}
    found: Collector | None = None
    for key in stream.members():
        if key in _SNAPSHOT_KEYS:
            return None
        if key == _EVENTS_KEY:
            found = found or Collector(str(content.path))
            for event in stream.items():
                found.add(event)
        else:
            about[key] = stream.value()
    if found is None:
        raise TraceError(
            f"{content.path} is JSON, but neither a Chrome trace (no 'traceEvents') nor a memory snapshot (no "
            "'segments')."
        )
    return chrome_tables(found, about, content)


def _chrome_array(stream: JsonStream, content: Content) -> Rank | None:
    """The Chrome trace that the array that comes next may be; None where its elements are segments or rows."""
    items = stream.items()
    first = next(items, None)
    if isinstance(first, list) or (isinstance(first, dict) and "blocks" in first):
        return None
    if not isinstance(first, dict):
        raise TraceError(f"{content.path} is a JSON array, but of nothing that a trace is made of.")
    found = Collector(str(content.path))
    for event in chain([first], items):
        found.add(event)
    return chrome_tables(found, {}, content)


def _whole(content: Content) -> Any:
    """The document as one value, in memory."""
    reason = too_large(content.size)
    if reason is not None:
        raise TraceError(f"{content.path} {reason}.")
    with content.open() as file:
        text = file.read().decode("utf-8-sig", errors="replace")
    frames: dict[tuple[Any, ...], dict[str, Any]] = {}

    def share(value: dict[str, Any]) -> dict[str, Any]:
        """One dict for equal frames, as a pickle has it: without it a JSON snapshot takes ten times the memory."""
        if "filename" not in value or len(value) != _FRAME_KEYS:
            return value
        try:
            return frames.setdefault(tuple(value.items()), value)
        except TypeError:
            return value

    try:
        return json.loads(text, strict=False, object_hook=share)
    except RecursionError:
        raise
    except ValueError as error:
        raise TraceError(f"{content.path} is damaged JSON, or cut off: {error}. Export or copy it again.") from None
