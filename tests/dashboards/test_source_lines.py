"""Source lines of a page: the right ones, and nothing that a hostile trace could ask for."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from memtrace.dashboards.source_lines import MAX_BYTES, MAX_FILE_BYTES, SourceOptions, collect_source_lines

from memtrace.format.manifest import TraceSource
from memtrace.frames import Frame
from memtrace.trace import Trace
from tests.builders import trace_of, with_manifest

TEXT = "".join(f"line_{number} = {number}\n" for number in range(1, 41))


def recording(**changes: object) -> Trace:
    """A trace that this machine recorded."""
    return with_manifest(trace_of(events=[]), host=platform.node(), t0_epoch_ns=2**62, **changes)


def excerpts(
    files: list[str], root: Path | None = None, trace: Trace | None = None
) -> dict[str, list[tuple[int, list[str]]]]:
    frames = [Frame(file, 10, "main") for file in files]
    return collect_source_lines(trace or recording(), frames, SourceOptions(root=root)).excerpts


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


def test_the_lines_around_frames_are_pieces_without_overlap(program: Path) -> None:
    frames = [Frame(str(program), line, "main") for line in (10, 12, 30, 1, 40, 99, 0)]
    pieces = collect_source_lines(recording(), frames, SourceOptions()).excerpts[str(program)]
    assert [(first, len(lines)) for first, lines in pieces] == [(1, 4), (7, 9), (27, 7), (37, 4)]
    assert all(line == f"line_{first + n} = {first + n}" for first, lines in pieces for n, line in enumerate(lines))


def test_sources_are_off_on_request_and_for_traces_of_other_machines(program: Path) -> None:
    frames = [Frame(str(program), 10, "main")]
    assert collect_source_lines(recording(), frames, SourceOptions(is_enabled=False)).excerpts == {}
    snapshot = recording(source=TraceSource(kind="cuda_snapshot"))
    for trace in (with_manifest(recording(), host="elsewhere"), with_manifest(recording(), host=None), snapshot):
        result = collect_source_lines(trace, frames, SourceOptions())
        assert result.excerpts == {}
        assert result.note == (
            "The page has no source lines because this machine did not record the trace; --source-root DIR adds them."
        )
        assert list(excerpts([str(program)], program.parent, trace)) == [str(program)]


def test_a_source_root_takes_the_longest_end_of_the_path_that_exists(program: Path) -> None:
    inner = program.parent / "models" / "train.py"
    inner.parent.mkdir()
    inner.write_text(TEXT.replace("line", "inner"))
    for root in (program.parent, program.parent.parent):
        found = excerpts(["/home/alice/project/models/train.py", "/home/alice/project/train.py"], root)
        assert [pieces[0][1][0][:5] for pieces in found.values()] == ["inner", "line_"]


def test_nothing_but_python_files_of_the_folder_is_read(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parent)
    secret = tmp_path / "secret.py"
    secret.write_text(TEXT)
    (tmp_path / "secret.txt").write_text(TEXT)
    folder = program.parent
    (folder / "escape.py").symlink_to(secret)
    (folder / "text.py").symlink_to(tmp_path / "secret.txt")
    (folder / "zero.py").symlink_to("/dev/zero")
    (folder / "loop.py").symlink_to(folder / "loop.py")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    with (folder / "large.py").open("wb") as large:
        large.truncate(MAX_FILE_BYTES + 1)
    hostile = ["escape.py", "text.py", "zero.py", "loop.py", "folder.py", "pipe.py", "large.py", "../secret.py", "x\0.py",
               "../../../../../../etc/passwd", "", "/", "a" * 5000 + ".py", "\ud800.py", "<string>", "train.py/../../secret.py"]  # fmt: skip
    assert excerpts([*hostile, str(secret), f"{folder}/../secret.py"], folder) == {}
    local = [str(folder / name) for name in hostile if name != "escape.py"]
    assert excerpts([*local, "train.py", "/proc/self/cwd/train.py", "/dev/zero", "/etc/passwd"]) == {}


def test_links_to_python_files_are_followed_where_the_program_ran(program: Path) -> None:
    link = program.parent / "link.py"
    link.symlink_to(program)
    assert list(excerpts([str(link)])) == [str(link)]


def test_files_that_are_newer_than_the_recording_are_named(program: Path) -> None:
    trace = with_manifest(recording(), t0_epoch_ns=1)
    result = collect_source_lines(trace, [Frame(str(program), 10, "main")], SourceOptions())
    assert result.newer_files == (str(program),)
    assert result.note == (
        "The page contains source lines of 1 file; --no-source leaves them out. Changed after the recording began, so "
        "lines may differ from those that ran: train.py."
    )


def test_the_lines_are_bounded_and_printable(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.py").write_text("\n".join(f"{'x' * 500}\x1b[31m" for _ in range(200)))
    frames = [Frame(str(tmp_path / f"{number}.py"), line, "f") for number in range(40) for line in range(1, 200, 8)]
    pieces = collect_source_lines(recording(), frames, SourceOptions()).excerpts
    lines = [line for pieces_of_file in pieces.values() for _, piece in pieces_of_file for line in piece]
    assert lines and sum(map(len, lines)) <= MAX_BYTES
    assert all(len(line) <= 160 and line.isprintable() for line in lines)
