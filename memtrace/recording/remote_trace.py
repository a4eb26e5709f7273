"""A trace that is recorded into a storage: the folder on disk that it is recorded to, and its upload."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.format.storage import AnyPath, StoragePath
from memtrace.format.storage_writer import check_writable_url
from memtrace.recording.upload import LocalRank
from memtrace.recording.upload_process import Uploader, UploadState, UploadThread, start_uploader

logger = logging.getLogger("memtrace")

UPLOAD_SECONDS: Final = 60.0
"""Default of the time that a ``with`` block waits at its end for the upload."""
LOCAL_FOLDER: Final = "memtrace-uploads"
"""Folder in the working directory for traces that are being uploaded."""
_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class UploadOptions:
    """How a trace gets to its storage; see ``memtrace.record``."""

    seconds: float = UPLOAD_SECONDS
    keep_local: bool = False
    local_dir: Path | None = None


class RemoteTrace:
    """One trace in a storage while it is recorded.

    Args:
        url: the URL that was passed to ``memtrace.record``.
        options: of the upload.

    Attributes:
        local_path: folder on disk to record into.

    Raises:
        MemtraceError: the URL cannot be written to.
    """

    def __init__(self, url: StoragePath, options: UploadOptions) -> None:
        check_writable_url(url)
        if not options.seconds >= 0:
            raise MemtraceError(f"upload_seconds={options.seconds} is out of range; pass a number of seconds from 0")
        self._url = url
        self._options = options
        # Two URLs with the same last part get different folders.
        digest = hashlib.sha256(url.url.encode()).hexdigest()[:8]
        self.local_path = _local_folder(options) / f"{url.stem}-{digest}{url.suffix}"
        self._uploader: Uploader | None = None
        self._local: LocalRank | None = None
        self._state = UploadState()
        self._changed = threading.Event()
        self._has_warned = False
        self._warning = threading.RLock()  # `leave` returns only after the warning
        self._has_named = False
        self._is_abandoned = False
        self._is_leaving = False
        self._is_over = False

    @property
    def path(self) -> AnyPath:
        """URL of the trace; after the recording its folder on disk, where the upload is not complete."""
        if self._is_over and not self._state.is_done and self._local is not None:
            return self._local.folder.parent
        return self._state.trace or self._url

    def rank_folder(self, local: Path) -> AnyPath:
        """Return the folder of the rank: ``local`` as long as it is there."""
        if self._is_over and self._state.is_done and self._local is not None and not local.exists():
            return self.path / f"rank={self._local.rank}"
        return local

    def begin(self, folder: Path, rank: int, world_size: int) -> None:
        """Start to upload what is written to the folder of the rank."""
        self._local = LocalRank(folder, rank, world_size)
        self._uploader = start_uploader(self._url, self._local, self._reported, self._options.seconds)

    def complete(self, folder: Path, rank: int, world_size: int) -> None:
        """Note that nothing more is written to the folder of the rank."""
        self._local = LocalRank(folder, rank, world_size, is_complete=True)
        if self._uploader is not None:
            self._uploader.update(self._local)

    def discard(self) -> None:
        """End the upload of a recording that never began: none of its files has been uploaded."""
        self._is_over = True
        if self._uploader is not None:
            self._uploader.stop()

    def abandon(self) -> None:
        """Become inert in a forked child."""
        self._is_abandoned = True
        if self._uploader is not None:
            self._uploader.abandon()

    def _reported(self, state: UploadState) -> None:
        # Runs on a thread of the upload.
        self._state = state
        self._changed.set()
        if state.trace is not None and not self._has_named:
            self._has_named = True
            if state.trace != self._url:
                self._log(f"{self._url} contains another trace; recording into {state.trace} instead")
        if state.error is not None and state.is_permanent:
            self._warn()

    def _log(self, message: str) -> None:
        with suppress(Exception):  # a handler of the program's
            logger.warning("memtrace: %s", message)

    def _warn(self) -> None:
        """Log the one warning about the upload."""
        if self._local is None or self._is_abandoned:
            return
        trace = self._local.folder.parent
        with self._warning:
            if self._has_warned:
                return
            self._has_warned = True
            url = self._state.trace or self._url
            reason = self._state.error or "the upload takes longer than upload_seconds."
            self._log(
                f"the trace cannot be uploaded: {reason} Training continues, and the trace is recorded in {trace}. If "
                f"it is still there when the recording has ended, upload it with: memtrace upload "
                f"{shlex.quote(str(trace))} {shlex.quote(str(url))}"
            )

    def leave(self) -> None:
        """Wait for the rest of the upload, for a limited time, and then remove the folder on disk if all is uploaded.

        An interrupt of the program ends the wait: call this again.
        """
        if self._is_abandoned or self._is_over or self._uploader is None or self._local is None:
            return
        is_interrupted, self._is_leaving = self._is_leaving, True
        if self._local.is_complete and not is_interrupted:
            self._wait()
        self._is_over = True
        if self._state.is_done:
            self._remove_local()
        else:
            self._uploader.stop()
            self._warn()

    def _wait(self) -> None:
        assert self._uploader is not None
        assert self._local is not None
        deadline = time.monotonic() + self._options.seconds
        self._changed.clear()
        while not self._state.is_done and time.monotonic() < deadline:
            if self._uploader.has_ended:
                if isinstance(self._uploader, UploadThread):
                    return
                # The process was killed, or could not import memtrace.
                self._uploader = UploadThread(self._url, self._local, self._reported)
            if self._changed.wait(_POLL_SECONDS):
                self._changed.clear()
                if self._state.error is not None and self._state.is_permanent and self._state.is_last:
                    return

    def _remove_local(self) -> None:
        if self._options.keep_local or self._local is None:
            return
        trace = self._local.folder.parent
        shutil.rmtree(self._local.folder, ignore_errors=True)
        with suppress(OSError):
            trace.rmdir()  # fails if it contains other ranks
            if self._options.local_dir is None:
                trace.parent.rmdir()  # fails if it contains other traces


def _local_folder(options: UploadOptions) -> Path:
    """Return the folder for traces that are being uploaded: on the disk of the program's files if that is possible."""
    if options.local_dir is not None:
        return options.local_dir.absolute()
    with suppress(OSError):
        here = Path.cwd()
        if os.access(here, os.W_OK):
            return here / LOCAL_FOLDER
    return Path(tempfile.gettempdir()) / LOCAL_FOLDER
