"""Pages of ``python -m torch.cuda._memory_viz trace_plot``.

Such a page contains the snapshot as a base64-encoded pickle in a script.
"""

from __future__ import annotations

import binascii
import io
import re
import string
from typing import Any, Final

from memtrace.errors import TraceError
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot import read_pickled
from memtrace.readers.rank import ReadRank

_PAGE: Final = re.compile(rb"\s*<(!doctype html|html|head|script|body)", re.IGNORECASE)
_BEGIN: Final = re.compile(rb'"base64"\s*:\s*"')
_TIMELINE_PICTURE: Final = b"GPU Memory Timeline HTML"
_CHUNK_BYTES: Final = 1 << 20
_BASE64_CHARACTERS: Final = (string.ascii_letters + string.digits + "+/=" + string.whitespace).encode()


class VizPage:
    """Reads a memory_viz page."""

    def __init__(self) -> None:
        # Kept alive with the reader, see memtrace.readers.isolated.
        self._kept: list[Any] = []

    def recognises(self, content: Content) -> bool:
        """Return True for any HTML; ``read`` looks for the snapshot in it."""
        return _PAGE.match(content.head) is not None

    def read(self, content: Content) -> list[ReadRank]:
        """Read the one rank in the page."""
        if _TIMELINE_PICTURE in content.head:
            raise TraceError(
                f"{content.path}: the page that export_memory_timeline draws contains a picture and no numbers. Export "
                "to a file name that ends in .raw.json.gz instead."
            )
        pickled = _embedded_pickle(content)
        return [read_pickled(lambda: io.BytesIO(pickled), content, self._kept)]


def _embedded_pickle(content: Content) -> bytes:
    """Decode the pickle in the page."""
    with content.open() as file:
        text = file.read(_CHUNK_BYTES)
        begin = _BEGIN.search(text)
        if begin is None:
            raise TraceError(
                f"{content.path}: the HTML page contains no memory snapshot. Pass a page that "
                "torch.cuda._memory_viz wrote, or the snapshot itself."
            )
        text = text[begin.end() :]
        pickled = io.BytesIO()
        while True:
            quote = text.find(b'"')
            encoded, text = (text[:quote], b"") if quote >= 0 else _split_whole_groups(text)
            try:
                # binascii skips other characters, to the end of a file of any size.
                if other := encoded.translate(None, _BASE64_CHARACTERS):
                    raise binascii.Error(f"it contains the byte {other[:1]!r}")
                pickled.write(binascii.a2b_base64(encoded))
            except binascii.Error as error:
                raise TraceError(
                    f"{content.path}: the snapshot in the page is damaged base64 ({error}). Copy the file again."
                ) from None
            if quote >= 0:
                break
            more = file.read(_CHUNK_BYTES)
            if not more:
                raise TraceError(f"{content.path}: the snapshot in the page is truncated. Copy the file again.")
            text += more
    return pickled.getvalue()


def _split_whole_groups(text: bytes) -> tuple[bytes, bytes]:
    """Split off the largest part that is a multiple of four characters, which base64 decodes as a group."""
    end = len(text) - len(text) % 4
    return text[:end], text[end:]
