"""The upload of a rank: what is in the storage at every moment, and where it goes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memtrace
from memtrace.errors import MemtraceError, TraceError
from memtrace.format.manifest import read_manifest, write_manifest
from memtrace.format.part_writer import KEYFRAMED_TABLES
from memtrace.format.storage import StorageError, StoragePath
from memtrace.format.storage_writer import StorageWriter
from memtrace.recording.upload import CLAIM_NAME, LocalRank, RankUpload, UploadLoop, upload_trace
from tests.storage.conftest import contents, remote_contents
from tests.storage.faulty_proxy import Fault, FaultyProxy


class Crash(Exception):
    """The process ends here."""


class FailingWriter(StorageWriter):
    """A writer that fails at one of its operations, before or after the storage has done it."""

    def __init__(self, root: StoragePath, fails_at: int, *, after: bool) -> None:
        super().__init__(root)
        self.num_operations = 0
        self._fails_at = fails_at
        self._after = after

    def _count(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.num_operations += 1
        fails = self.num_operations == self._fails_at
        if fails and not self._after:
            raise Crash
        result = operation(*arguments)
        if fails:
            raise Crash
        return result

    def put(self, path: StoragePath, content: Path | bytes) -> None:
        self._count(super().put, path, content)

    def create(self, path: StoragePath, content: bytes) -> bool:
        created: bool = self._count(super().create, path, content)
        return created

    def delete(self, path: StoragePath) -> None:
        self._count(super().delete, path)


def rank_of(folder: Path, *, is_complete: bool = True) -> LocalRank:
    manifest = read_manifest(folder / "manifest.json")
    return LocalRank(folder, manifest.rank, manifest.world_size, is_complete)


def copy_of(trace: Path, target: Path, **changes: Any) -> Path:
    """Copy a trace of one rank; return the folder of the rank, with changes to its manifest."""
    manifest = replace(read_manifest(trace / "rank=0" / "manifest.json"), **changes)
    folder = target / f"rank={manifest.rank}"
    shutil.copytree(trace / "rank=0", folder)
    write_manifest(folder, manifest)
    return folder


def drop_first_parts(folder: Path, through: int) -> None:
    """Delete parts as a ring does."""
    for number in range(through + 1):
        for table in KEYFRAMED_TABLES:
            (folder / f"{table}-{number:05d}.parquet").unlink(missing_ok=True)


def test_what_is_uploaded_equals_the_trace_on_disk(local_trace: Path, memory: StoragePath) -> None:
    url = memory / "run.memtrace"
    assert upload_trace(local_trace, url) == [0]
    assert remote_contents(url) == contents(local_trace)
    assert memtrace.load(url).events.equals(memtrace.load(local_trace).events)


@pytest.mark.parametrize("after", [False, True])
def test_the_storage_opens_wherever_the_upload_was_cut_off(
    local_trace: Path, memory: StoragePath, tmp_path: Path, after: bool
) -> None:
    folder = copy_of(local_trace, tmp_path / "run.memtrace")
    events = memtrace.load(local_trace).events
    num_opened = 0
    for fails_at in range(1, 1000):
        url = memory / f"cut-{fails_at}.memtrace"
        upload = RankUpload(url)
        upload._writer = FailingWriter(url, fails_at, after=after)
        try:
            upload.bring_up_to_date(rank_of(folder))
        except Crash:
            pass
        else:
            assert upload._writer.num_operations == fails_at - 1
            break
        try:
            rows = memtrace.load(url).events
        except TraceError as error:  # the first manifest is not there yet
            assert "manifest.json" in str(error) or "does not exist" in str(error)
            assert "rank=0/manifest.json" not in remote_contents(url)
        else:
            num_opened += 1
            assert rows.equals(events.head(len(rows)))
        # Another process continues, and sends nothing again that is there.
        again = RankUpload(url)
        assert again.bring_up_to_date(rank_of(folder))
        assert remote_contents(url) == contents(local_trace)
        assert not (folder / CLAIM_NAME).exists()
    assert num_opened > 0


def test_a_growing_trace_opens_after_every_operation(local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
    """The recording goes on while it is uploaded: the manifest of each moment names only parts that are there."""
    manifest = read_manifest(local_trace / "rank=0" / "manifest.json")
    events = memtrace.load(local_trace).events
    last = max(high for _, high in (manifest.parts or {})["events"])
    folder = tmp_path / "run.memtrace" / "rank=0"
    folder.mkdir(parents=True)
    url = memory / "run.memtrace"
    upload = RankUpload(url)
    sizes = []
    for number in range(last + 1):
        parts = {
            table: tuple((low, min(high, number)) for low, high in ranges if low <= number)
            for table, ranges in (manifest.parts or {}).items()
        }
        for path in (local_trace / "rank=0").glob(f"*-{number:05d}.parquet"):
            shutil.copy(path, folder)
        write_manifest(folder, replace(manifest, parts=parts, finished=False))
        assert not upload.bring_up_to_date(rank_of(folder, is_complete=False))
        rows = memtrace.load(url).events
        assert rows.equals(events.head(len(rows)))
        sizes.append(len(rows))
    write_manifest(folder, manifest)
    assert upload.bring_up_to_date(rank_of(folder))
    assert sizes == sorted(set(sizes))
    assert remote_contents(url) == contents(local_trace)


def test_parts_that_a_ring_deletes_are_deleted_in_the_storage(
    local_trace: Path, memory: StoragePath, tmp_path: Path
) -> None:
    whole = read_manifest(local_trace / "rank=0" / "manifest.json")
    assert whole.options is not None
    options = replace(whole.options, last_steps=1)
    folder = copy_of(local_trace, tmp_path / "run.memtrace", options=options, finished=False)
    url = memory / "run.memtrace"
    upload = RankUpload(url)
    upload.bring_up_to_date(rank_of(folder, is_complete=False))
    drop_first_parts(folder, 1)
    upload.bring_up_to_date(rank_of(folder, is_complete=False))
    killed_here = memtrace.load(url).events
    parts = {
        table: tuple((max(low, 2), high) for low, high in ranges if high >= 2) if table in KEYFRAMED_TABLES else ranges
        for table, ranges in (whole.parts or {}).items()
    }
    write_manifest(folder, replace(whole, options=options, parts=parts))
    assert upload.bring_up_to_date(rank_of(folder))
    assert remote_contents(url) == contents(folder.parent)
    assert killed_here.equals(memtrace.load(url).events)


def test_a_rewritten_part_is_sent_again(local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
    folder = copy_of(local_trace, tmp_path / "run.memtrace")
    upload = RankUpload(memory / "run.memtrace")
    upload.bring_up_to_date(rank_of(folder, is_complete=False))
    first, second = sorted(folder.glob("spans-*.parquet"))[:2]
    shutil.copy(second, folder / ".spans.rewritten.tmp")
    (folder / ".spans.rewritten.tmp").replace(first)
    assert upload.bring_up_to_date(rank_of(folder))
    assert remote_contents(memory / "run.memtrace") == contents(folder.parent)


class TestNames:
    """Where a trace goes if there is another one."""

    def test_another_trace_is_never_overwritten(self, local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
        url = memory / "run.memtrace"
        upload_trace(local_trace, url)
        before = remote_contents(url)
        other = copy_of(local_trace, tmp_path / "b.memtrace", process=1)
        upload = RankUpload(url)
        assert upload.bring_up_to_date(rank_of(other))
        assert upload.trace == memory / "run-2.memtrace"
        assert remote_contents(url) == before
        assert memtrace.load(upload.trace).manifest.process == 1

    def test_two_recordings_that_start_together_get_two_names(
        self, local_trace: Path, memory: StoragePath, tmp_path: Path
    ) -> None:
        uploads = [RankUpload(memory / "run.memtrace") for _ in range(3)]
        for number, upload in enumerate(uploads):
            folder = copy_of(local_trace, tmp_path / f"{number}.memtrace", process=number, finished=False)
            upload.bring_up_to_date(rank_of(folder, is_complete=False))
        assert [str(upload.trace) for upload in uploads] == [
            "memory://bucket/run.memtrace", "memory://bucket/run-2.memtrace", "memory://bucket/run-3.memtrace"
        ]  # fmt: skip

    def test_something_else_at_the_url_stays(self, local_trace: Path, memory: StoragePath) -> None:
        StorageWriter(memory).put(memory / "run.memtrace" / "notes.txt", b"mine")
        with pytest.raises(MemtraceError, match="another trace is there already"):
            upload_trace(local_trace, memory / "run.memtrace")
        assert remote_contents(memory) == {"run.memtrace/notes.txt": b"mine"}

    def test_the_ranks_of_a_job_share_a_trace(self, local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
        url = memory / "run.memtrace"
        for rank in (2, 0, 1):
            folder = copy_of(local_trace, tmp_path / f"node{rank}.memtrace", rank=rank, world_size=3)
            upload = RankUpload(url)
            assert upload.bring_up_to_date(rank_of(folder))
            assert upload.trace == url
        assert memtrace.load(url).ranks == (0, 1, 2)

    def test_ranks_of_two_jobs_do_not_mix(self, local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
        url = memory / "run.memtrace"
        for rank in range(2):
            folder = copy_of(local_trace, tmp_path / f"old{rank}.memtrace", rank=rank, world_size=2)
            RankUpload(url).bring_up_to_date(rank_of(folder))
        for rank in (3, 0, 1, 2):
            folder = copy_of(local_trace, tmp_path / f"new{rank}.memtrace", rank=rank, world_size=4)
            RankUpload(url).bring_up_to_date(rank_of(folder))
        assert memtrace.load(url).ranks == (0, 1)
        assert memtrace.load(memory / "run-2.memtrace").ranks == (0, 1, 2, 3)

    def test_a_process_that_learns_its_rank_moves_its_trace(
        self, local_trace: Path, memory: StoragePath, tmp_path: Path
    ) -> None:
        url = memory / "run.memtrace"
        uploads = [RankUpload(url) for _ in range(2)]
        folders = [copy_of(local_trace, tmp_path / f"{n}.memtrace", process=n, finished=False) for n in range(2)]
        for upload, folder in zip(uploads, folders, strict=True):
            upload.bring_up_to_date(rank_of(folder, is_complete=False))
        # The process that came first turns out to be rank 1.
        for number, rank in ((0, 1), (1, 0)):
            folder = folders[number].rename(folders[number].with_name(f"rank={rank}"))
            write_manifest(
                folder, replace(read_manifest(folder / "manifest.json"), rank=rank, world_size=2, finished=True)
            )
            assert uploads[number].bring_up_to_date(rank_of(folder))
        trace = memtrace.load(url)
        assert trace.ranks == (0, 1)
        assert [trace.rank(rank).manifest.process for rank in (0, 1)] == [1, 0]
        assert {name.partition("/")[0] for name in remote_contents(memory)} == {"run.memtrace"}


class TestFaults:
    """An S3 server behind a network that fails."""

    @pytest.mark.parametrize(
        "fault",
        [
            Fault("refuse"),
            Fault("cut", 300),
            Fault("cut_answer"),
            Fault("unavailable"),
            Fault("slow", 2_000_000),
        ],
        ids=lambda fault: f"{fault.kind}-{fault.num_bytes}",
    )
    def test_the_upload_ends_whole(
        self, local_trace: Path, s3: StoragePath, proxy: FaultyProxy, tmp_path: Path, fault: Fault
    ) -> None:
        folder = copy_of(local_trace, tmp_path / "run.memtrace")
        proxy.num_connections = 0
        loop = UploadLoop(s3 / "run.memtrace", rank_of(folder), lambda *attempt: None)
        proxy.inject([fault] * 4)
        loop.run()
        assert loop.is_done
        assert remote_contents(s3 / "run.memtrace") == contents(folder.parent)
        assert fault.kind == "slow" or proxy.num_connections > 4

    def test_random_faults(self, local_trace: Path, s3: StoragePath, proxy: FaultyProxy, tmp_path: Path) -> None:
        """MEMTRACE_STORAGE_ROUNDS is the number of rounds, each with other faults."""
        kinds = ("none", "refuse", "cut", "cut", "cut_answer", "unavailable")
        for seed in range(int(os.environ.get("MEMTRACE_STORAGE_ROUNDS", "3"))):
            chosen = random.Random(seed)
            folder = copy_of(local_trace, tmp_path / f"{seed}.memtrace")
            url = s3 / f"{seed}.memtrace"
            upload = RankUpload(url)
            for _ in range(200):
                proxy.inject([Fault(chosen.choice(kinds), chosen.randrange(1, 20_000)) for _ in range(4)])
                try:
                    if upload.bring_up_to_date(rank_of(folder)):
                        break
                except OSError:
                    if chosen.random() < 0.3:
                        upload = RankUpload(url)  # another process continues
                proxy.inject(())
                self._check_opens(url, local_trace)
            proxy.inject(())
            assert upload.trace == url, f"seed {seed}"
            assert upload.bring_up_to_date(rank_of(folder))
            assert remote_contents(url) == contents(folder.parent), f"seed {seed}"

    def _check_opens(self, url: StoragePath, local_trace: Path) -> None:
        if "rank=0/manifest.json" in remote_contents(url):
            assert memtrace.load(url).events.equals(memtrace.load(local_trace).events)

    def test_what_cannot_be_uploaded_is_an_error_with_advice(self, local_trace: Path, s3: StoragePath) -> None:
        with pytest.raises(MemtraceError, match="bucket or folder does not exist"):
            upload_trace(local_trace, StoragePath("s3://no-such-bucket/run.memtrace"))
        with pytest.raises(MemtraceError, match=r"pip install \"memtrace\[gs\]\"|access is denied"):
            upload_trace(local_trace, StoragePath("gs://bucket/run.memtrace"))
        with pytest.raises(MemtraceError, match="chain of URLs"):
            upload_trace(local_trace, StoragePath("zip://run.memtrace::s3://traces/a.zip"))

    def test_a_claim_without_an_answer_is_recognised(
        self, local_trace: Path, s3: StoragePath, proxy: FaultyProxy
    ) -> None:
        writer = StorageWriter(s3)
        proxy.inject([Fault("cut_answer")])
        assert writer.create(s3 / "claim", b"mine")
        assert not writer.create(s3 / "claim", b"yours")
        proxy.default = Fault("refuse")
        proxy.inject(())
        with pytest.raises(StorageError, match="cannot be used"):
            writer.create(s3 / "other", b"mine")


def test_the_claim_is_not_left_behind(local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
    folder = copy_of(local_trace, tmp_path / "run.memtrace")
    upload = RankUpload(memory / "run.memtrace")
    upload.bring_up_to_date(rank_of(folder, is_complete=False))
    assert f"rank=0/{CLAIM_NAME}" in remote_contents(memory / "run.memtrace")
    assert json.loads((folder / CLAIM_NAME).read_text())["url"] == "memory://bucket/run.memtrace"
    upload.bring_up_to_date(rank_of(folder))
    assert f"rank=0/{CLAIM_NAME}" not in remote_contents(memory / "run.memtrace")
