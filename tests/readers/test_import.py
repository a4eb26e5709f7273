"""Importing files of other tools: ranks, atomic writes that lose no data, and readers of other packages."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import io
import json
import os
import pickle
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow
import pytest
from memtrace.cli import main

import memtrace
from memtrace import readers
from memtrace.analysis import compare_ranks, compute_coverage
from memtrace.analysis.summary import summarize
from memtrace.errors import TraceError
from memtrace.format.encode import empty_tables
from memtrace.format.manifest import Manifest, TraceSource
from memtrace.readers import isolated, registry
from memtrace.readers.content import Content
from memtrace.readers.import_job import write_trace
from memtrace.readers.limits import ReadLimits
from memtrace.readers.rank import ReadRank
from memtrace.readers.tables import new_manifest
from tests.readers.snapshot_maker import random_history


class CommandResult(NamedTuple):
    """What a run of the command line returned and printed."""

    exit_code: object
    stdout: str
    stderr: str


def run_memtrace(*arguments: str | Path) -> CommandResult:
    """Run the command line in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    exit_code: object = 0
    with (
        mock.patch("sys.argv", ["memtrace", *map(str, arguments)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as error:
            exit_code = error.code
    return CommandResult(exit_code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two snapshots, of two ranks."""
    paths = []
    for number in range(2):
        path = tmp_path / f"dump_{'ab'[number]}.pickle"
        path.write_bytes(pickle.dumps(random_history(number, 80).snapshot()))
        paths.append(path)
    return paths


def test_an_imported_file_gives_the_same_trace(tmp_path: Path, files: list[Path]) -> None:
    imported = tmp_path / "run.memtrace"
    result = run_memtrace("import", files[0], "-o", imported)
    assert result.exit_code == 0, result.stderr
    direct_trace, imported_trace = memtrace.load(files[0]), memtrace.load(imported)
    assert summarize(direct_trace) == summarize(imported_trace)
    for table in ("events", "ops", "spans", "labels", "segments", "names"):
        direct_table, imported_table = getattr(direct_trace, table), getattr(imported_trace, table)
        assert len(direct_table) == len(imported_table)
        assert direct_table.astype(str).equals(imported_table.astype(str)), table
    parts = json.loads((imported / "rank=0" / "manifest.json").read_text())["parts"]
    assert set(parts) <= {*empty_tables(), "live"} and parts["events"] == [[0, 0]]


def test_several_files_are_several_ranks(tmp_path: Path, files: list[Path]) -> None:
    imported = tmp_path / "job.memtrace"
    assert run_memtrace("import", *files, "-o", imported).exit_code == 0
    for traces in ([imported], files):
        result = run_memtrace("summary", *traces)
        assert result.exit_code == 0, result.stderr
        assert "rank  device" in result.stdout
        ranks = json.loads(run_memtrace("summary", "--json", *traces).stdout)["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(rank["source"]["file"] == file.name for rank, file in zip(ranks, files, strict=True))


def test_an_existing_file_or_folder_is_not_overwritten(tmp_path: Path, files: list[Path]) -> None:
    for name in ("a file", "a folder", "a link"):
        existing = tmp_path / name
        if name == "a file":
            existing.write_text("mine")
        elif name == "a folder":
            existing.mkdir()
            (existing / "mine").write_text("mine")
        else:
            existing.symlink_to(tmp_path / "nowhere")
        for flags in ([], ["--overwrite"]):
            result = run_memtrace("import", files[0], "-o", existing, *flags)
            assert result.exit_code == 2 and "exists already" in result.stderr
        assert os.path.lexists(existing)
    assert (tmp_path / "a file").read_text() == (tmp_path / "a folder" / "mine").read_text() == "mine"


def test_overwrite_replaces_a_trace(tmp_path: Path, files: list[Path]) -> None:
    imported = tmp_path / "run.memtrace"
    assert run_memtrace("import", *files, "-o", imported).exit_code == 0
    assert run_memtrace("import", files[0], "-o", imported).exit_code == 2
    assert memtrace.load(imported).ranks == (0, 1)
    assert run_memtrace("import", files[0], "-o", imported, "--overwrite").exit_code == 0
    assert memtrace.load(imported).ranks == (0,)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_write_leaves_the_existing_trace_and_no_other_files(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = tmp_path / "run.memtrace"
    ranks = readers.read_job(files)
    write_trace(ranks, imported)
    before = sorted(path.relative_to(imported) for path in imported.rglob("*"))
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(TraceError, match="No space left"):
        write_trace(ranks, imported, overwrite=True)
    monkeypatch.undo()
    assert sorted(path.relative_to(imported) for path in imported.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run.memtrace", *(file.name for file in files)])


def test_an_invalid_file_among_valid_ones_writes_nothing(tmp_path: Path, files: list[Path]) -> None:
    files[1].write_bytes(b"nonsense")
    result = run_memtrace("import", *files, "-o", tmp_path / "job.memtrace")
    assert result.exit_code == 2 and files[1].name in result.stderr
    assert not (tmp_path / "job.memtrace").exists()


def test_ranks_follow_from_file_names_if_the_files_state_none(tmp_path: Path, files: list[Path]) -> None:
    renamed = [
        file.rename(tmp_path / f"rank{number}_memory.pickle") for file, number in zip(files, (10, 2), strict=True)
    ]
    ranks = readers.read_job(renamed)
    assert [rank.manifest.rank for rank in ranks] == [2, 10]
    assert ranks[0].manifest.world_size == 11
    note = ranks[0].manifest.coverage.notes[-1]
    assert note == "Rank 2 is rank2_memory.pickle (rank taken from the file name)"


def _write_chrome_trace(path: Path, rank: int) -> Path:
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


def test_ranks_are_those_that_the_files_state(tmp_path: Path) -> None:
    paths = [_write_chrome_trace(tmp_path / f"rank{9 - rank}.json", rank) for rank in (3, 1)]
    assert [rank.manifest.rank for rank in readers.read_job(paths)] == [1, 3]
    with pytest.raises(TraceError, match="are both of rank 1"):
        readers.read_job([paths[1], paths[1]])


def test_a_stated_rank_is_kept_beside_files_that_state_none(tmp_path: Path, files: list[Path]) -> None:
    ranks = readers.read_job([files[0], _write_chrome_trace(tmp_path / "stated.json", 1), files[1]])
    assert [(rank.manifest.rank, rank.manifest.source.file) for rank in ranks] == [
        (0, files[0].name), (1, "stated.json"), (2, files[1].name),
    ]  # fmt: skip
    notes = [rank.manifest.coverage.notes[-1] for rank in ranks]
    assert ["stated by the file" in note for note in notes] == [False, True, False]
    named = files[1].rename(tmp_path / "rank7.pickle")
    ranks = readers.read_job([named, tmp_path / "stated.json"])
    assert [rank.manifest.rank for rank in ranks] == [1, 7]


def test_folders_and_files_can_be_the_ranks_of_one_job(tmp_path: Path, files: list[Path]) -> None:
    imported = [tmp_path / "a.memtrace", tmp_path / "b.memtrace"]
    for file, folder in zip(files, imported, strict=True):
        write_trace(readers.read_job([file]), folder)
    for paths in ([imported[0], imported[1]], [imported[0], files[1]], [files[0], imported[1]]):
        job = memtrace.load(*paths)
        assert job.ranks == (0, 1)
        for number, file in enumerate(files):
            assert job.rank(number).events.equals(memtrace.load(file).events)
            assert job.rank(number).manifest.world_size == 2
        assert "order of the files" in compute_coverage(job.rank(1)).notes[-1]
    for number, file in enumerate(files):
        write_trace(readers.read_job([file]), tmp_path / f"rank{5 - number}.memtrace")
    named = memtrace.load(tmp_path / "rank5.memtrace", tmp_path / "rank4.memtrace")
    assert named.ranks == (4, 5)
    assert named.rank(5).events.equals(memtrace.load(files[0]).events)


def test_two_files_of_the_same_rank_are_refused(tmp_path: Path, files: list[Path]) -> None:
    write_trace(readers.read_job(files), tmp_path / "job.memtrace")
    with pytest.raises(TraceError, match=r"job.memtrace and job.memtrace are both of rank 0"):
        memtrace.load(tmp_path / "job.memtrace", tmp_path / "job.memtrace")


class AddedReader:
    """A reader of another package."""

    def recognises(self, content: Content) -> bool:
        return content.head.startswith(b"FOREIGN")

    def read(self, content: Content) -> list[ReadRank]:
        return [ReadRank(new_manifest("foreign", content.path.name, None), empty_tables())]


def test_other_packages_can_add_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"FOREIGN DATA")
    with pytest.raises(TraceError, match="unrecognised file format"):
        readers.read(tmp_path / "x")
    point = EntryPoint("foreign", f"{__name__}:AddedReader", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == registry.ENTRY_POINT_GROUP else []
    )
    monkeypatch.setattr(isolated, "_can_fork", lambda: True)
    (rank,) = readers.read(tmp_path / "x")
    assert rank.manifest.source == TraceSource("foreign", None, "x")


def test_a_process_with_several_threads_reads_in_a_new_interpreter(tmp_path: Path, files: list[Path]) -> None:
    expected = readers.read(files[0])
    ready, stop = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), stop.wait(60)))
    other.start()
    try:
        ready.wait(10)
        assert not isolated._can_fork()
        ranks = readers.read(files[0])
        (tmp_path / "x").write_bytes(b"nonsense")
        with pytest.raises(TraceError, match="unrecognised file format"):
            readers.read(tmp_path / "x")
        entries = [{"action": "x", "n": n} for n in range(100_000)]
        (tmp_path / "large").write_bytes(pickle.dumps({"segments": [], "device_traces": [entries]}))
        with pytest.raises(TraceError, match="of memory, which is too much"):
            readers.read(tmp_path / "large", limits=ReadLimits(memory_bytes=1 << 20, cpu_seconds=30))
    finally:
        stop.set()
        other.join()
    assert ranks[0].manifest == expected[0].manifest
    assert ranks[0].tables["events"].equals(expected[0].tables["events"])


def test_reading_a_file_imports_neither_torch_nor_pandas(files: list[Path], tmp_path: Path) -> None:
    program = (
        "import sys, json\n"
        "from memtrace.trace import load\nfrom memtrace.analysis.summary import summarize\n"
        "summarize(load(sys.argv[1]))\n"
        "print(json.dumps([name for name in ('torch', 'pandas') if name in sys.modules]))"
    )
    write_trace(readers.read_job(files[:1]), tmp_path / "imported.memtrace")
    # pyarrow 17 imports pandas itself, where it is installed.
    imported_by_pyarrow = {"pandas"} if pyarrow.__version__.startswith("17.") else set()
    for path in (files[0], tmp_path / "imported.memtrace"):
        process = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
        assert set(json.loads(process.stdout)) <= imported_by_pyarrow


def test_no_temporary_files_are_left(tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    readers.read(files[0])
    with pytest.raises(TraceError):
        readers.read(tmp_path)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("status", [-11, -9, -6, 1])
def test_a_reader_that_crashes_gives_one_error_message(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def crash(*_: Any) -> int:
        faulthandler.disable()
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status)

    monkeypatch.setattr(isolated, "_read_and_save", crash)
    monkeypatch.setattr(isolated, "_can_fork", lambda: True)
    with pytest.raises(TraceError) as caught:
        readers.read(files[0])
    assert "\n" not in str(caught.value) and str(files[0]) in str(caught.value)


@pytest.mark.parametrize("can_fork", [True, False])
def test_work_during_read_runs_once_for_a_job(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, can_fork: bool
) -> None:
    monkeypatch.setattr(isolated, "_can_fork", lambda: can_fork)
    calls: list[str] = []
    memtrace.load(*files, work_during_read=lambda: calls.append("work"))
    assert calls == ["work"]


@pytest.mark.parametrize("table", ["events", "live", "names", "ops"])
def test_a_lost_part_of_an_import_is_noticed(table: str, tmp_path: Path, files: list[Path]) -> None:
    imported = tmp_path / "imported.memtrace"
    write_trace(readers.read_job(files[:1]), imported, overwrite=False)
    (lost,) = imported.glob(f"rank=*/{table}-00000.parquet")
    lost.unlink()
    with pytest.raises(TraceError, match=f"{table}-00000.parquet is missing"):
        summarize(memtrace.load(imported))


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank3_memory_snapshot.pickle", "rank1_memory_snapshot.pickle"], [3, 1]),  # torchtitan
        (["oom_rank-0_snapshot.pickle", "oom_rank-8_snapshot.pickle"], [0, 8]),  # Megatron-LM
        (["memory_snapshot_rank1_step6.pkl", "memory_snapshot_rank0_step6.pkl"], [1, 0]),
        (["snapshot_2026-01-02-03-05_1.pickle", "snapshot_2026-01-02-03-04_0.pickle"], [1, 0]),
        (["mem.2.pickle", "mem.0.pickle", "mem.1.pickle"], [2, 0, 1]),
        (["step100.pickle", "step200.pickle"], [0, 1]),  # numbers that do not count the files
        (["b1.pickle", "a0.pickle"], [0, 1]),  # names that differ in more than numbers
        (["rank1_a.pickle", "rank1_b.pickle"], [0, 1]),
    ],
)
def test_ranks_in_the_file_names_of_training_frameworks(names: list[str], ranks: list[int]) -> None:
    manifests = readers.number_ranks([(Path("iteration_10") / name, Manifest()) for name in names])
    assert [manifest.rank for manifest in manifests] == ranks


@pytest.mark.parametrize("can_fork", [True, False])
def test_files_of_a_job_are_read_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_fork: bool
) -> None:
    """Each file is that of another history; one is damaged, one is not a snapshot."""
    monkeypatch.setattr(isolated, "_can_fork", lambda: can_fork)
    peaks, paths = [], []
    for rank in range(6 if can_fork else 3):
        history = random_history(rank, 40)
        peaks.append(max(history.requested_curve))
        paths.append(tmp_path / f"rank{rank}_memory_snapshot.pickle")
        paths[-1].write_bytes(pickle.dumps(history.snapshot()))
    answers = list(readers.read_each(paths, num_processes=3))
    expected = [readers.read(path) for path in paths]
    for answer, (rank,) in zip(answers, expected, strict=True):
        assert not isinstance(answer, TraceError)
        assert answer[0].tables == rank.tables and answer[0].manifest == rank.manifest
    paths[1].write_bytes(paths[1].read_bytes()[:-50])
    paths[2].write_bytes(b"nonsense")
    trace = memtrace.load(*paths)
    assert set(trace.unreadable) == {1, 2}
    assert "rank1_memory_snapshot.pickle: the pickle is truncated" in trace.unreadable[1]
    comparison = compare_ranks(trace)
    assert [rank.peak_bytes for rank in comparison.ranks] == [
        None if number in (1, 2) else peak for number, peak in enumerate(peaks)
    ]
    assert comparison.ranks[1].problem == trace.unreadable[1]
    with pytest.raises(TraceError, match="rank1_memory_snapshot"):
        readers.read_job(paths)
    with pytest.raises(TraceError, match="truncated"):
        memtrace.load(paths[1], paths[2])
    with pytest.raises(TraceError, match="does not exist"):
        memtrace.load(paths[0], tmp_path / "absent")


def test_an_interrupt_ends_the_processes_that_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_can_fork", lambda: True)
    children: list[int] = []
    fork = os.fork

    def forked() -> int:
        children.append(fork())
        return children[-1]

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", forked)
    paths = [tmp_path / f"rank{rank}.pickle" for rank in range(3)]
    for path in paths:
        path.write_bytes(pickle.dumps(random_history(1, 10).snapshot()))
    with pytest.raises(KeyboardInterrupt):
        memtrace.load(*paths, work_during_read=interrupt)
    assert children
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
