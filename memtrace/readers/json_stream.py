"""JSON read piece by piece, so that a file of any size costs the memory of its largest piece.

Tolerant of what profilers write: control characters in strings, bytes that are no UTF-8, NaN and infinities in C's
spelling, a comma before a closing bracket.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from memtrace.errors import TraceError

CHUNK_BYTES: Final = 1 << 18
MAX_VALUE_CHARS: Final = 64 << 20
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_NOT_A_NUMBER: Final = re.compile(r"[-+]?(nan|inf(inity)?)\b", re.IGNORECASE)


class JsonStream:
    """A cursor in a JSON document."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        # An attribute that the type stubs leave out: reads a value and tells where it ends.
        self._scan = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
        self._text = ""
        self._at = 0
        self._ended = False

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._refill()

    def value(self) -> Any:
        """The next value, whole. TraceError where it is damaged, cut off, or larger than any part of a trace."""
        self.peek()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except RecursionError:
                raise TraceError(f"{self._path} is nested deeper than any trace: refused.") from None
            except StopIteration as stop:
                if self._mended(stop.value):
                    continue
            except json.JSONDecodeError:
                pass
            except ValueError as error:
                self._fail(str(error))
            else:
                # A number at the end of what was read so far may go on.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            if self._ended:
                self._fail("it is cut off or damaged here")
            if len(self._text) - self._at > MAX_VALUE_CHARS:
                self._fail(f"one value is longer than {MAX_VALUE_CHARS >> 20} MiB, or damaged")
            self._refill()

    def items(self) -> Iterator[Any]:
        """The elements of the array that comes next, one after the other."""
        for _ in self._places("[", "]"):
            yield self.value()

    def members(self) -> Iterator[str]:
        """The keys of the object that comes next. Take the value of each before the next key."""
        for _ in self._places("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                self._fail("a key is no text")
            self._take(":")
            yield key

    def _places(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        while self.peek() != closing:
            yield
            if self.peek() != closing:
                self._take(",")
        self._take(closing)

    def _take(self, character: str) -> None:
        found = self.peek()
        if found != character:
            self._fail(
                f"it ends where {character!r} should be" if not found else f"{found!r} where {character!r} should be"
            )
        self._at += 1

    def _mended(self, place: int) -> bool:
        """Replace what C prints for numbers that are none by null, which JSON can say."""
        match = _NOT_A_NUMBER.match(self._text, place)
        if match is None or (match.end() == len(self._text) and not self._ended):
            return False
        self._text = f"{self._text[self._at : place]}null{self._text[match.end() :]}"
        self._at = 0
        return True

    def _refill(self) -> None:
        rest = self._text[self._at :]
        # At least as much again as is left over, so that a long value is not scanned over and over.
        data = self._stream.read(max(CHUNK_BYTES, len(rest)))
        self._ended = not data
        self._text = rest + self._decoder.decode(data, final=self._ended)
        self._at = 0

    def _fail(self, reason: str) -> NoReturn:
        near = ascii(self._text[self._at : self._at + 30])
        raise TraceError(f"{self._path} is damaged JSON, or cut off: {reason} (near {near}). Export or copy it again.")
