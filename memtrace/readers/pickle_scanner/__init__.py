"""Reads a pickle of plain values in C++, into columns in place of Python objects.

``scan`` returns the value of a pickle in which the long lists of dicts are ``ScannedRows``; all else is made of Python
objects. Where the scanner cannot be built, or a pickle contains what it does not know, ``memtrace.readers.unpickle``
reads the file instead: it is slower, and the two agree on every file that both can read.
"""

from __future__ import annotations

from memtrace.readers.pickle_scanner.build import find_scanner
from memtrace.readers.pickle_scanner.library import Scanner, UnsupportedPickle
from memtrace.readers.pickle_scanner.scan import TruncatedPickle, scan

__all__ = ["Scanner", "TruncatedPickle", "UnsupportedPickle", "find_scanner", "scan"]
