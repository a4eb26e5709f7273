"""Traces and files in storages, as every command reads them."""

from __future__ import annotations

import json
import pickle
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from memtrace.cli import cli, main

import memtrace
from memtrace.analysis import summarize
from memtrace.engine import TraceSource
from memtrace.errors import MemtraceError, TraceError
from memtrace.format.part_files import TAIL_BYTES, WHOLE_BYTES, part_name
from memtrace.format.part_writer import open_part
from memtrace.format.schema import arrow_schema
from memtrace.format.storage import StoragePath, to_path
from memtrace.format.storage_writer import StorageWriter
from memtrace.recording.upload import upload_trace
from tests.storage.conftest import remote_contents
from tests.storage.faulty_proxy import Fault, FaultyProxy


@pytest.fixture
def url(local_trace: Path, memory: StoragePath) -> StoragePath:
    """URL of the trace of ``local_trace``."""
    target = memory / "run.memtrace"
    upload_trace(local_trace, target)
    return target


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, int | None]]:
    """The ranges that are read from the storage in memory, with the names of their files."""
    from fsspec.implementations.memory import MemoryFileSystem

    ranges: list[tuple[str, int | None, int | None]] = []
    original = MemoryFileSystem.cat_file

    def cat_file(filesystem: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        ranges.append((path.rpartition("/")[2], start, end))
        content: bytes = original(filesystem, path, start=start, end=end, **options)
        return content

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    return ranges


def fail(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that fails; return its one line on stderr."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, prog_name="memtrace", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", ["summary", "steps", "access", "leaks", "findings"])
def test_a_command_prints_the_same_for_a_url(local_trace: Path, url: StoragePath, command: str) -> None:
    assert output_of(command, "--json", str(url)) == output_of(command, "--json", str(local_trace))


def test_the_folder_of_a_rank_opens(url: StoragePath) -> None:
    assert memtrace.load(str(url / "rank=0")).ranks == memtrace.load(str(url) + "/").ranks == (0,)


def test_two_traces_are_compared(local_trace: Path, url: StoragePath) -> None:
    assert json.loads(output_of("diff", "--json", str(local_trace), str(url)))
    assert "run" in output_of("compare", str(local_trace), str(url), "--csv")


def test_a_window_reads_only_its_parts(
    local_trace: Path, url: StoragePath, requests: list[tuple[str, int | None, int | None]]
) -> None:
    times = memtrace.load(local_trace).events["time_ns"]
    end_ns = int(times.iloc[len(times) // 8])
    window = memtrace.load(url).window(end_ns=end_ns)
    assert len(window.events) > 0
    read = {name for name, _, _ in requests}
    assert part_name("events", 0) in read
    assert not {part_name("events", 2), part_name("events", 3)} & read


def test_columns_are_read_in_ranges(
    local_trace: Path, url: StoragePath, tmp_path: Path, requests: list[tuple[str, int | None, int | None]]
) -> None:
    local = memtrace.load(local_trace)
    rows = pa.concat_tables(local._sources[0].read("events", tuple(arrow_schema("events").names)))
    large = tmp_path / part_name("events", 0)
    with open_part(large, "events") as writer:
        writer.write_table(pa.concat_tables([rows] * 400).unify_dictionaries())
    assert large.stat().st_size > WHOLE_BYTES
    StorageWriter(url).put(url / "rank=0" / large.name, large)
    requests.clear()
    part = memtrace.load(url).part(0)
    kinds = part.columns("events", "kind")["kind"]
    num_live = len(kinds) - 400 * rows.num_rows
    assert (kinds[num_live:] == np.tile(local.columns("events", "kind")["kind"], 400)).all()
    num_bytes = sum((end or 0) - (start or 0) for name, start, end in requests if name == large.name)
    assert TAIL_BYTES < num_bytes < large.stat().st_size // 2
    assert len([name for name, _, _ in requests if name == large.name]) < 20


def test_a_hostile_listing_does_not_lead_out_of_the_folder(url: StoragePath, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    names = [
        "/bucket/run.memtrace/rank=0/../../secret/events-00009.parquet", "/secret/events-00009.parquet",
        "/bucket/run.memtrace/rank=0/..", "/bucket/run.memtrace/rank=0/a\\events-00009.parquet", "", "/", "..",
    ]  # fmt: skip
    original = MemoryFileSystem.ls

    def ls(filesystem: Any, path: str, detail: bool = True, **options: Any) -> list[Any]:
        listing = original(filesystem, path, detail=detail, **options)
        return [*listing, *({"name": name, "size": 8, "type": "file"} for name in names)]

    before = memtrace.load(url).events
    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    files, folders = (url / "rank=0").list_folder()
    assert "events-00009.parquet" not in files
    assert folders == []
    assert memtrace.load(url).events.equals(before)


def test_a_damaged_part_is_named_by_its_url(url: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
    file = url / "rank=0" / part_name("events", 1)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    StorageWriter(url).put(file, bytes(content))
    assert f"{file} is damaged" in fail("summary", str(url), capsys=capsys)
    StorageWriter(url).delete(file)
    assert f"{file} is missing" in fail("summary", str(url), capsys=capsys)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/absent.memtrace", "does not exist"),
        ("nosuch://bucket/run.memtrace", "the protocol nosuch:// is unknown"),
        ("nosuch://user:secret@bucket/run.memtrace", "nosuch://user:***@bucket"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(
    memory: StoragePath, capsys: pytest.CaptureFixture[str], url: str, message: str
) -> None:
    shown = fail("summary", url, capsys=capsys)
    assert message in shown
    assert "secret" not in shown


def test_a_path_that_lost_a_slash_is_explained() -> None:
    with pytest.raises(MemtraceError, match="pathlib has removed a slash"):
        memtrace.load(Path("s3://bucket/run.memtrace"))


def test_file_urls_are_paths(local_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{local_trace}"
    assert to_path(url) == local_trace
    assert memtrace.load(url).path == local_trace
    monkeypatch.chdir(tmp_path)
    assert TraceSource.of((url, "a.memtrace", "s3://bucket/b.memtrace")).paths == (
        str(local_trace), str(tmp_path / "a.memtrace"), "s3://bucket/b.memtrace",
    )  # fmt: skip


def test_commands_take_file_urls(local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
    url, folder = f"file://{local_trace}", f"file://{tmp_path}"
    assert output_of("ranks", "--json", url) == output_of("ranks", "--json", str(local_trace))
    output_of("export", url, "-f", "snapshot", "-o", f"{folder}/run.pickle")
    output_of("import", f"{folder}/run.pickle", "-o", f"{folder}/imported.memtrace")
    output_of("report", f"{folder}/imported.memtrace", "-o", f"{folder}/report.html")
    output_of("upload", url, "memory://bucket/run.memtrace")
    assert {path.name for path in tmp_path.iterdir()} == {"run.pickle", "imported.memtrace", "report.html"}
    assert memtrace.load("memory://bucket/run.memtrace").manifest == memtrace.load(local_trace).manifest


def test_the_upload_of_a_url_is_refused(memory: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
    message = fail("upload", "memory://bucket/run.memtrace", "s3://bucket/run.memtrace", capsys=capsys)
    assert "memory://bucket/run.memtrace is in a storage already" in message


def test_a_path_in_a_storage_can_be_sent_to_another_process(url: StoragePath) -> None:
    assert pickle.loads(pickle.dumps(url)) == url
    trace = memtrace.load(url)
    again = pickle.loads(pickle.dumps(trace._sources))
    assert again[0].num_rows("events") == trace.num_rows("events")


def test_a_chain_of_urls_opens_an_archive(local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
    archive = tmp_path / "runs.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in local_trace.rglob("*.*"):
            if path.is_file():
                file.write(path, path.relative_to(local_trace.parent))
    StorageWriter(memory).put(memory / "runs.zip", archive)
    trace = memtrace.load(f"zip://{local_trace.name}::memory://bucket/runs.zip")
    assert summarize(trace) == summarize(memtrace.load(local_trace))
    assert memtrace.load(
        f"simplecache::{memory.url}/runs.zip".replace("simplecache", f"zip://{local_trace.name}")
    ).ranks


def test_a_snapshot_is_read_from_a_storage(memory: StoragePath, tmp_path: Path) -> None:
    snapshot = {
        "segments": [], "allocator_settings": {},
        "device_traces": [[{"action": "alloc", "addr": 64, "size": 512, "stream": 0, "time_us": 1, "frames": []}]],
    }  # fmt: skip
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(snapshot))
    StorageWriter(memory).put(memory / "snapshot.pickle", tmp_path / "snapshot.pickle")
    StorageWriter(memory).put(memory / "noise.pickle", b"nothing that anybody knows")
    local, remote = memtrace.load(tmp_path / "snapshot.pickle"), memtrace.load("memory://bucket/snapshot.pickle")
    assert remote.events.equals(local.events)
    assert remote.manifest.source == local.manifest.source
    with pytest.raises(TraceError, match=r"memory://bucket/noise\.pickle: unrecognised"):
        memtrace.load("memory://bucket/noise.pickle")


class TestHttp:
    """A server of HTTP, which lists no folders, and knows no ranges."""

    @pytest.fixture
    def server(self, local_trace: Path) -> Iterator[str]:
        pytest.importorskip("aiohttp")

        class Quiet(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

        handler = partial(Quiet, directory=str(local_trace.parent))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    def test_a_trace_opens(self, local_trace: Path, server: str) -> None:
        trace = memtrace.load(f"{server}/{local_trace.name}")
        assert summarize(trace) == summarize(memtrace.load(local_trace))
        with pytest.raises(TraceError, match="does not exist"):
            memtrace.load(f"{server}/absent.memtrace")


class TestS3:
    """An S3 server behind a proxy."""

    def test_a_trace_opens_over_a_network_that_fails(
        self, local_trace: Path, s3: StoragePath, proxy: FaultyProxy
    ) -> None:
        upload_trace(local_trace, s3 / "run.memtrace")
        proxy.inject([Fault("cut_answer"), Fault("refuse")])
        assert summarize(memtrace.load(s3 / "run.memtrace")) == summarize(memtrace.load(local_trace))

    def test_an_outage_is_one_clear_error(
        self, s3: StoragePath, proxy: FaultyProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        proxy.default = Fault("refuse")
        proxy.inject(())
        message = fail("summary", "s3://traces/run.memtrace", capsys=capsys)
        assert "s3://traces/run.memtrace: the storage cannot be used" in message

    @pytest.mark.parametrize("command", ["summary", "ranks"])
    def test_wrong_credentials_are_one_clear_error(
        self, local_trace: Path, wrong_credentials: StoragePath, capsys: pytest.CaptureFixture[str], command: str
    ) -> None:
        url = str(wrong_credentials / "run.memtrace")
        message = fail(command, url, capsys=capsys)
        assert message.startswith(f"memtrace: {url}: access is denied")
        assert "Check the credentials of s3://" in message
        message = fail("upload", str(local_trace), url, capsys=capsys)
        assert "access is denied" in message
        assert len(message.strip().splitlines()) == 1

    def test_a_bucket_that_does_not_exist(self, s3: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
        assert "does not exist" in fail("summary", "s3://no-such-bucket/run.memtrace", capsys=capsys)


class TestOutputs:
    """Commands that write write to a URL."""

    def test_a_report(self, local_trace: Path, memory: StoragePath, tmp_path: Path) -> None:
        output_of("report", str(local_trace), "-o", "memory://bucket/out/report.html")
        page = remote_contents(memory)["out/report.html"].decode()
        assert page.lower().startswith("<!doctype html>")
        assert page.rstrip().endswith("</html>")
        assert local_trace.name in page
        assert list(tmp_path.iterdir()) == []

    def test_an_export(self, local_trace: Path, memory: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
        export = ("export", str(local_trace), "-f", "speedscope", "-o", "memory://bucket/run.json.gz")
        assert "Wrote memory://bucket/run.json.gz" in output_of(*export)
        assert "exists already" in fail(*export, capsys=capsys)
        output_of(*export, "--overwrite")
        output_of("export", str(local_trace), "-f", "csv", "-o", "memory://bucket/tables")
        assert {"run.json.gz", "tables/blocks.csv", "tables/events.csv"} <= remote_contents(memory).keys()

    def test_an_import_appears_with_its_manifest_last(
        self, local_trace: Path, memory: StoragePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        snapshot = tmp_path / "snapshot.pickle"
        output_of("export", str(local_trace), "-f", "snapshot", "-o", str(snapshot))
        output_of("import", str(snapshot), "-o", "memory://bucket/imported.memtrace")
        assert memtrace.load("memory://bucket/imported.memtrace").num_rows("events")
        assert "exists already" in fail(
            "import", str(snapshot), "-o", "memory://bucket/imported.memtrace", capsys=capsys
        )

    def test_a_url_that_cannot_be_written_to(self, local_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        message = fail("report", str(local_trace), "-o", "https://example.org/report.html", capsys=capsys)
        assert "https:// is read-only" in message

    def test_live_needs_the_folder_on_disk(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "where it is written to disk" in fail("live", "s3://bucket/run.memtrace", capsys=capsys)
