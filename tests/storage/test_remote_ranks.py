"""Jobs of many ranks in storages: what is listed, what is kept beside the ranks, and a cluster that loses a worker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memtrace.cli import cli

import memtrace
from memtrace.analysis import rank_reports
from memtrace.analysis.rank_overview import survey_ranks
from memtrace.analysis.rank_reports import REPORT_NAME
from memtrace.analysis.rank_summary import RankReport, report_rank
from memtrace.analysis.ranks import compare_ranks
from memtrace.engine import EngineOptions, TraceSource, choose_engine
from memtrace.format.storage import StoragePath, list_folders
from memtrace.format.storage_writer import StorageWriter
from memtrace.recording.upload import upload_trace
from memtrace.trace import Trace
from tests.builders import copied_job
from tests.dask_cluster import local_cluster
from tests.storage.conftest import remote_contents


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, local_trace: Path, tmp_path: Path) -> StoragePath:
    """URL of a job of three ranks, in the memory of this process and in S3."""
    storage: StoragePath = request.getfixturevalue(request.param)
    upload_trace(copied_job(local_trace, tmp_path / "job.memtrace", 3), storage / "job.memtrace")
    return storage / "job.memtrace"


def manifest_with(folder: StoragePath, **changes: Any) -> bytes:
    """Return the manifest of a rank with some changes."""
    return json.dumps({**json.loads((folder / "manifest.json").read_bytes()), **changes}).encode()


def test_a_second_question_reads_no_events(url: StoragePath, ranks_read: list[int]) -> None:
    first = survey_ranks(memtrace.load(url))
    assert ranks_read == [0, 1, 2]
    assert {f"rank={rank}/{REPORT_NAME}" for rank in range(3)} <= remote_contents(url).keys()
    second = survey_ranks(memtrace.load(url))
    assert ranks_read == [0, 1, 2]
    assert second.comparison == first.comparison
    assert [load.step_peak_bytes.tolist() for load in second.loads] == [
        load.step_peak_bytes.tolist() for load in first.loads
    ]
    assert memtrace.load(url).rank(1).events.equals(memtrace.load(url).rank(0).events)


def test_ranks_that_are_new_or_changed_are_read_again(url: StoragePath, ranks_read: list[int]) -> None:
    compare_ranks(memtrace.load(url))
    writer = StorageWriter(url)
    for name, content in remote_contents(url / "rank=0").items():
        if name not in (REPORT_NAME, "manifest.json"):
            writer.put(url / "rank=3" / name, content)
    writer.put(url / "rank=3" / "manifest.json", manifest_with(url / "rank=0", rank=3, world_size=4))
    # Other content of the same size.
    manifest = url / "rank=1" / "manifest.json"
    begin = json.loads(manifest.read_bytes())["t0_epoch_ns"]
    writer.put(manifest, manifest.read_bytes().replace(str(begin).encode(), str(begin ^ 1).encode()))
    writer.put(url / "rank=2" / "manifest.json", manifest_with(url / "rank=2", finished=False))
    ranks_read.clear()
    assert [summary.rank for summary in compare_ranks(memtrace.load(url)).ranks] == [0, 1, 2, 3]
    assert ranks_read == [1, 2, 3]
    ranks_read.clear()
    compare_ranks(memtrace.load(url))
    assert ranks_read == [2]  # what is still recorded is not kept


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_file_that_changes_while_it_is_read_makes_the_report_stale(
    url: StoragePath, ranks_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_and_report(trace: Trace) -> RankReport:
        if trace.ranks == (1,):
            content = json.loads((url / "rank=1" / "manifest.json").read_bytes())
            StorageWriter(url).put(url / "rank=1" / "manifest.json", json.dumps(content, indent=2).encode())
        return report_rank(trace)

    with monkeypatch.context() as patch:
        patch.setattr(rank_reports, "report_rank", change_and_report)
        compare_ranks(memtrace.load(url))
    compare_ranks(memtrace.load(url))
    assert ranks_read == [1]


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_report_in_the_storage_is_not_trusted(url: StoragePath, ranks_read: list[int]) -> None:
    expected = compare_ranks(memtrace.load(url))
    stored = json.loads((url / "rank=0" / REPORT_NAME).read_bytes())
    stored["summary"]["peak_bytes"] = "many"
    StorageWriter(url).put(url / "rank=0" / REPORT_NAME, json.dumps(stored).encode())
    StorageWriter(url).put(url / "rank=2" / REPORT_NAME, b"[" * 100_000)
    ranks_read.clear()
    assert compare_ranks(memtrace.load(url)) == expected
    assert ranks_read == [0, 2]


def test_nothing_is_kept_where_the_storage_does_not_tell_versions(
    local_trace: Path, memory: StoragePath, ranks_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    original = MemoryFileSystem.ls

    def ls(filesystem: Any, path: str, detail: bool = True, **options: Any) -> list[Any]:
        return [{key: info[key] for key in ("name", "size", "type")} for info in original(filesystem, path, **options)]

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    url = memory / "run.memtrace"
    upload_trace(local_trace, url)
    assert compare_ranks(memtrace.load(url)) == compare_ranks(memtrace.load(url))
    assert ranks_read == [0, 0]
    assert f"rank=0/{REPORT_NAME}" not in remote_contents(url)


def test_a_storage_that_cannot_be_written_to_is_read_every_time(
    local_trace: Path, memory: StoragePath, ranks_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("AccessDenied")

    url = memory / "run.memtrace"
    upload_trace(local_trace, url)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    assert compare_ranks(memtrace.load(url)) == compare_ranks(memtrace.load(url))
    assert ranks_read == [0, 0]


def test_a_storage_in_the_memory_of_this_process_is_read_by_this_process(memory: StoragePath) -> None:
    source = TraceSource.of((str(memory / "job.memtrace"),))
    trace = Trace(None, {})
    assert choose_engine(EngineOptions(workers=4), trace, source).runner.is_local


class TestS3:
    """With an S3 server."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The requests to the server."""
        import s3fs

        methods: list[str] = []
        original = s3fs.S3FileSystem._call_s3

        async def call(filesystem: Any, method: str, *arguments: Any, **options: Any) -> Any:
            methods.append(method)
            return await original(filesystem, method, *arguments, **options)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
        return methods

    @staticmethod
    def put_job(s3: StoragePath, local_trace: Path, num_ranks: int) -> StoragePath:
        """Write the manifests of some ranks without events."""
        writer, url = StorageWriter(s3), s3 / "job.memtrace"
        manifest = json.loads((local_trace / "rank=0" / "manifest.json").read_bytes())
        for rank in range(num_ranks):
            changed = json.dumps({**manifest, "rank": rank, "world_size": num_ranks, "parts": {}}).encode()
            writer.put(url / f"rank={rank}" / "manifest.json", changed)
        return url

    def test_folders_are_listed_together(self, s3: StoragePath, local_trace: Path, calls: list[str]) -> None:
        url = self.put_job(s3, local_trace, 20)
        StorageWriter(s3).put(url / "rank=3" / "deeper" / "manifest.json", b"{}")
        StorageWriter(s3).put(s3 / "job.memtrace-other" / "rank=1" / "manifest.json", b"{}")
        names = [f"rank={rank}" for rank in range(20)]
        together = list_folders(url, "rank=", names)
        assert together == [(url / name).list_folder()[0] for name in names]
        assert [list(files) for files in together] == [["manifest.json"]] * 20
        calls.clear()
        assert memtrace.load(url).ranks == tuple(range(20))
        assert calls.count("get_object") == 20
        assert len(calls) <= 25

    @pytest.mark.slow
    def test_a_cluster_that_loses_a_worker_gives_the_same_answer(
        self, s3: StoragePath, local_trace: Path, tmp_path: Path, ranks_read: list[int]
    ) -> None:
        pytest.importorskip("distributed")
        from distributed.diagnostics.plugin import SchedulerPlugin

        num_ranks = 16
        filesystem, bucket = s3.open_filesystem()
        job = copied_job(local_trace, tmp_path / "job.memtrace", num_ranks)
        expected = compare_ranks(memtrace.load(job))
        for report in job.glob(f"*/{REPORT_NAME}"):
            report.unlink()
        filesystem.put(str(job), f"{bucket}/job.memtrace", recursive=True)

        class Killer(SchedulerPlugin):  # type: ignore[misc]
            num_done = 0

            def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
                self.num_done += finish == "memory"
                if self.num_done == num_ranks // 2 and workers:
                    os.kill(workers.pop(), signal.SIGKILL)

        with local_cluster() as cluster:
            workers = [cluster.workers[0].pid]
            cluster.scheduler.add_plugin(Killer())
            command = ["ranks", "s3://traces/job.memtrace", "--scheduler", cluster.scheduler_address, "--json"]
            result = CliRunner().invoke(cli, command, catch_exceptions=False)
        assert not workers
        assert result.exit_code == 0
        ranks_read.clear()
        assert compare_ranks(memtrace.load("s3://traces/job.memtrace")) == expected
        assert ranks_read == []
        local = CliRunner().invoke(cli, ["ranks", str(job), "--json", "--workers", "1"], catch_exceptions=False)
        assert result.stdout == local.stdout
