"""JSON files: Chrome traces, memory snapshots and memory timelines, distinguished by their content."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any, Final

from memtrace.errors import TraceError
from memtrace.readers.chrome_trace import read_chrome_trace
from memtrace.readers.chrome_trace.collect import Collector
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot import read_snapshot
from memtrace.readers.json_stream import JsonStream
from memtrace.readers.limits import describe_memory_shortage
from memtrace.readers.memory_timeline import read_timeline
from memtrace.readers.rank import ReadRank

_SNAPSHOT_KEYS: Final = frozenset({"segments", "device_traces"})
_EVENTS_KEY: Final = "traceEvents"
_NUM_FRAME_KEYS: Final = 3
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class JsonFile:
    """Reads a JSON document of one of these kinds."""

    def recognises(self, content: Content) -> bool:
        """Return True for JSON objects and arrays; ``read`` distinguishes their kinds."""
        head = content.head.removeprefix(_BYTE_ORDER_MARK).lstrip()
        return head[:1] in (b"{", b"[")

    def read(self, content: Content) -> list[ReadRank]:
        """Read the one rank in the file."""
        with content.open() as file:
            stream = JsonStream(file, content.path)
            is_object = stream.peek() == "{"
            rank = _read_chrome_object(stream, content) if is_object else _read_chrome_array(stream, content)
        if rank is not None:
            return [rank]
        value = _load_document(content)
        if isinstance(value, list) and value and isinstance(value[0], list):
            return [read_timeline(value, content)]
        return [read_snapshot(value, content)]


def _read_chrome_object(stream: JsonStream, content: Content) -> ReadRank | None:
    """Read the object at the cursor as a Chrome trace; return None if it is a snapshot."""
    properties: dict[str, Any] = {}
    collector: Collector | None = None
    for key in stream.members():
        if key in _SNAPSHOT_KEYS:
            return None
        if key == _EVENTS_KEY:
            collector = collector or Collector(str(content.path))
            for event in stream.items():
                collector.add(event)
        else:
            properties[key] = stream.value()
    if collector is None:
        raise TraceError(
            f"{content.path}: JSON, but neither a Chrome trace (no 'traceEvents') nor a memory snapshot (no "
            "'segments'). Pass a file that torch.profiler or torch.cuda.memory wrote."
        )
    return read_chrome_trace(collector, properties, content)


def _read_chrome_array(stream: JsonStream, content: Content) -> ReadRank | None:
    """Read the array at the cursor as a Chrome trace; return None if its elements are segments or rows."""
    items = stream.items()
    first = next(items, None)
    if isinstance(first, list) or (isinstance(first, dict) and "blocks" in first):
        return None
    if not isinstance(first, dict):
        raise TraceError(
            f"{content.path}: a JSON array, but its elements are neither trace events nor segments nor rows of a "
            "timeline. Pass a file that torch.profiler or torch.cuda.memory wrote."
        )
    collector = Collector(str(content.path))
    for event in chain([first], items):
        collector.add(event)
    return read_chrome_trace(collector, {}, content)


def _load_document(content: Content) -> Any:
    """Load the whole document into memory."""
    shortage = describe_memory_shortage(content.size_bytes)
    if shortage is not None:
        raise TraceError(f"{content.path}: {shortage}")
    with content.open() as file:
        text = file.read().decode("utf-8-sig", errors="replace")
    shared_frames: dict[tuple[Any, ...], dict[str, Any]] = {}

    def share_frame(value: dict[str, Any]) -> dict[str, Any]:
        """Return one dict for equal frames, as in a pickle; a JSON snapshot takes ten times the memory otherwise."""
        if "filename" not in value or len(value) != _NUM_FRAME_KEYS:
            return value
        try:
            return shared_frames.setdefault(tuple(value.items()), value)
        except TypeError:
            return value

    try:
        return json.loads(text, strict=False, object_hook=share_frame)
    except RecursionError:
        raise
    except ValueError as error:
        raise TraceError(
            f"{content.path}: the JSON is damaged or truncated ({error}). Copy the file again, or export it again."
        ) from None
