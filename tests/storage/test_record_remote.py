"""Recordings into a storage: what the training, the storage and the disk see of them."""

from __future__ import annotations

import _thread
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from memtrace.cli import cli

import memtrace
from memtrace.errors import MemtraceError
from memtrace.format.storage import StoragePath
from memtrace.recording import remote_trace
from tests.storage.conftest import TrainingResult, contents, remote_contents, train, wait_until
from tests.storage.faulty_proxy import Fault, FaultyProxy


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def warnings_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "memtrace"]


def upload_command(warning: str) -> list[str]:
    """Return the arguments of the command that a warning names."""
    return shlex.split(warning.partition("upload it with: memtrace ")[2])


@pytest.mark.parametrize("keep_local", [False, True])
def test_a_trace_is_recorded_into_a_storage(
    memory: StoragePath, unrecorded: TrainingResult, working_directory: Path, caplog: pytest.LogCaptureFixture,
    keep_local: bool,
) -> None:  # fmt: skip
    url = memory / "run.memtrace"
    with memtrace.record(url.url, keep_local=keep_local, flush_seconds=0.01) as recording:
        assert recording.path == url
        assert train() == unrecorded
    assert recording.path == url
    trace = memtrace.load(recording.path)
    assert trace.manifest.finished
    assert trace.num_rows("events") == trace.manifest.num_events
    assert memtrace.load(recording.rank_folder).ranks == (0,)  # type: ignore[arg-type]
    assert warnings_of(caplog) == []
    left = list(working_directory.glob("memtrace-uploads/*.memtrace"))
    assert len(left) == keep_local
    assert [contents(folder) for folder in left] == [remote_contents(url)] * keep_local
    assert (working_directory / "memtrace-uploads").exists() == keep_local


def test_an_existing_trace_stays(memory: StoragePath, caplog: pytest.LogCaptureFixture) -> None:
    url = memory / "run.memtrace"
    for _ in range(2):
        with memtrace.record(url.url) as recording:
            train()
    assert recording.path == memory / "run-2.memtrace"
    assert memtrace.load(url).manifest.t0_epoch_ns != memtrace.load(recording.path).manifest.t0_epoch_ns
    (message,) = warnings_of(caplog)
    assert message == (
        "memtrace: memory://bucket/run.memtrace contains another trace; recording into memory://bucket/run-2.memtrace "
        "instead"
    )


def test_a_ring_keeps_the_last_steps_in_the_storage(memory: StoragePath) -> None:
    url = memory / "ring.memtrace"
    with memtrace.record(url.url, last_steps=3, flush_seconds=0.001, keep_local=True) as recording:
        train(60)
    assert remote_contents(url) == contents(Path(recording.rank_folder).parent)  # type: ignore[arg-type]
    assert memtrace.load(url).manifest.finished


def test_recordings_inside_each_other_have_urls_of_their_own(memory: StoragePath, unrecorded: TrainingResult) -> None:
    with memtrace.record((memory / "outer.memtrace").url):
        with memtrace.record((memory / "inner.memtrace").url):
            inner = train()
        assert memtrace.load(memory / "inner.memtrace").manifest.finished
        train()
    assert inner == unrecorded
    outer, inside = (memtrace.load(memory / f"{name}.memtrace").num_rows("events") for name in ("outer", "inner"))
    assert outer > inside > 0


def test_an_unknown_storage_costs_one_warning(
    unrecorded: TrainingResult, working_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with memtrace.record("nosuch://bucket/run.memtrace", local_dir=working_directory / "scratch") as recording:
        assert train() == unrecorded
    (message,) = warnings_of(caplog)
    assert "the protocol nosuch:// is unknown" in message
    assert recording.path.parent == working_directory / "scratch"
    assert memtrace.load(recording.path).manifest.finished
    assert upload_command(message) == ["upload", str(recording.path), "nosuch://bucket/run.memtrace"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("zip://run.memtrace::s3://bucket/a.zip", "a chain of URLs cannot be written to"),
        ("https://example.org/run.memtrace", "read-only"),
        ("s3://", "names no file or folder"),
    ],
)
def test_a_url_that_cannot_be_written_to_is_an_error_at_once(url: str, message: str) -> None:
    with pytest.raises(MemtraceError, match=message):
        memtrace.record(url)


def test_an_interrupt_ends_the_wait_for_the_upload(
    memory: StoragePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_waiting = threading.Event()

    class Silent:
        has_ended = False

        def __init__(self, *_: object) -> None:
            pass

        def update(self, local: object) -> None:
            is_waiting.set()

        def stop(self) -> None:
            pass

        def abandon(self) -> None:
            pass

    def interrupt() -> None:
        is_waiting.wait()
        wait_until(lambda: recording._remote is not None and recording._remote._is_leaving)
        _thread.interrupt_main()

    monkeypatch.setattr(remote_trace, "start_uploader", Silent)
    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt), memtrace.record("memory://bucket/a", upload_seconds=3600) as recording:
        thread.start()
        train()
    thread.join()
    assert len(warnings_of(caplog)) == 1
    assert memtrace.load(recording.path).manifest.finished
    assert isinstance(recording.path, Path)


