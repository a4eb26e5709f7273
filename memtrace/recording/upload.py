"""Uploads the trace of one rank to a storage, while it is recorded or later.

A trace is recorded into a folder on disk. Files that are finished there are uploaded: the other tables of a part before
its events, the manifest after the parts that it names, so that what is in the storage opens at every moment. A file
``.upload.json`` in both folders identifies the trace: an upload that was cut off can be continued, and two recordings
never write to the same folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from memtrace.errors import MemtraceError
from memtrace.format.manifest import read_manifest
from memtrace.format.part_files import parse_part_name
from memtrace.format.schema import MANIFEST_NAME, TABLES
from memtrace.format.storage import Entry, StoragePath
from memtrace.format.storage_writer import StorageWriter, check_writable_url

CLAIM_NAME: Final = ".upload.json"
POLL_SECONDS: Final = 1.0
"""Time between two looks at the folder."""
MIN_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 30.0
MAX_LAST_RETRY_SECONDS: Final = 2.0
"""Longest time between two attempts once the recording is over and the program waits."""
JOB_START_NS: Final = 30 * 60 * 10**9
"""Ranks of one job start within this time of each other."""
RELEASE_SECONDS: Final = 10.0
"""Time in which another process of the job moves its trace out of a folder that is this rank's."""
_TABLE_ORDER: Final = {table: place for place, table in enumerate(TABLES)}

LoopReport = Callable[[StoragePath | None, BaseException | None, bool], None]
_FileState = tuple[int, int, int]
"""Size, time of modification and inode: they change with the content."""


class TakenError(MemtraceError):
    """Another trace is at the URL."""


@dataclass(frozen=True)
class LocalRank:
    """The folder of a rank on disk."""

    folder: Path
    rank: int
    world_size: int
    is_complete: bool = False
    """Whether nothing more is written to it."""


