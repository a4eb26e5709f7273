"""Counts the processes that the program starts while it is recorded: their memory is not in the trace."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from types import FunctionType, MethodType
from typing import Any

_RANK_VARIABLES = ("RANK", "LOCAL_RANK")


class ChildProcesses:
    """Counts forks, processes of ``multiprocessing`` and ranks started by the program, such as those of Lightning.

    Workers of a DataLoader are not counted: they only prepare the batches, which are recorded where they arrive.
    Servers of ``multiprocessing.Manager`` are not counted either.

    Attributes:
        num_started: processes counted so far.
    """

    def __init__(self) -> None:
        self.num_started = 0
        self._starting = threading.local()

    def watch(self, undo: ExitStack) -> None:
        """Count from now on, until ``undo`` is closed."""
        self._watch_multiprocessing(undo)
        self._watch_subprocess(undo)

    def note(self, since: int = 0) -> str | None:
        """A sentence about the processes that were not recorded; None if there are none.

        Args:
            since: number of processes that were started before.
        """
        num_started = self.num_started - since
        if num_started == 0:
            return None
        count = "1 child process was" if num_started == 1 else f"{num_started} child processes were"
        return (
            f"{count} started while recording; the memory of a child process is not in this trace. To record it, call "
            "memtrace.record in the function or script that the child process runs"
        )

    def forked(self) -> None:
        """Take note of a fork, in the parent."""
        if not getattr(self._starting, "is_starting", False) and not _is_called_by_subprocess():
            self.num_started += 1

    def _watch_multiprocessing(self, undo: ExitStack) -> None:
        owner: Any = BaseProcess
        original = owner.start

        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            is_helper = _is_helper(process)
            self._starting.is_starting = True
            try:
                original(process)
            finally:
                self._starting.is_starting = False
            self.num_started += not is_helper

        def restore() -> None:
            if owner.start is start:
                owner.start = original

        undo.callback(restore)
        owner.start = start

    def _watch_subprocess(self, undo: ExitStack) -> None:
        owner: Any = subprocess.Popen
        original = owner.__init__

        @functools.wraps(original)
        def init(popen: Any, *args: Any, **kwargs: Any) -> None:
            original(popen, *args, **kwargs)
            self.num_started += _is_rank(kwargs.get("env"))

        def restore() -> None:
            if owner.__init__ is init:
                owner.__init__ = original

        undo.callback(restore)
        owner.__init__ = init


def _is_helper(process: BaseProcess) -> bool:
    """Whether a process is a worker of a DataLoader or the server of a ``multiprocessing.Manager``."""
    target = process.__dict__.get("_target")
    function = target.__func__ if type(target) is MethodType else target
    module = function.__module__ if type(function) is FunctionType else ""
    return module.startswith("torch.utils.data.") or module == "multiprocessing.managers"


def _is_rank(environment: object) -> bool:
    """Whether the environment of a child process gives it a rank other than that of this process."""
    return type(environment) is dict and any(
        environment.get(name, os.environ.get(name)) != os.environ.get(name) for name in _RANK_VARIABLES
    )


def _is_called_by_subprocess() -> bool:
    """Whether a fork is that of ``subprocess``, which replaces the process by another program at once."""
    frame = sys._getframe(1)
    callers = (frame.f_back, frame.f_back.f_back) if frame.f_back is not None else ()
    return any(caller is not None and caller.f_globals.get("__name__") == "subprocess" for caller in callers)
