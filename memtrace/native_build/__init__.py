"""Compiles memtrace's C++ on the user's machine and caches the result.

Which sources a module has, and with which flags they are compiled, is decided by those who use it:
``memtrace.recording.observers`` and ``memtrace.readers.pickle_scanner``.
"""
