"""Kernels that turn Arrow arrays into numpy arrays.

Integers: null becomes -1. Text of a vocabulary: int8 codes into the vocabulary, -1 for null. Booleans: null becomes
False. Arrow's buffers are read directly because pyarrow's own conversions import pandas, which costs a third of a
second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.errors import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, np.dtype[Any]]

NARROW_LIMIT = 2**31 - 1
_FEW_TEXTS = 4


def distinct(values: Array) -> Array:
    """Return the distinct integers, ascending. Ids are dense, so a table over their range is quicker than sorting."""
    if not len(values):
        return values.astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low == high:
        return np.array([low])
    if high - low < 8 * len(values) + 1024:
        occurs = np.zeros(high - low + 1, bool)
        occurs[values - low] = True
        return np.flatnonzero(occurs) + low
    ordered = np.sort(values)
    different: Array = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return different


def stable_sort(values: Array) -> tuple[Array, Array]:
    """Return ``np.argsort(values, kind="stable")`` of integers and the sorted values.

    It is several times as fast where the range of the values is not huge. Addresses of an allocator are such values, in
    units of their alignment, and so are rows. The number of the row fits into the same 64 bits then, and sorting
    numbers is much faster than sorting the indices of numbers.
    """
    row_bits = max(len(values) - 1, 1).bit_length()
    lowest, highest = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    key = np.subtract(values, lowest, dtype=np.int64) if highest - lowest < 1 << 62 else None
    set_bits = 1 if key is None else int(np.bitwise_or.reduce(key))
    unused_bits = max((set_bits & -set_bits).bit_length() - 1, 0)
    if key is None or (highest - lowest) >> unused_bits >= 1 << (63 - row_bits):
        order: Array = np.argsort(values, kind="stable")
        return order, values[order]
    key >>= unused_bits
    key <<= row_bits
    key |= np.arange(len(key))
    key.sort()
    order = key & ((1 << row_bits) - 1)
    key >>= row_bits
    key <<= unused_bits
    key += lowest
    return order, key


def integers(parts: Sequence[pa.ChunkedArray], dtype: type[np.signedinteger[Any]]) -> Array:
    """Return the parts joined as ``dtype``, null as -1."""
    joined = np.empty(sum(len(part) for part in parts), dtype)
    offset = 0
    for part in parts:
        for chunk in part.chunks:
            _fill(joined[offset : offset + len(chunk)], chunk)
            offset += len(chunk)
    return joined


def narrowest(parts: Sequence[pa.ChunkedArray]) -> type[np.signedinteger[Any]]:
    """Return int32 where every value fits, else int64: dense identities then take half the memory."""
    fits = all(outlier(part, -NARROW_LIMIT - 1, NARROW_LIMIT) is None for part in parts)
    return np.int32 if fits else np.int64


def outlier(values: pa.ChunkedArray, low: int, high: int) -> int | None:
    """Return one of the integers that are not null and less than ``low`` or greater than ``high``; None without any."""

    def find(numbers: Array) -> int | None:
        if not len(numbers):
            return None
        smallest, largest = int(numbers.min()), int(numbers.max())
        if smallest < low:
            return smallest
        return largest if largest > high else None

    for chunk in values.chunks:
        # What is under a null is mostly 0, so that it is rarely necessary to leave it out.
        if find(raw_numbers(chunk)) is not None and (wrong := find(known_numbers(chunk))) is not None:
            return wrong
    return None


def booleans(parts: Sequence[pa.ChunkedArray]) -> Array:
    """Return the parts joined as bool, null as False."""
    chunks = [chunk for part in parts for chunk in part.chunks]
    arrays = [_bits(chunk, 1) & valid(chunk) for chunk in chunks]
    return np.concatenate(arrays) if arrays else np.empty(0, bool)


def raw_numbers(chunk: pa.Array) -> Array:
    """Return the values of an integer array, anything where it is null."""
    if not len(chunk):
        return np.empty(0, np.int64)
    return np.frombuffer(chunk.buffers()[1], chunk.type.to_pandas_dtype())[chunk.offset : chunk.offset + len(chunk)]


def _numbers(chunk: pa.Array) -> Array:
    """Return the values of an integer array, null as -1."""
    values = raw_numbers(chunk)
    if not chunk.null_count:
        return values
    filled = np.empty_like(values)
    _fill(filled, chunk)
    return filled


def _fill(place: Array, chunk: pa.Array) -> None:
    """Write the values of an integer array to ``place``, null as -1: the number whose bits are all set."""
    if chunk.null_count:
        # Several times as fast as choosing by a condition.
        np.bitwise_or(raw_numbers(chunk), valid(chunk).view(np.int8) - np.int8(1), out=place)
    else:
        place[:] = raw_numbers(chunk)


def known_numbers(chunk: pa.Array) -> Array:
    """Return the values of an integer array that are not null."""
    values = raw_numbers(chunk)
    return values[valid(chunk)] if chunk.null_count else values


def valid(chunk: pa.Array) -> Array:
    """Return where an array is not null."""
    return _bits(chunk, 0) if chunk.null_count else np.ones(len(chunk), bool)


def _bits(chunk: pa.Array, buffer: int) -> Array:
    """Unpack a buffer of bits: buffer 0 is the validity of the values, buffer 1 holds the values of booleans."""
    if not len(chunk):
        return np.empty(0, bool)
    packed = np.frombuffer(chunk.buffers()[buffer], np.uint8)
    return np.unpackbits(packed, count=chunk.offset + len(chunk), bitorder="little")[chunk.offset :].view(bool)


def text_values(parts: Sequence[pa.ChunkedArray]) -> set[str]:
    """Return every text that occurs in the parts."""
    values: set[str] = set()
    # By chunk: the dictionaries of two row groups may differ.
    for chunk in (chunk for part in parts for chunk in part.chunks):
        encoded = chunk if hasattr(chunk, "dictionary") else chunk.dictionary_encode()
        texts = encoded.dictionary.to_pylist()
        values.update(texts[code] for code in _codes_in_use(_numbers(encoded.indices)))
    return values - {None}


def codes(parts: Sequence[pa.ChunkedArray], code_of: Callable[[str], int]) -> Array:
    """Return the parts joined as int8 codes: ``code_of`` each text, -1 for null."""
    joined = np.empty(sum(len(part) for part in parts), np.int8)
    offset = 0
    for part in parts:
        for chunk in part.chunks:
            encoded = chunk if hasattr(chunk, "dictionary") else chunk.dictionary_encode()
            joined[offset : offset + len(chunk)] = _codes_of_chunk(encoded, code_of)
            offset += len(chunk)
    return joined


def _codes_in_use(indices: Array) -> list[int]:
    """Return the indices into a dictionary that occur, without null. They are few and repeat: counted, not sorted."""
    largest = int(indices.max(initial=-1))
    if largest < _FEW_TEXTS:
        return [index for index in range(largest + 1) if bool((indices == index).any())]
    in_use: list[int] = np.flatnonzero(np.bincount(indices + 1)[1:]).tolist() if len(indices) else []
    return in_use


def _codes_of_chunk(chunk: Any, code_of: Callable[[str], int]) -> Array:
    indices = _numbers(chunk.indices)
    # A dictionary may hold texts that no row uses: only those in use must be known. The last entry serves null.
    texts = chunk.dictionary.to_pylist()
    lookup = np.full(len(texts) + 1, -1, np.int8)
    in_use = _codes_in_use(indices)
    for index in in_use:
        if texts[index] is not None:
            lookup[index] = code_of(texts[index])
    if indices.dtype != np.int8:
        coded: Array = lookup[indices]
        return coded
    if all(lookup[index] == index for index in in_use):
        return indices  # as in the parts of a recording
    # A code takes one byte, as an index does. Null is -1, the last byte.
    by_byte = np.full(256, -1, np.int8)
    known = lookup[: min(len(texts), 128)]
    by_byte[: len(known)] = known
    return np.frombuffer(indices.tobytes().translate(by_byte.tobytes()), np.int8)


def vocabulary_coder(vocabulary: Sequence[str], column: str) -> Callable[[str], int]:
    """Return a function from a text to its code in ``vocabulary``; it raises TraceError for any other text."""
    code_by_text = {text: code for code, text in enumerate(vocabulary)}

    def code_of(text: str) -> int:
        if text not in code_by_text:
            raise TraceError(f"has {text[:40]!a} in the column {column}, which is not one of {', '.join(vocabulary)}")
        return code_by_text[text]

    return code_of
