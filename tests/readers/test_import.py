"""Keeping foreign files as a trace: ranks, atomic writes, nothing of the user's lost; and readers of other packages."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import memtrace
from memtrace import readers
from memtrace.analysis.summary import summarize
from memtrace.errors import TraceError
from memtrace.readers import isolated, registry
from memtrace.readers.content import Content
from memtrace.readers.import_job import keep
from memtrace.readers.limits import Limits
from memtrace.readers.tables import empty_tables, new_manifest
from tests.readers.making import random_life


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from memtrace.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two snapshots of two ranks."""
    found = []
    for number in range(2):
        path = tmp_path / f"dump_{'ab'[number]}.pickle"
        path.write_bytes(pickle.dumps(random_life(number, 80).snapshot()))
        found.append(path)
    return found


def test_import_keeps_what_the_file_says(tmp_path: Path, files: list[Path]) -> None:
    kept = tmp_path / "run.memtrace"
    done = run("import", files[0], "-o", kept)
    assert done.returncode == 0, done.stderr
    one, other = (memtrace.load(path) for path in (files[0], kept))
    first, second = summarize(one), summarize(other)
    assert replace(first, source=replace(first.source, command=None)) == replace(
        second, source=replace(second.source, command=None)
    )
    for table in ("events", "ops", "spans", "names", "segments"):
        columns = list(one.events.columns) if table == "events" else []
        assert one.num_rows(table) == other.num_rows(table)
        for column in columns:
            assert one.columns(table, column)[column].tolist() == other.columns(table, column)[column].tolist()
    parts = json.loads((kept / "rank=0" / "manifest.json").read_text())["parts"]
    assert set(parts) <= set(empty_tables()) and parts["events"] == 1


def test_several_files_are_several_ranks(tmp_path: Path, files: list[Path]) -> None:
    kept = tmp_path / "job.memtrace"
    assert run("import", *files, "-o", kept).returncode == 0
    for traces in ([kept], files):
        done = run("summary", *traces)
        assert done.returncode == 0, done.stderr
        assert "rank  device" in done.stdout
        found = json.loads(run("summary", "--json", *traces).stdout)["ranks"]
        assert [one["rank"] for one in found] == [0, 1]
        assert all(one["source"]["file"] == file.name for one, file in zip(found, files, strict=True))


def test_an_existing_name_is_left_alone(tmp_path: Path, files: list[Path]) -> None:
    for name in ("a file", "a folder", "a link"):
        there = tmp_path / name
        if name == "a file":
            there.write_text("mine")
        elif name == "a folder":
            there.mkdir()
            (there / "mine").write_text("mine")
        else:
            there.symlink_to(tmp_path / "nowhere")
        for flags in ([], ["--overwrite"]):
            done = run("import", files[0], "-o", there, *flags)
            assert done.returncode == 2 and "exists already" in done.stderr
        assert os.path.lexists(there)
    assert (tmp_path / "a file").read_text() == (tmp_path / "a folder" / "mine").read_text() == "mine"


