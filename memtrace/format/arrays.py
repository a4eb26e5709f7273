"""Arrow columns to plain numpy columns, as the analysis kernels take them.

Integers: null becomes -1. Text of a closed vocabulary: int8 codes into the vocabulary, -1 for null. Booleans: null
becomes False.
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


def integers(parts: Sequence[pa.ChunkedArray], dtype: type[np.signedinteger[Any]]) -> Array:
    """The parts joined as ``dtype``, null as -1."""
    joined = np.empty(sum(len(part) for part in parts), dtype)
    at = 0
    for part in parts:
        for chunk in part.chunks:
            joined[at : at + len(chunk)] = _numbers(chunk)
            at += len(chunk)
    return joined


def narrowest(parts: Sequence[pa.ChunkedArray]) -> type[np.signedinteger[Any]]:
    """int32 where every value fits, else int64. Half the memory for identities, which are dense."""
    largest = max((int(_numbers(chunk).max(initial=-1)) for part in parts for chunk in part.chunks), default=-1)
    return np.int32 if largest <= NARROW_LIMIT else np.int64


def booleans(parts: Sequence[pa.ChunkedArray]) -> Array:
    """The parts joined as bool, null as False."""
    chunks = [chunk for part in parts for chunk in part.chunks]
    arrays = [_bits(chunk, 1) & _valid(chunk) for chunk in chunks]
    return np.concatenate(arrays) if arrays else np.empty(0, bool)


# Buffers are looked at directly because pyarrow's own conversions import pandas, which costs a third of a second.


def _numbers(chunk: pa.Array) -> Array:
    """The values of an integer array, null as -1."""
    if not len(chunk):
        return np.empty(0, np.int64)
    values = np.frombuffer(chunk.buffers()[1], chunk.type.to_pandas_dtype())[chunk.offset : chunk.offset + len(chunk)]
    return np.where(_valid(chunk), values, -1) if chunk.null_count else values


def _valid(chunk: pa.Array) -> Array:
    return _bits(chunk, 0) if chunk.null_count else np.ones(len(chunk), bool)


def _bits(chunk: pa.Array, buffer: int) -> Array:
    """A buffer of bits: 0 says which values are not null, 1 are those of a boolean array."""
    if not len(chunk):
        return np.empty(0, bool)
    packed = np.frombuffer(chunk.buffers()[buffer], np.uint8)
    return np.unpackbits(packed, count=chunk.offset + len(chunk), bitorder="little")[chunk.offset :].astype(bool)


def text_values(parts: Sequence[pa.ChunkedArray]) -> set[str]:
    """Every text that occurs in the parts."""
    values: set[str] = set()
    # By chunk: the dictionaries of two row groups may differ.
    for chunk in (chunk for part in parts for chunk in part.chunks):
        encoded = chunk if hasattr(chunk, "dictionary") else chunk.dictionary_encode()
        texts = encoded.dictionary.to_pylist()
        values.update(texts[place] for place in _in_use(_numbers(encoded.indices)))
    return values - {None}


def codes(parts: Sequence[pa.ChunkedArray], code_of: Callable[[str], int]) -> Array:
    """The parts joined as int8 codes: ``code_of`` each text, -1 for null."""
    joined = np.empty(sum(len(part) for part in parts), np.int8)
    at = 0
    for part in parts:
        for chunk in part.chunks:
            encoded = chunk if hasattr(chunk, "dictionary") else chunk.dictionary_encode()
            joined[at : at + len(chunk)] = _codes_of_chunk(encoded, code_of)
            at += len(chunk)
    return joined


def _in_use(places: Array) -> list[int]:
    """The places in a dictionary that occur, null left out; by counting, for they are small and many."""
    found: list[int] = np.flatnonzero(np.bincount(places + 1)[1:]).tolist() if len(places) else []
    return found


def _codes_of_chunk(chunk: Any, code_of: Callable[[str], int]) -> Array:
    present = _numbers(chunk.indices)
    # A dictionary may hold texts that no row uses: only those in use must be known. The last entry serves null.
    used = set(_in_use(present))
    texts = chunk.dictionary.to_pylist()
    lookup = np.full(len(texts) + 1, -1, np.int8)
    for index, text in enumerate(texts):
        if index in used and text is not None:
            lookup[index] = code_of(text)
    coded: Array = lookup[present]
    return coded


def vocabulary_coder(vocabulary: Sequence[str], column: str) -> Callable[[str], int]:
    """A function from a text to its place in a closed vocabulary; TraceError for a text that is not in it."""
    places = {text: place for place, text in enumerate(vocabulary)}

    def code_of(text: str) -> int:
        if text not in places:
            raise TraceError(
                f"the column {column} holds {text!r}, which is none of {', '.join(vocabulary)}: the trace was "
                "written by another tool or a newer memtrace. Install a newer memtrace, or record again."
            )
        return places[text]

    return code_of
