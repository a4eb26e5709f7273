"""The wire format of protocol buffers: single messages, and columns of messages.

A message is the concatenation of its fields, so fields and messages are ``bytes`` (one) or ``ByteRows`` (many).
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from typing import Final

from memtrace.exporters.byte_rows import ByteRows, constant, joined, little_endian, varints
from memtrace.format.arrays import Array

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH_DELIMITED: Final = 2


def int_field(number: int, value: int) -> bytes:
    """Return a field of an integer, boolean or enum."""
    return _tag(number, _VARINT) + _varint(value)


def packed_field(number: int, values: list[int]) -> bytes:
    """Return a repeated field of integers."""
    return bytes_field(number, b"".join(map(_varint, values))) if values else b""


def text_field(number: int, text: str) -> bytes:
    """Return a field of text; what UTF-8 cannot encode is replaced."""
    return bytes_field(number, text.encode("utf-8", "replace"))


def bytes_field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, or of a message."""
    return _tag(number, _LENGTH_DELIMITED) + _varint(len(content)) + content


def int_rows(number: int, values: Array) -> ByteRows:
    """Return the field ``int_field`` of many messages."""
    return joined(constant(_tag(number, _VARINT), len(values)), varints(values))


def fixed64_rows(number: int, values: Array) -> ByteRows:
    """Return a field of a fixed64 of many messages."""
    return joined(constant(_tag(number, _FIXED64), len(values)), little_endian(values, 8))


def message_rows(number: int, *fields: ByteRows) -> ByteRows:
    """Return a field of a message that consists of ``fields``, of many messages."""
    message = joined(*fields)
    return joined(constant(_tag(number, _LENGTH_DELIMITED), len(message)), varints(message.lengths()), message)


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    rest = value % (1 << 64)
    content = bytearray()
    while rest > 0x7F:
        content.append(rest & 0x7F | 0x80)
        rest >>= 7
    content.append(rest)
    return bytes(content)