def test_a_recording_that_cannot_begin_leaves_nothing(
    memory: StoragePath, working_directory: Path, unrecorded: TrainingResult
) -> None:
    (working_directory / "file").write_text("not a folder")
    with memtrace.record((memory / "run.memtrace").url, local_dir=working_directory / "file"):
        assert train() == unrecorded
    assert remote_contents(memory) == {}


class TestS3:
    """With a process that uploads to an S3 server behind a faulty proxy."""

    def test_faults_change_neither_the_training_nor_the_trace(
        self, s3: StoragePath, proxy: FaultyProxy, unrecorded: TrainingResult, caplog: pytest.LogCaptureFixture
    ) -> None:
        kinds = [Fault("refuse"), Fault("cut", 1500), Fault("unavailable"), Fault("cut_answer"), Fault("slow", 500_000)]
        url = s3 / "run.memtrace"
        with memtrace.record(url.url, flush_seconds=0.01, keep_local=True, upload_seconds=300) as recording:
            proxy.inject(kinds * 3)
            assert train() == unrecorded
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        (message,) = warnings_of(caplog)
        assert "1 child process was started" in message
        assert recording.path == url
        assert remote_contents(url) == contents(Path(recording.rank_folder).parent)  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", ["refuse", "silent"])
    def test_an_outage_leaves_the_trace_on_disk(
        self, s3: StoragePath, proxy: FaultyProxy, unrecorded: TrainingResult, caplog: pytest.LogCaptureFixture,
        kind: str,
    ) -> None:  # fmt: skip
        url = s3 / "run.memtrace"
        proxy.default = Fault(kind)
        with memtrace.record(url.url, upload_seconds=0.5) as recording:
            assert train() == unrecorded
        (message,) = warnings_of(caplog)
        command = upload_command(message)
        assert command == ["upload", str(recording.path), url.url]
        whole = contents(Path(recording.path))  # type: ignore[arg-type]
        assert memtrace.load(recording.path).manifest.finished
        proxy.default = Fault("none")
        proxy.inject(())
        result = CliRunner().invoke(cli, [*command, "--remove"], prog_name="memtrace")
        assert result.exit_code == 0, result.output
        assert remote_contents(url) == whole
        assert not Path(recording.path).exists()  # type: ignore[arg-type]

    def test_wrong_credentials_are_reported_once(
        self, wrong_credentials: StoragePath, unrecorded: TrainingResult, caplog: pytest.LogCaptureFixture
    ) -> None:
        with memtrace.record((wrong_credentials / "run.memtrace").url) as recording:
            assert train() == unrecorded
        (message,) = warnings_of(caplog)
        assert f"{wrong_credentials}/run.memtrace" in message
        assert "access is denied" in message
        assert "Check the credentials of s3://" in message
        assert memtrace.load(recording.path).manifest.finished

    def test_a_bucket_that_does_not_exist_is_reported_once(
        self, s3: StoragePath, unrecorded: TrainingResult, caplog: pytest.LogCaptureFixture
    ) -> None:
        with memtrace.record("s3://no-such-bucket/run.memtrace") as recording:
            assert train() == unrecorded
        (message,) = warnings_of(caplog)
        assert "the bucket or folder does not exist" in message
        assert memtrace.load(recording.path).manifest.finished

    def test_what_a_killed_process_wrote_is_in_the_storage(self, s3: StoragePath, tmp_path: Path) -> None:
        url = s3 / "killed.memtrace"
        program = (
            "import memtrace, os, signal, sys\n"
            "from tests.storage.conftest import train, wait_until\n"
            "with memtrace.record(sys.argv[1], flush_seconds=0.01, upload_seconds=300) as recording:\n"
            "    train()\n"
            "    wait_until(lambda: list(recording.rank_folder.glob('events-*')))\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
        ended = subprocess.run(
            [sys.executable, "-c", program, url.url], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, check=False
        )
        assert ended.returncode == -signal.SIGKILL
        (local,) = (tmp_path / "memtrace-uploads").glob("*.memtrace/rank=0")
        events = {path.name for path in local.glob("events-*")}
        wait_until(lambda: {f"rank=0/{name}" for name in events} <= remote_contents(url).keys())
        wait_until(lambda: "rank=0/manifest.json" in remote_contents(url))
        trace = memtrace.load(url)
        assert not trace.manifest.finished
        assert trace.events.equals(memtrace.load(local).events)


def test_the_log_is_clean(memory: StoragePath, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with memtrace.record((memory / "run.memtrace").url):
        train()
    assert warnings_of(caplog) == []