class RankUpload:
    """The upload of one rank. Every method can be called again after an error, and continues where it was.

    Args:
        requested: URL of the trace.
        may_rename: where another trace is at the URL, choose another name; otherwise raise TakenError.
        siblings: names of the folders of ranks that belong to the same trace.

    Attributes:
        trace: URL of the trace to which this rank belongs; None until it is known to be free.
    """

    def __init__(self, requested: StoragePath, *, may_rename: bool = True, siblings: Collection[str] = ()) -> None:
        self.trace: StoragePath | None = None
        self._requested = requested
        self._may_rename = may_rename
        self._siblings = frozenset(siblings)
        self._writer: StorageWriter | None = None
        self._identity = ""
        self._place = (-1, -1)
        self._uploaded: dict[str, _FileState] = {}
        self._manifest: bytes | None = None
        self._left: list[tuple[StoragePath, list[str]]] = []
        self._blocked_since: float | None = None

    def bring_up_to_date(self, local: LocalRank, must_stop: Callable[[], bool] = lambda: False) -> bool:
        """Upload what is new in a folder; return whether all of it is in the storage.

        Args:
            local: the folder, which another thread or process may be writing to.
            must_stop: asked between two files.

        Raises:
            StorageError: the storage cannot be used; or OSError for the folder.
            TakenError: another trace is at the URL, and no other name may be chosen.
        """
        if self._writer is None:
            self._writer = StorageWriter(self._requested)
        manifest = (local.folder / MANIFEST_NAME).read_bytes()  # before the listing: its parts are on disk
        files = _list_parts(local.folder)
        if not local.is_complete and not any(name.startswith("events-") for name in files):
            return False
        if self.trace is None or self._place != (local.rank, local.world_size):
            self._claim(local, manifest)
        for name in sorted((name for name in files if files[name] != self._uploaded.get(name)), key=_upload_order):
            if must_stop():
                return False
            if self._put_file(local.folder / name):
                self._uploaded[name] = files[name]
        for name in sorted(self._uploaded.keys() - files.keys(), key=_delete_order):
            self._writer.delete(self._folder / name)
            del self._uploaded[name]
        if must_stop():
            return False
        if manifest != self._manifest:
            self._writer.put(self._folder / MANIFEST_NAME, manifest)
            self._manifest = manifest
        self._delete_left_folders()
        if local.is_complete:
            self._writer.delete(self._folder / CLAIM_NAME)
            with suppress(OSError):
                (local.folder / CLAIM_NAME).unlink(missing_ok=True)
        return local.is_complete

    @property
    def _folder(self) -> StoragePath:
        assert self.trace is not None
        return self.trace / f"rank={self._place[0]}"

    def _put_file(self, path: Path) -> bool:
        assert self._writer is not None
        try:
            self._writer.put(self._folder / path.name, path)
        except FileNotFoundError:  # a ring has deleted it
            return False
        return True

    # The folder in the storage.

    def _claim(self, local: LocalRank, manifest: bytes) -> None:
        """Find the name under which the trace is uploaded, and claim the folder of the rank for it."""
        previous = None if self.trace is None else (self._folder, [*self._uploaded, MANIFEST_NAME, CLAIM_NAME])
        self._identity = self._identity or str(_read_claim(local.folder).get("id") or uuid.uuid4())
        _write_claim(local.folder, {"id": self._identity})
        own = json.loads(manifest)
        for number in count(1):
            name = self._requested.name
            if number > 1:
                name = f"{self._requested.stem}-{number}{self._requested.suffix}"
            trace = self._requested.with_name(name)
            if self._try_claim(trace, local, own, manifest):
                break
            if not self._may_rename:
                raise TakenError(f"{trace}: another trace is there already. Pass another URL.")
        self.trace, self._place = trace, (local.rank, local.world_size)
        _write_claim(local.folder, {"id": self._identity, "url": trace.url})
        if previous is not None and previous[0] != self._folder:  # the process has learned its rank
            self._left.append(previous)
        self._blocked_since = None

    def _try_claim(self, trace: StoragePath, local: LocalRank, own: dict[str, Any], manifest: bytes) -> bool:
        assert self._writer is not None
        folder = trace / f"rank={local.rank}"
        files, ranks = self._writer.list_folder(trace)
        if files or any(not name.startswith("rank=") for name in ranks):
            return False
        others = [name for name in ranks if name != folder.name and name not in self._siblings]
        if others and not _is_of_job(self._read_json(trace / others[0] / MANIFEST_NAME), own, local.world_size):
            return False
        entries = self._writer.list_folder(folder)[0]
        is_unclaimed = MANIFEST_NAME in entries and CLAIM_NAME not in entries
        if is_unclaimed and self._writer.read(folder / MANIFEST_NAME) != manifest:
            return False
        claim = json.dumps({"id": self._identity}).encode()
        if not self._writer.create(folder / CLAIM_NAME, claim):
            self._wait_for_release(folder, own)
            return False
        self._uploaded = {
            name: state
            for name, state in _list_parts(local.folder).items()
            if name in entries and _is_same(local.folder / name, entries[name])
        }
        # Parts of the folder that are not on disk any more, such as those of a ring, are deleted.
        self._uploaded |= {name: (0, 0, 0) for name in entries if parse_part_name(name) and name not in self._uploaded}
        self._manifest = None
        return True

    def _wait_for_release(self, folder: StoragePath, own: dict[str, Any]) -> None:
        """Raise OSError for a while, so that the caller tries again, where another process of the job may leave."""
        if own.get("world_size", 1) == 1:
            return
        other = self._read_json(folder / MANIFEST_NAME) or {}
        if other.get("world_size") != 1 or other.get("finished"):
            return
        now = time.monotonic()
        self._blocked_since = self._blocked_since or now
        if now - self._blocked_since < RELEASE_SECONDS:
            raise OSError(f"{folder} belongs to another process of the job, which moves its trace when it ends")

    def _read_json(self, path: StoragePath) -> dict[str, Any] | None:
        """Return the object in a JSON file of the storage; None where there is no file."""
        assert self._writer is not None
        text = self._writer.read(path)
        if text is None:
            return None
        try:
            content = json.loads(text)
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _delete_left_folders(self) -> None:
        assert self._writer is not None
        while self._left:
            folder, names = self._left[-1]
            for name in sorted(names, key=lambda name: name != MANIFEST_NAME):  # without it, it is no trace
                self._writer.delete(folder / name)
            self._left.pop()


def _list_parts(folder: Path) -> dict[str, _FileState]:
    """Return the state of each finished part in the folder of a rank."""
    files = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if parse_part_name(entry.name) is not None:
                with suppress(FileNotFoundError):  # a ring has deleted it
                    status = entry.stat()
                    files[entry.name] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return files


def _upload_order(name: str) -> tuple[int, bool, int]:
    """Sort parts by number, the events of each last."""
    table, number = parse_part_name(name) or ("", 0)
    return number, table == "events", _TABLE_ORDER.get(table, 0)


def _delete_order(name: str) -> tuple[int, bool, int]:
    """Sort parts by number, the keyframe of each first."""
    table, number = parse_part_name(name) or ("", 0)
    return number, table != "live", _TABLE_ORDER.get(table, 0)


