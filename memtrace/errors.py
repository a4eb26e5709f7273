"""Errors for the user. The command line prints their message and exits with code 2."""


class MemtraceError(Exception):
    """An error that the user can fix: the message names the input, what is wrong with it, and what to do."""


class TraceError(MemtraceError):
    """A trace or a file of another tool cannot be read."""
