"""A streaming JSON parser: a file of any size takes the memory of its largest element.

It accepts what profilers write although JSON forbids it: control characters in strings, bytes that are not UTF-8, NaN
and infinities as C prints them, and a comma before a closing bracket.
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
        # scan_once parses a value and returns where it ends; the type stubs do not list it.
        self._scan = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
        self._text = ""
        self._position = 0
        self._at_end_of_file = False

    def peek(self) -> str:
        """Return the next character that is not whitespace, without consuming it; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._text):
                return self._text[self._position]
            if self._at_end_of_file:
                return ""
            self._refill()

    def value(self) -> Any:
        """Parse the next value.

        Raises:
            TraceError: the value is damaged, truncated, or longer than ``MAX_VALUE_CHARS``.
        """
        self.peek()
        while True:
            try:
                value, end = self._scan(self._text, self._position)
            except RecursionError:
                raise TraceError(f"{self._path}: nested too deeply to be a memory trace, so it was not read.") from None
            except StopIteration as stop:
                if self._replace_non_number(stop.value):
                    continue
            except json.JSONDecodeError:
                pass
            except ValueError as error:
                self._fail(str(error))
            else:
                # A number at the end of the buffer may continue after it.
                if end < len(self._text) or self._at_end_of_file:
                    self._position = end
                    return value
            if self._at_end_of_file:
                self._fail("it is truncated or damaged here")
            if len(self._text) - self._position > MAX_VALUE_CHARS:
                self._fail(f"a value is longer than {MAX_VALUE_CHARS >> 20} MiB")
            self._refill()

    def items(self) -> Iterator[Any]:
        """Yield the elements of the array at the cursor."""
        for _ in self._elements("[", "]"):
            yield self.value()

    def members(self) -> Iterator[str]:
        """Yield the keys of the object at the cursor. The caller parses each value before it takes the next key."""
        for _ in self._elements("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                self._fail("a key is not a string")
            self._take(":")
            yield key

    def _elements(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        while self.peek() != closing:
            yield
            if self.peek() != closing:
                self._take(",")
        self._take(closing)

    def _take(self, character: str) -> None:
        actual = self.peek()
        if actual != character:
            self._fail(f"expected {character!r} but found {ascii(actual) if actual else 'the end of the file'}")
        self._position += 1

    def _replace_non_number(self, position: int) -> bool:
        """Replace a NaN or an infinity as C prints it by null; return whether there was one."""
        match = _NOT_A_NUMBER.match(self._text, position)
        if match is None or (match.end() == len(self._text) and not self._at_end_of_file):
            return False
        self._text = f"{self._text[self._position : position]}null{self._text[match.end() :]}"
        self._position = 0
        return True

    def _refill(self) -> None:
        rest = self._text[self._position :]
        # Reading at least as much as is left over keeps the number of times that a long value is scanned small.
        data = self._stream.read(max(CHUNK_BYTES, len(rest)))
        self._at_end_of_file = not data
        self._text = rest + self._decoder.decode(data, final=self._at_end_of_file)
        self._position = 0

    def _fail(self, reason: str) -> NoReturn:
        near = ascii(self._text[self._position : self._position + 30])
        raise TraceError(
            f"{self._path}: the JSON is damaged or truncated: {reason} (near {near}). Copy the file again, or "
            "export it again."
        )