def _is_same(path: Path, entry: Entry) -> bool:
    """Whether a file is in the storage already, as far as the storage can say."""
    content = path.read_bytes() if path.stat().st_size == entry.size_bytes else None
    if content is None:
        return False
    tag = entry.version.strip('"')
    is_digest = len(tag) == 32 and all(character in "0123456789abcdef" for character in tag)
    return not is_digest or hashlib.md5(content, usedforsecurity=False).hexdigest() == tag


def _is_of_job(other: dict[str, Any] | None, own: dict[str, Any], world_size: int) -> bool:
    """Whether the manifest of another rank belongs to the same job: as many ranks, started at about the same time."""
    if world_size == 1:
        return False
    if other is None:
        return True  # another rank that has only claimed its folder
    start, own_start = other.get("t0_epoch_ns"), own.get("t0_epoch_ns")
    if not isinstance(start, int) or not isinstance(own_start, int) or abs(start - own_start) > JOB_START_NS:
        return False
    has_no_rank_yet = other.get("world_size") == 1 and not other.get("finished")
    return other.get("world_size") == world_size or has_no_rank_yet


def _read_claim(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / CLAIM_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_claim(folder: Path, content: dict[str, str]) -> None:
    with suppress(OSError):  # without it, an upload that is cut off begins again
        (folder / CLAIM_NAME).write_text(json.dumps(content), encoding="utf-8")


def upload_trace(trace: Path, url: StoragePath) -> list[int]:
    """Upload a trace on disk. An upload that was cut off is continued.

    Args:
        trace: folder of the trace, or of one rank.
        url: URL of the trace in the storage.

    Returns:
        The ranks that are uploaded.

    Raises:
        MemtraceError: the folder is not a trace, there is another trace at the URL, or the storage cannot be used.
    """
    check_writable_url(url)
    if (trace / MANIFEST_NAME).is_file():
        folders = [trace]
    else:
        folders = sorted(folder for folder in trace.glob("rank=*") if (folder / MANIFEST_NAME).is_file())
    if not folders:
        raise MemtraceError(f"{trace} is not a memtrace trace on disk. Pass a folder that memtrace.record wrote.")
    manifests = [read_manifest(folder / MANIFEST_NAME) for folder in folders]
    for folder, manifest in zip(folders, manifests, strict=True):
        upload = RankUpload(url, may_rename=False, siblings=[f"rank={other.rank}" for other in manifests])
        local = LocalRank(folder, manifest.rank, manifest.world_size, is_complete=True)
        try:
            upload.bring_up_to_date(local)
        except OSError as error:
            raise MemtraceError(f"{error} Run the command again to continue the upload of {trace}.") from error
    return [manifest.rank for manifest in manifests]


class UploadLoop:
    """Uploads a rank until its recording is over and everything is in the storage, with a pause after each failure.

    Args:
        url: URL of the trace.
        local: the folder.
        report: called after every attempt with the URL of the trace, when it is known, with the error, None after a
            success, and with whether the recording was over.
    """

    def __init__(self, url: StoragePath, local: LocalRank, report: LoopReport) -> None:
        self.is_done = False
        self._upload = RankUpload(url)
        self._local = local
        self._report = report
        self._wake = threading.Event()
        self._is_stopped = False
        self._is_alone = False
        self._deadline = float("inf")

    def update(self, local: LocalRank) -> None:
        """Note where the folder is now, and whether it is complete; called on another thread."""
        self._local = local
        self._wake.set()

    def stop(self) -> None:
        """End as soon as possible; called on another thread."""
        self._is_stopped = True
        self._wake.set()

    def end_alone(self, seconds: float) -> None:
        """Upload what is on disk, for at most some seconds: the recorded process is gone. Called on another thread."""
        self._is_alone = True
        self._deadline = time.monotonic() + seconds
        self._wake.set()

    def run(self) -> None:
        """Upload until everything is there, or until ``stop``."""
        num_failures = 0
        while not self._is_stopped and time.monotonic() < self._deadline:
            self._wake.clear()
            local, is_alone = self._local, self._is_alone
            pause = POLL_SECONDS
            try:
                is_whole = self._upload.bring_up_to_date(local, lambda: self._is_stopped)
            except Exception as error:
                num_failures += 1
                longest = MAX_LAST_RETRY_SECONDS if local.is_complete else MAX_RETRY_SECONDS
                pause = min(longest, MIN_RETRY_SECONDS * 2.0 ** min(num_failures, 16))
                self._report(self._upload.trace, error, local.is_complete)
            else:
                num_failures = 0
                self._report(self._upload.trace, None, local.is_complete)
                if is_whole or is_alone:
                    self.is_done = is_whole
                    return
            # Many ranks do not all try again at the same moment.
            self._wake.wait(pause * (0.75 + (time.monotonic_ns() & 255) / 512))
