"""Runs an upload beside a recording: in a process of its own, or on a thread where no process can do it.

A process shares neither the interpreter lock nor the state of the random number generators with the training, and goes
on for a while where the training is killed. It reads its orders from its standard input, a JSON object a line, and
answers on its standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from memtrace.format.storage import StoragePath, is_of_this_process, is_permanent
from memtrace.recording.background import BackgroundTask
from memtrace.recording.upload import LocalRank, UploadLoop

NICENESS: Final = 10
"""The upload takes what the training leaves of the processors."""
_CODE: Final = "from memtrace.recording.upload_process import main; main()"


@dataclass(frozen=True)
class UploadState:
    """How far an upload is."""

    trace: StoragePath | None = None
    """URL of the trace; None until it is known to be free."""
    is_done: bool = False
    """Whether the recording is over and everything is in the storage."""
    error: str | None = None
    """Why the last attempt failed; None where it did not."""
    is_permanent: bool = False
    """Whether the error stays until somebody corrects something."""
    is_last: bool = False
    """Whether the recording was over at the last attempt."""


Report = Callable[[UploadState], None]


class Uploader(Protocol):
    """Something that uploads a rank. Its methods do not wait for the storage."""

    @property
    def has_ended(self) -> bool:
        """Whether it does nothing any more, done or not."""
        ...

    def update(self, local: LocalRank) -> None:
        """Note where the folder of the rank is now, and whether it is complete."""
        ...

    def stop(self) -> None:
        """End as soon as possible."""
        ...

    def abandon(self) -> None:
        """Leave the upload to the parent, in a forked child."""
        ...


class UploadThread:
    """An upload on a thread of this process.

    Args:
        url: URL of the trace.
        local: the folder of the rank.
        report: called on the thread after every attempt.
    """

    def __init__(self, url: StoragePath, local: LocalRank, report: Report) -> None:
        self._report = report
        self._loop = UploadLoop(url, local, self._reported)
        self._state = UploadState()
        self._task = BackgroundTask(self._run)
        self.has_ended = not self._task.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        finally:
            self.has_ended = True
            self._report(replace(self._state, is_done=self._loop.is_done))

    def _reported(self, trace: StoragePath | None, error: BaseException | None, is_last: bool) -> None:
        self._state = _describe(trace, error, is_last)
        self._report(self._state)

    def update(self, local: LocalRank) -> None:
        """Note where the folder of the rank is now, and whether it is complete."""
        self._loop.update(local)

    def stop(self) -> None:
        """End after the current request."""
        self._loop.stop()

    def abandon(self) -> None:
        """Do nothing: the thread stayed in the parent."""


def _describe(trace: StoragePath | None, error: BaseException | None, is_last: bool) -> UploadState:
    if error is None:
        return UploadState(trace, is_last=is_last)
    reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".") + "."
    return UploadState(trace, False, reason, is_permanent(error.__cause__ or error), is_last)


class UploadProcess:
    """An upload in a process of its own.

    Args:
        url: URL of the trace.
        local: the folder of the rank.
        report: called on a thread whenever there is something new.
        last_seconds: how long the process may go on where this one is gone.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, url: StoragePath, local: LocalRank, report: Report, last_seconds: float) -> None:
        self.has_ended = False
        self._report = report
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is meant for the training
        )
        self._owner = os.getpid()
        self._send({"url": url.url, "last_seconds": last_seconds, "settings": _fsspec_settings(), **_as_json(local)})
        if not BackgroundTask(self._read).start():
            self.stop()
            raise OSError("no thread can be started")

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with suppress(OSError, ValueError):
                for line in self._process.stdout:
                    answer = json.loads(line)
                    trace = answer.pop("trace")
                    self._report(UploadState(trace=None if trace is None else StoragePath(trace), **answer))
        finally:
            self.has_ended = True
            with suppress(OSError):
                self._process.wait()

    def update(self, local: LocalRank) -> None:
        """Note where the folder of the rank is now, and whether it is complete."""
        self._send(_as_json(local))

    def stop(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._process.kill()

    def abandon(self) -> None:
        """Close a forked child's ends of the pipes: the process must notice when the parent is gone."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError, ValueError):
                    os.close(pipe.fileno())
        self._process.returncode = 0  # not this process's child: nothing to wait for


def _as_json(local: LocalRank) -> dict[str, Any]:
    return {
        "folder": str(local.folder),
        "rank": local.rank,
        "world_size": local.world_size,
        "is_complete": local.is_complete,
    }


def _local(order: dict[str, Any]) -> LocalRank:
    return LocalRank(Path(order["folder"]), order["rank"], order["world_size"], order["is_complete"])


def _fsspec_settings() -> dict[str, Any]:
    """Return what the program has set in ``fsspec.config``, as far as it can be passed on."""
    config = sys.modules.get("fsspec.config")
    conf = getattr(config, "conf", None)
    settings: dict[str, Any] = {}
    for protocol, options in conf.items() if type(conf) is dict else ():
        with suppress(TypeError, ValueError):
            settings[protocol] = json.loads(json.dumps(options))
    return settings


def start_uploader(url: StoragePath, local: LocalRank, report: Report, last_seconds: float) -> Uploader:
    """Start to upload a rank: in a process, or on a thread where the storage exists in this process only."""
    if not is_of_this_process(url):
        with suppress(OSError, ValueError, TypeError):
            return UploadProcess(url, local, report, last_seconds)
    return UploadThread(url, local, report)


def main() -> None:
    """Upload as the orders on standard input say."""
    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    order = json.loads(sys.stdin.buffer.readline())
    if order["settings"]:
        from fsspec.config import conf

        conf.update(order["settings"])
    last_seconds = float(order["last_seconds"])
    sent: list[UploadState] = []

    def report(state: UploadState) -> None:
        if sent[-1:] == [state]:
            return
        sent[:] = [state]
        with suppress(OSError):
            trace = None if state.trace is None else state.trace.url
            print(json.dumps({**vars(state), "trace": trace}), flush=True)

    loop = UploadLoop(StoragePath(order["url"]), _local(order), lambda *attempt: report(_describe(*attempt)))

    def obey() -> None:
        for line in sys.stdin.buffer:
            with suppress(ValueError, KeyError):
                loop.update(_local(json.loads(line)))
        loop.end_alone(last_seconds)

    threading.Thread(target=obey, daemon=True).start()
    loop.run()
    last = sent[-1] if sent else UploadState()
    report(replace(last, is_done=loop.is_done))
    os._exit(0)  # threads of the storage's package may wait for answers
