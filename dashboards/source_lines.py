"""Source lines around the frames of a trace, for the page.

The names of the files come from the trace, which anybody can have written, and a page is passed on to others. So only
files of Python source are read, a few lines around each frame, and only where the trace names this machine as the one
that recorded it or the caller names the folder of the sources.
"""

from __future__ import annotations

import os
import platform
import stat
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from memtrace.dashboards.text import name_text

from memtrace.code_owner import Owner
from memtrace.frames import normalize_path
from memtrace.units import format_count

if TYPE_CHECKING:
    from memtrace.frames import Frame
    from memtrace.trace import Trace

CONTEXT_LINES: Final = 3
"""Lines before and after the line of a frame."""
MAX_LINE_CHARS: Final = 160
MAX_FILE_BYTES: Final = 2 << 20
MAX_FILES: Final = 200
MAX_BYTES: Final = 300_000
"""Most bytes of source text in a page."""
_PRIVATE_FOLDERS: Final = ("/proc/", "/sys/", "/dev/")


@dataclass(frozen=True)
class SourceOptions:
    """Which source files a page may contain lines of."""

    is_enabled: bool = True
    root: Path | None = None
    """Folder of the sources; None: where the trace names them, if it was recorded on this machine."""


@dataclass(frozen=True)
class SourceLines:
    """Lines of source files."""

    excerpts: dict[str, list[tuple[int, list[str]]]]
    """By file as the frames name it: pieces with the number of their first line."""
    newer_files: tuple[str, ...]
    """Those files that changed after the recording began, whose lines may differ from what ran."""
    note: str
    """What the reader must know about the lines; empty: nothing."""


def collect_source_lines(trace: Trace, frames: Sequence[Frame], options: SourceOptions) -> SourceLines:
    """Return the lines around frames.

    Args:
        trace: A single-rank trace.
        frames: The frames, most important first; the lines of later ones are left out where there is no space.
        options: Which files to read.
    """
    if not options.is_enabled:
        return SourceLines({}, (), "")
    if options.root is None and not _is_recorded_here(trace):
        return SourceLines({}, (), _elsewhere_note(trace, frames))
    wanted: dict[str, set[int]] = defaultdict(set)
    for frame in frames:
        if frame.line > 0 and trace.code_owner.owner(frame) is not Owner.INTERNAL:
            wanted[frame.file].add(frame.line)
    excerpts: dict[str, list[tuple[int, list[str]]]] = {}
    newer, left = [], MAX_BYTES
    for file, lines in list(wanted.items())[:MAX_FILES]:
        source = _read_source(file, options.root)
        if source is None:
            continue
        pieces = _cut_pieces(source.text.splitlines(), lines)
        left -= sum(len(line) + 4 for _, piece in pieces for line in piece)
        if left < 0:
            break
        excerpts[file] = pieces
        if _is_newer(source.modified_ns, trace):
            newer.append(file)
    return SourceLines(excerpts, tuple(newer), _embedded_note(len(excerpts), newer))


@dataclass(frozen=True)
class _Source:
    text: str
    modified_ns: int


def _read_source(file: str, root: Path | None) -> _Source | None:
    """Return the text of a source file; None where there is none or it must not be read."""
    path = _find_file(file, root)
    if path is None:
        return None
    try:
        # Opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            return None
        content = stream.read(MAX_FILE_BYTES)
    return _Source(content.decode("utf-8", "replace"), status.st_mtime_ns)


def _find_file(file: str, root: Path | None) -> Path | None:
    """Return the file of Python source that a frame names, without symbolic links in its path."""
    name = PurePosixPath(normalize_path(file))
    if name.suffix != ".py" or ".." in name.parts or "\0" in file:
        return None
    if root is None:
        return _resolve(Path(name)) if name.is_absolute() else None
    folder = root.resolve()
    parts = [part for part in name.parts if part != "/"]
    # The folder can be that of the project or any above it: the longest end of the path that exists counts.
    candidates = [Path(name)] if name.is_absolute() else []
    candidates += [folder.joinpath(*parts[skipped:]) for skipped in range(len(parts))]
    return next((path for path in map(_resolve, candidates) if path is not None and path.is_relative_to(folder)), None)


def _resolve(path: Path) -> Path | None:
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None
    is_private = str(path).startswith(_PRIVATE_FOLDERS) or str(resolved).startswith(_PRIVATE_FOLDERS)
    return resolved if resolved.suffix == ".py" and not is_private and resolved.is_file() else None


def _cut_pieces(text: Sequence[str], lines: Iterable[int]) -> list[tuple[int, list[str]]]:
    """Return the lines around some line numbers as pieces that neither touch nor overlap."""
    shown = sorted(
        {
            number
            for line in lines
            for number in range(max(1, line - CONTEXT_LINES), min(len(text), line + CONTEXT_LINES) + 1)
        }
    )
    pieces: list[tuple[int, list[str]]] = []
    for number in shown:
        if not pieces or number != pieces[-1][0] + len(pieces[-1][1]):
            pieces.append((number, []))
        pieces[-1][1].append(_line_text(text[number - 1]))
    return pieces


def _line_text(line: str) -> str:
    """Return a line for the page; its end is cut where it is too long, not its middle."""
    line = line.expandtabs(4)
    return name_text(line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 1]}…", MAX_LINE_CHARS)


def _is_recorded_here(trace: Trace) -> bool:
    manifest = trace.manifest
    return manifest.source.kind == "recording" and manifest.host is not None and manifest.host == platform.node()


def _is_newer(modified_ns: int, trace: Trace) -> bool:
    start_ns = trace.manifest.t0_epoch_ns
    return start_ns is not None and modified_ns > start_ns


def _elsewhere_note(trace: Trace, frames: Sequence[Frame]) -> str:
    if not any(frame.file.endswith(".py") for frame in frames):
        return ""
    return "The page has no source lines because this machine did not record the trace; --source-root DIR adds them."


def _embedded_note(num_files: int, newer: Sequence[str]) -> str:
    if not num_files:
        return ""
    note = f"The page contains source lines of {format_count(num_files, 'file')}; --no-source leaves them out."
    if newer:
        names = ", ".join(name_text(PurePosixPath(normalize_path(file)).name, 60) for file in newer[:3])
        more = f" and {len(newer) - 3} more" if len(newer) > 3 else ""
        note += f" Changed after the recording began, so lines may differ from those that ran: {names}{more}."
    return note
