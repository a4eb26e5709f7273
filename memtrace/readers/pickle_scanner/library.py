"""The functions of the compiled scanner, called through ctypes."""

from __future__ import annotations

import ctypes
import pickle
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, Final

import numpy as np

from memtrace.readers.tables import Array

_WORD = c_uint64
_YES, _NO, _UNSUPPORTED, _OUT_OF_MEMORY = range(4)
_NO_KEY: Final = (1 << 32) - 1
_TAG_MASK: Final = 15
_TAG_BITS: Final = 4
_LIST, _TUPLE, _DICT = 7, 8, 9
_MISSING: Final = np.uint64(15)
_SIGNATURES: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (
    ("scan_new", c_void_p, ()),
    ("scan_free", None, (c_void_p,)),
    ("scan_reason", c_char_p, (c_void_p,)),
    ("scan_feed", c_int, (c_void_p, c_void_p, c_size_t)),
    ("scan_finish", c_int, (c_void_p, POINTER(_WORD))),
    ("scan_length", c_size_t, (c_void_p, _WORD)),
    ("scan_items", None, (c_void_p, _WORD, c_void_p)),
    ("scan_members", None, (c_void_p, _WORD, c_void_p)),
    ("scan_key", c_uint32, (c_void_p, c_char_p, c_size_t)),
    ("scan_dicts", c_int, (c_void_p, _WORD, c_void_p)),
    ("scan_int64", c_int, (c_void_p, c_void_p, c_size_t, c_uint32, c_void_p)),
    ("scan_words", None, (c_void_p, c_void_p, c_size_t, c_uint32, c_void_p)),
    ("scan_codes", c_int, (c_void_p, c_void_p, c_size_t, c_uint32, c_void_p, POINTER(c_size_t))),
    ("scan_distinct", POINTER(_WORD), (c_void_p,)),
    ("scan_dump", c_int, (c_void_p, c_void_p, c_size_t, POINTER(POINTER(c_uint8)), POINTER(c_size_t))),
)


class UnsupportedPickle(Exception):
    """The pickle contains what the scanner does not know. The Python reader decides whether it is valid."""


class Scanner:
    """The compiled scanner.

    Args:
        library: the shared library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library: Any = library
        for name, result, arguments in _SIGNATURES:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments


def _zeros(count: int) -> Array:
    """Return codes of a column with one value, which take no memory."""
    return np.broadcast_to(np.int32(0), count)


class Scan:
    """One pickle that is or was scanned. Its values are 64-bit words: a tag and the value or its number."""

    def __init__(self, scanner: Scanner) -> None:
        self._library = scanner.library
        self._handle = self._library.scan_new()
        if not self._handle:
            raise MemoryError

    def close(self) -> None:
        """Free all values."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.scan_free(handle)

    def __del__(self) -> None:
        self.close()

    def feed(self, data: Array) -> None:
        """Scan the next bytes of the pickle.

        Raises:
            UnsupportedPickle: they contain what the scanner does not know.
        """
        self._check(self._library.scan_feed(self._handle, data.ctypes.data, len(data)))

    def result(self) -> int | None:
        """Return the pickled value as a word; None if the pickle is not whole yet."""
        word = _WORD()
        return word.value if self._library.scan_finish(self._handle, byref(word)) == _YES else None

    def items(self, word: int) -> Array | None:
        """Return the elements of a list or tuple as words; None for other values."""
        if word & _TAG_MASK not in (_LIST, _TUPLE):
            return None
        items = np.empty(self._library.scan_length(self._handle, word), np.uint64)
        self._library.scan_items(self._handle, word, items.ctypes.data)
        return items

    def dicts(self, word: int) -> Array | None:
        """Return the numbers of the dicts in a list or tuple of dicts; None for other values."""
        if word & _TAG_MASK not in (_LIST, _TUPLE):
            return None
        dicts = np.empty(self._library.scan_length(self._handle, word), np.uint32)
        return dicts if self._library.scan_dicts(self._handle, word, dicts.ctypes.data) == _YES else None

    def is_dict(self, word: int) -> bool:
        """Return whether a word is a dict."""
        return word & _TAG_MASK == _DICT

    def is_list(self, word: int) -> bool:
        """Return whether a word is a list."""
        return word & _TAG_MASK == _LIST

    def members(self, word: int) -> dict[str, int]:
        """Return the values of a dict as words, by key."""
        words = np.empty(2 * self._library.scan_length(self._handle, word), np.uint64)
        self._library.scan_members(self._handle, word, words.ctypes.data)
        return dict(zip(self.objects(words[::2]), words[1::2].tolist(), strict=True))

    def dict_words(self, dicts: Array) -> Array:
        """Return dicts, given by number, as words."""
        words: Array = dicts.astype(np.uint64) << np.uint64(_TAG_BITS) | np.uint64(_DICT)
        return words

    def int64(self, dicts: Array, key: str) -> Array | None:
        """Return the values of a key as int64; None unless each dict has an integer of 64 bits."""
        number = self._key(key)
        if number == _NO_KEY:
            return None if len(dicts) else np.zeros(0, np.int64)
        values = np.empty(len(dicts), np.int64)
        arguments = (dicts.ctypes.data, len(dicts), number, values.ctypes.data)
        return values if self._library.scan_int64(self._handle, *arguments) == _YES else None

    def words(self, dicts: Array, key: str) -> Array:
        """Return the values of a key as words; 15 where a dict does not have it."""
        number = self._key(key)
        if number == _NO_KEY:
            return np.full(len(dicts), _MISSING)
        words = np.empty(len(dicts), np.uint64)
        self._library.scan_words(self._handle, dicts.ctypes.data, len(dicts), number, words.ctypes.data)
        return words

    def codes(self, dicts: Array, key: str) -> tuple[Array, Array]:
        """Return for each dict the index of its value in the distinct values, and those as words."""
        number = self._key(key)
        if number == _NO_KEY:
            return _zeros(len(dicts)), np.full(min(len(dicts), 1), _MISSING)
        codes = np.empty(len(dicts), np.int32)
        num_distinct = c_size_t()
        arguments = (dicts.ctypes.data, len(dicts), number, codes.ctypes.data, byref(num_distinct))
        self._check(self._library.scan_codes(self._handle, *arguments))
        if not num_distinct.value:
            return codes, np.empty(0, np.uint64)
        distinct = self._library.scan_distinct(self._handle)
        if num_distinct.value == 1:
            codes = _zeros(len(dicts))
        return codes, np.ctypeslib.as_array(distinct, (num_distinct.value,)).copy()

    def objects(self, words: Array) -> list[Any]:
        """Return values as Python objects: one object for a value that appears twice.

        Raises:
            UnsupportedPickle: they are nested too deeply.
        """
        words = np.ascontiguousarray(words)
        data, num_bytes = POINTER(c_uint8)(), c_size_t()
        self._check(self._library.scan_dump(self._handle, words.ctypes.data, len(words), byref(data), byref(num_bytes)))
        # The scanner wrote this pickle itself, of plain values only.
        content: Any = np.ctypeslib.as_array(data, (num_bytes.value,))
        objects: list[Any] = pickle.loads(content)
        return objects

    def _key(self, key: str) -> int:
        encoded = key.encode()
        number: int = self._library.scan_key(self._handle, encoded, len(encoded))
        return number

    def _check(self, status: int) -> None:
        if status == _OUT_OF_MEMORY:
            raise MemoryError
        if status == _UNSUPPORTED:
            raise UnsupportedPickle(self._library.scan_reason(self._handle).decode())
