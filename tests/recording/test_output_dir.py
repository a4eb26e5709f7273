"""The folder of a recording: traces that are already there, other processes, and folders that cannot be used."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.format.files import FileIdentity, open_protected
from memtrace.recording import output_dir
from memtrace.recording.output_dir import claim_output_dir, move_older_trace, move_output_dir
from tests.programs.tasks import make_step, mlp
from tests.recording.helpers import endless_recording, record_steps


def test_an_older_trace_is_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = make_step(mlp())
    for _ in range(2):
        record_steps(step, tmp_path / "run.memtrace", num_steps=1)
    assert f"renamed the existing trace {tmp_path / 'run.memtrace'} to" in capsys.readouterr().err
    assert compute_coverage(memtrace.load(tmp_path / "run-old1.memtrace")).num_steps == 1


def test_a_trace_that_another_process_is_recording_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.memtrace"
    step = make_step(mlp())
    with endless_recording(path):
        for _ in range(2):
            with memtrace.record(path) as recording:
                step()
            assert recording.path == tmp_path / "run-2.memtrace"
            assert "another recording is writing" in capsys.readouterr().err
        assert not compute_coverage(memtrace.load(path)).finished
    with memtrace.record(path) as recording:
        step()
    assert recording.path == path
    assert compute_coverage(memtrace.load(path)).finished
    finished = {folder.name: compute_coverage(memtrace.load(folder)).finished for folder in tmp_path.iterdir()}
    assert finished == {
        "run.memtrace": True, "run-old1.memtrace": False, "run-2.memtrace": True, "run-2-old1.memtrace": True,
    }  # fmt: skip


def test_a_forked_child_does_not_keep_the_folder_claimed(tmp_path: Path) -> None:
    path = tmp_path / "run.memtrace"
    read_end, write_end = os.pipe()
    with memtrace.record(path):
        make_step(mlp())()
        child = os.fork()
        if child == 0:
            os.read(read_end, 1)
            os._exit(0)
    try:
        with memtrace.record(path) as recording:
            make_step(mlp())()
        assert recording.path == path
    finally:
        os.write(write_end, b".")
        os.waitpid(child, 0)


def test_a_path_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    with memtrace.record(tmp_path / "file" / "run.memtrace") as recording:
        make_step(mlp())()
        recording.step()
        with recording.stage(0), recording.microbatch(0):
            pass
    assert "nothing is recorded, training continues" in caplog.text
    assert not recording.is_recording
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_not_a_trace_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run.memtrace" / "rank=0"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with memtrace.record(tmp_path / "run.memtrace"):
        make_step(mlp())()
    assert "not a memtrace trace" in caplog.text
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_a_claimed_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_dir, "MOVE_TIMEOUT_SECONDS", 0)
    first, second = (claim_output_dir(tmp_path / "job.memtrace", 0, 1) for _ in range(2))
    (first.folder / "manifest.json").write_text("{}")
    assert (first.trace.name, second.trace.name) == ("job.memtrace", "job-2.memtrace")
    assert not move_output_dir(second, first.trace, 0)
    assert move_output_dir(second, first.trace, 1)
    assert second.folder == first.trace / "rank=1"
    assert [folder.name for folder in tmp_path.iterdir()] == ["job.memtrace"]
    first.release()
    second.release()


def test_a_folder_that_another_process_moves_while_it_is_claimed_is_claimed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two processes believe that they record into the same folder, and one moves the trace of the other."""
    folder, moved = tmp_path / "job.memtrace" / "rank=0", tmp_path / "rank=0"
    opened: list[int] = []

    def open_and_move(path: Path, flags: int) -> tuple[int, FileIdentity]:
        lock = open_protected(path, flags)
        opened.append(lock[0])
        if not moved.exists():
            folder.rename(moved)
        return lock

    monkeypatch.setattr(output_dir, "open_protected", open_and_move)
    claimed = claim_output_dir(tmp_path / "job.memtrace", 0, 1)
    assert len(opened) == 2
    assert claimed.folder == folder
    other = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    claimed.release()


def test_ranks_of_an_earlier_larger_job_are_moved_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "job.memtrace"
    for number in range(4):
        (trace / f"rank={number}").mkdir(parents=True)
        (trace / f"rank={number}" / "manifest.json").write_text("{}")
    move_older_trace(trace / "rank=0", world_size=2)
    move_older_trace(trace / "rank=1")
    assert not trace.exists() or not list(trace.iterdir())
    assert sorted(path.name for path in (tmp_path / "job-old1.memtrace").iterdir()) == [
        "rank=0", "rank=1", "rank=2", "rank=3",
    ]  # fmt: skip
    assert "renamed the existing trace" in capsys.readouterr().err
