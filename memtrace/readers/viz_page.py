"""The snapshot inside a page of ``python -m torch.cuda._memory_viz trace_plot``: a pickle in base64 in a script."""

from __future__ import annotations

import binascii
import io
import re
from typing import TYPE_CHECKING, Any, Final

from memtrace.errors import TraceError
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot import snapshot_tables
from memtrace.readers.limits import too_large
from memtrace.readers.unpickle import load_plain

if TYPE_CHECKING:
    from memtrace.readers.registry import Rank

_PAGE: Final = re.compile(rb"\s*<(!doctype html|html|head|script|body)", re.IGNORECASE)
_BEGIN: Final = re.compile(rb'"base64"\s*:\s*"')
_PICTURE: Final = b"GPU Memory Timeline HTML"
_PIECE_BYTES: Final = 1 << 20


class VizPage:
    """Reads a page of memory_viz."""

    def __init__(self) -> None:
        self._value: Any = None

    def recognises(self, content: Content) -> bool:
        """HTML of any kind; what is in it is seen when it is read."""
        return _PAGE.match(content.head) is not None

    def read(self, content: Content) -> list[Rank]:
        """The one rank in the page."""
        if _PICTURE in content.head:
            raise TraceError(
                f"{content.path} is the picture that export_memory_timeline draws, which holds no numbers. Export to "
                "a name "
                "that ends in .raw.json.gz instead."
            )
        reason = too_large(content.size)
        if reason is not None:
            raise TraceError(f"{content.path} {reason}.")
        pickled = _embedded(content)
        self._value = load_plain(pickled, content.path)
        return [snapshot_tables(self._value, content)]


def _embedded(content: Content) -> io.BytesIO:
    """The pickle in the page."""
    with content.open() as file:
        text = file.read(_PIECE_BYTES)
        begin = _BEGIN.search(text)
        if begin is None:
            raise TraceError(
                f"{content.path} is an HTML page without a memory snapshot in it. memtrace reads the pages of "
                "torch.cuda._memory_viz."
            )
        text = text[begin.end() :]
        pickled = io.BytesIO()
        while True:
            quote = text.find(b'"')
            piece, text = (text[:quote], b"") if quote >= 0 else _whole_quads(text)
            try:
                pickled.write(binascii.a2b_base64(piece))
            except binascii.Error as error:
                raise TraceError(f"{content.path} is damaged: the snapshot in it is no base64 ({error}).") from None
            if quote >= 0:
                break
            more = file.read(_PIECE_BYTES)
            if not more:
                raise TraceError(f"{content.path} is truncated: the snapshot in it has no end. Copy it again.")
            text += more
    pickled.seek(0)
    return pickled


def _whole_quads(text: bytes) -> tuple[bytes, bytes]:
    """Base64 decodes four characters at a time: those, and what is left."""
    end = len(text) - len(text) % 4
    return text[:end], text[end:]
