"""Faults of the machine while a recording runs: the disk, descriptors, folders and memory. Training never notices.

MEMTRACE_FAULT_POINTS sets how many points each campaign tries (default 12).
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrace
from memtrace.format.files import is_file, open_protected
from memtrace.recording.background import BackgroundTask
from tests.programs.tasks import make_step, mlp
from tests.recording.helpers import NUM_FAULT_POINTS, PROGRAMS, part_written, wait_until

CALLS = ("write", "open", "replace", "rename", "fsync", "unlink", "mkdir", "stat")


class Disk:
    """Calls of the operating system on files below a folder, of which one, or all from one on, can fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self.failing = range(0)
        self._folder = str(folder)
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            if self._is_below(target):
                self.num_calls += 1
                if self.num_calls in self.failing:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(target, *arguments, **options)

        return call

    def _is_below(self, target: Any) -> bool:
        if isinstance(target, int):
            link = Path(f"/proc/self/fd/{target}")
            target = link.readlink() if link.is_symlink() else ""
        return str(target).startswith(self._folder)


@pytest.mark.parametrize("is_lasting", [True, False], ids=["lasting", "passing"])
@pytest.mark.parametrize("last_steps", [None, 2])
def test_a_fault_of_the_disk_at_any_call_ends_in_one_warning(
    is_lasting: bool,
    last_steps: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(path: Path) -> list[float]:
        torch.manual_seed(0)
        step = make_step(mlp())
        with memtrace.record(path, flush_seconds=0.005, last_steps=last_steps):
            return [float(step()) for _ in range(12)]

    disk = Disk(tmp_path, monkeypatch)
    expected = train(tmp_path / "clean.memtrace")
    num_calls = disk.num_calls
    assert num_calls > 10
    for point in range(NUM_FAULT_POINTS):
        first = 1 + point * num_calls // NUM_FAULT_POINTS
        path = tmp_path / f"{point}.memtrace"
        caplog.clear()
        disk.num_calls, disk.failing = 0, range(first, sys.maxsize if is_lasting else first + 1)
        assert train(path) == expected
        disk.failing = range(0)
        assert len(caplog.records) <= 1
        if (path / "rank=0" / "manifest.json").exists():
            assert len(memtrace.load(path).events) >= 0  # opens


def test_closed_descriptors_end_the_recording_or_do_not_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(mlp())
    descriptors: set[int] = set()  # os.open returns the number that was just closed if it is the lowest free one
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.02) as recording:
        step()
        own = [
            int(entry.name)
            for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink() and str(entry.readlink()).startswith(str(tmp_path))
        ]
        assert own
        for descriptor in own:  # what os.closerange does to all of them
            os.close(descriptor)
            opened = os.open(tmp_path / "mine", os.O_CREAT | os.O_RDWR)
            os.dup2(opened, descriptor)  # the program's file now has the number
            descriptors |= {opened, descriptor}
        with part_written(recording):
            step()
    for descriptor in descriptors:
        os.fstat(descriptor)  # still open
        os.close(descriptor)
    assert (tmp_path / "mine").read_bytes() == b""
    assert memtrace.load(recording.path).manifest.finished
    assert caplog.text == ""


def test_a_descriptor_is_recognised_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    descriptor, identity = open_protected(tmp_path / "a", os.O_RDONLY)
    assert is_file(descriptor, identity)
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, descriptor)
    assert not is_file(descriptor, identity)
    os.close(other)
    os.close(descriptor)
    assert not is_file(descriptor, identity)


@pytest.mark.parametrize("fate", ["moved", "removed"])
def test_a_folder_that_goes_away_ends_the_recording_with_one_warning(
    fate: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.02) as recording:
        with part_written(recording):
            step()
        (tmp_path / "run.memtrace").rename(tmp_path / "moved.memtrace")
        if fate == "removed":
            shutil.rmtree(tmp_path / "moved.memtrace")
        step()
        wait_until(lambda: not recording.is_recording)
        step()
    assert len(caplog.records) == 1
    assert "recording stopped, training continues" in caplog.text
    assert not (tmp_path / "run.memtrace").exists()
    if fate == "moved":
        assert len(memtrace.load(tmp_path / "moved.memtrace").events) > 0


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    recording = memtrace.record("run.memtrace")
    with recording:
        make_step(mlp())()
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert memtrace.load(tmp_path / "run.memtrace").manifest.finished
    assert recording.path == tmp_path / "run.memtrace"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_script_under_memtrace_record_has_an_absolute_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nos.chdir('/')\nprint(__file__)\n")
    command = [sys.executable, "-m", "memtrace.cli", "record", "script.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == [str(tmp_path / "script.py")]
    assert "wrote run.memtrace" in result.stderr
    assert (tmp_path / "run.memtrace" / "rank=0" / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("last_steps", ["0", "3"])
@pytest.mark.parametrize(("moment", "extra_bytes"), [
    ("start", 100 << 20), ("start", 200 << 20), ("start", 300 << 20), ("start", 400 << 20),
    ("running", -300 << 20), ("running", -100 << 20), ("running", 0), ("running", 50 << 20),
])  # fmt: skip
def test_a_limit_of_address_space_ends_the_recording_but_not_the_training(
    moment: str, extra_bytes: int, last_steps: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(PROGRAMS / "limited_memory.py"), moment, str(extra_bytes), last_steps, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "trained"
    assert result.stderr.count("memtrace:") <= 1, result.stderr


def test_a_background_task_runs_once_and_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    task = BackgroundTask(lambda: runs.append(1))
    for _ in range(3):
        task.start()
        task.finish()
    assert runs == [1]

    def no_thread(*arguments: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", no_thread)
    here = BackgroundTask(lambda: runs.append(2))
    assert not here.start()
    here.finish()
    assert runs == [1, 2]


def test_a_background_task_gives_up_what_its_work_refers_to() -> None:
    class Model:
        pass

    for end in ("finish", "settle"):
        model = Model()
        reference = weakref.ref(model)
        task = BackgroundTask(partial(id, model))
        del model
        getattr(task, end)()
        assert reference() is None, end


def test_a_settled_background_task_never_runs() -> None:
    runs: list[int] = []
    task = BackgroundTask(lambda: runs.append(1))
    task.settle()
    task.settle()
    task.start()
    task.finish()
    assert runs == []
