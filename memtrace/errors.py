"""The errors a user can meet. The command line prints their message and exits with code 2."""


class MemtraceError(Exception):
    """Something a user can mend: the message says what is wrong with what, and what to do."""


class TraceError(MemtraceError):
    """A trace or a foreign file cannot be read: the message names the file, the fault and the way out."""