def test_overwrite_replaces_a_trace(tmp_path: Path, files: list[Path]) -> None:
    kept = tmp_path / "run.memtrace"
    assert run("import", *files, "-o", kept).returncode == 0
    assert run("import", files[0], "-o", kept).returncode == 2
    assert memtrace.load(kept).ranks == (0, 1)
    assert run("import", files[0], "-o", kept, "--overwrite").returncode == 0
    assert memtrace.load(kept).ranks == (0,)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_write_leaves_the_old_trace_and_nothing_else(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "run.memtrace"
    ranks = readers.read_job(files)
    keep(ranks, kept)
    before = sorted(path.relative_to(kept) for path in kept.rglob("*"))
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(TraceError, match="No space left"):
        keep(ranks, kept, overwrite=True)
    monkeypatch.undo()
    assert sorted(path.relative_to(kept) for path in kept.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run.memtrace", *(file.name for file in files)])


def test_a_bad_file_among_good_ones_writes_nothing(tmp_path: Path, files: list[Path]) -> None:
    files[1].write_bytes(b"nonsense")
    done = run("import", *files, "-o", tmp_path / "job.memtrace")
    assert done.returncode == 2 and files[1].name in done.stderr
    assert not (tmp_path / "job.memtrace").exists()


def test_ranks_by_name_where_the_files_do_not_say(tmp_path: Path, files: list[Path]) -> None:
    renamed = [
        file.rename(tmp_path / f"rank{number}_memory.pickle") for file, number in zip(files, (10, 2), strict=True)
    ]
    ranks = [manifest["rank"] for manifest, _ in readers.read_job(renamed)]
    assert ranks == [2, 10]
    found = readers.read_job(renamed)
    assert found[0][0]["world_size"] == 11
    assert found[0][0]["coverage"]["notes"][-1] == "rank 2 is rank2_memory.pickle, by its name"


def _chrome(path: Path, rank: int) -> Path:
    event = {
        "name": "[memory]",
        "ph": "i",
        "pid": 1,
        "tid": 1,
        "ts": 5,
        "args": {"Bytes": 8 + rank, "Device Type": 1, "Device Id": rank},
    }
    path.write_text(json.dumps({"distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": [event]}))
    return path


def test_ranks_as_the_files_say(tmp_path: Path) -> None:
    paths = [_chrome(tmp_path / f"rank{9 - rank}.json", rank) for rank in (3, 1)]
    found = readers.read_job(paths)
    assert [manifest["rank"] for manifest, _ in found] == [1, 3]
    with pytest.raises(TraceError, match="are both of rank 1"):
        readers.read_job([paths[1], paths[1]])


def test_a_rank_that_is_told_stays_beside_files_that_tell_none(tmp_path: Path, files: list[Path]) -> None:
    found = readers.read_job([files[0], _chrome(tmp_path / "told.json", 1), files[1]])
    assert [(manifest["rank"], manifest["source"]["file"]) for manifest, _ in found] == [
        (0, files[0].name), (1, "told.json"), (2, files[1].name),
    ]  # fmt: skip
    notes = [manifest["coverage"]["notes"][-1] for manifest, _ in found]
    assert ["as it says" in note for note in notes] == [False, True, False]
    named = files[1].rename(tmp_path / "rank7.pickle")
    assert [manifest["rank"] for manifest, _ in readers.read_job([named, tmp_path / "told.json"])] == [1, 7]


def test_folders_and_files_together_are_the_ranks_of_a_job(tmp_path: Path, files: list[Path]) -> None:
    kept = [tmp_path / "a.memtrace", tmp_path / "b.memtrace"]
    for file, folder in zip(files, kept, strict=True):
        keep(readers.read_job([file]), folder)
    for paths in ([kept[0], kept[1]], [kept[0], files[1]], [files[0], kept[1]]):
        job = memtrace.load(*paths)
        assert job.ranks == (0, 1)
        for number, file in enumerate(files):
            assert job.rank(number).events.equals(memtrace.load(file).events)
            assert job.rank(number).manifest["world_size"] == 2
        assert "by the order" in job.rank(1).coverage.notes[-1]
    for number, file in enumerate(files):
        keep(readers.read_job([file]), tmp_path / f"rank{5 - number}.memtrace")
    named = memtrace.load(tmp_path / "rank5.memtrace", tmp_path / "rank4.memtrace")
    assert named.ranks == (4, 5)
    assert named.rank(5).events.equals(memtrace.load(files[0]).events)


def test_two_jobs_are_not_one(tmp_path: Path, files: list[Path]) -> None:
    keep(readers.read_job(files), tmp_path / "job.memtrace")
    with pytest.raises(TraceError, match=r"job.memtrace and job.memtrace are both of rank 0"):
        memtrace.load(tmp_path / "job.memtrace", tmp_path / "job.memtrace")


class Foreign:
    """A reader of another package."""

    def recognises(self, content: Content) -> bool:
        return content.head.startswith(b"FOREIGN")

    def read(self, content: Content) -> list[registry.Rank]:
        return [(new_manifest("foreign", content.path.name, None), empty_tables())]


def test_other_packages_add_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"FOREIGN DATA")
    with pytest.raises(TraceError, match="no kind that memtrace knows"):
        readers.read(tmp_path / "x")
    point = EntryPoint("foreign", f"{__name__}:Foreign", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    monkeypatch.setattr(isolated, "_may_fork", lambda: True)
    ((manifest, _),) = readers.read(tmp_path / "x")
    assert manifest["source"] == {"kind": "foreign", "observer": None, "file": "x"}


def test_reading_beside_other_threads_spawns(tmp_path: Path, files: list[Path]) -> None:
    want = readers.read(files[0])
    ready, stop = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), stop.wait(60)))
    other.start()
    try:
        ready.wait(10)
        assert not isolated._may_fork()
        found = readers.read(files[0])
        (tmp_path / "x").write_bytes(b"nonsense")
        with pytest.raises(TraceError, match="no kind that memtrace knows"):
            readers.read(tmp_path / "x")
        with pytest.raises(TraceError, match="of memory to read"):
            readers.read(files[0], limits=Limits(memory_bytes=1 << 20, cpu_seconds=30))
    finally:
        stop.set()
        other.join()
    assert found[0][0] == want[0][0] and found[0][1]["events"].equals(want[0][1]["events"])


def test_reading_a_file_imports_neither_torch_nor_pandas(files: list[Path], tmp_path: Path) -> None:
    program = (
        "import sys, json\n"
        "from memtrace.trace import load\nfrom memtrace.analysis.summary import summarize\n"
        "summarize(load(sys.argv[1]))\n"
        "print(json.dumps([name for name in ('torch', 'pandas') if name in sys.modules]))"
    )
    keep(readers.read_job(files[:1]), tmp_path / "kept.memtrace")
    for path in (files[0], tmp_path / "kept.memtrace"):
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == []


def test_nothing_is_left_behind(tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    readers.read(files[0])
    with pytest.raises(TraceError):
        readers.read(tmp_path)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("status", [-11, -9, -6, 1])
def test_a_reader_that_dies_is_one_sentence(files: list[Path], monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    def die(*_: Any) -> int:
        faulthandler.disable()
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status)

    monkeypatch.setattr(isolated, "_work", die)
    monkeypatch.setattr(isolated, "_may_fork", lambda: True)
    with pytest.raises(TraceError) as caught:
        readers.read(files[0])
    assert "\n" not in str(caught.value) and str(files[0]) in str(caught.value)
