"""The reports of all ranks of a job, each kept beside its rank, so that a second question reads no events.

A rank that finishes or changes after its report was written is read again; the others are not.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from memtrace import __version__
from memtrace.analysis.rank_results import RankAnalyzer, analyze_here
from memtrace.analysis.rank_standing import RankStanding
from memtrace.analysis.rank_summary import DeviceLoad, RankReport, RankSummary, report_rank
from memtrace.errors import MemtraceError
from memtrace.format.storage import AnyPath, Entry, StoragePath, map_requests
from memtrace.format.storage_writer import write_file
from memtrace.format.typed_json import InvalidMember, parse_value, read_json_file
from memtrace.trace import Trace

REPORT_NAME: Final = "rank-report.json"
"""File in the folder of a rank that holds its report."""
_VERSION: Final = 2
_SIGNED: Final = ("summary.clock_drift_ns",)


@dataclass(frozen=True)
class _StoredLoad:
    """A ``DeviceLoad`` as JSON."""

    device: str
    peak_bytes: int
    bytes_by_category: dict[str, int]
    step: tuple[int, ...]
    step_peak_bytes: tuple[int, ...]


@dataclass(frozen=True)
class _StoredReport:
    """A ``RankReport`` as JSON, with what it was made from."""

    version: tuple[int, str]
    files: dict[str, Entry]
    """The state of every file of the rank."""
    summary: RankSummary
    standing: RankStanding | None
    loads: tuple[_StoredLoad, ...]


def rank_reports(trace: Trace) -> tuple[RankReport, ...]:
    """Return the report of every rank of a trace that can be opened, in order (cached)."""
    return trace.cached(_rank_reports)


def _rank_reports(trace: Trace) -> tuple[RankReport, ...]:
    _take_kept_reports(trace)
    return tuple(trace.rank_result(number, report_of) for number in trace.ranks)


def report_of(rank: Trace) -> RankReport:
    """Return the report of a single-rank trace: the one that is kept beside it, else a new one, which is then kept."""
    return kept_report(rank) or make_report(rank)


def analyze_reports(trace: Trace, analyze: RankAnalyzer = analyze_here) -> Trace:
    """Return a trace with the reports of its ranks, of which only those are made that are not kept beside their ranks.

    Args:
        trace: the trace of a job.
        analyze: computes the reports that are missing.
    """
    _take_kept_reports(trace)
    return analyze(trace, report_of, task="comparing")


def _take_kept_reports(trace: Trace) -> None:
    """Read the reports that are kept beside the ranks of a job: those in a storage several at a time."""
    ranks = [trace.rank_to_read(number) for number in trace.ranks if not trace.has_rank_result(number, report_of)]
    folders = (rank.rank_folder for rank in ranks)
    path = next((folder.path for folder in folders if folder is not None), Path())
    for rank, report in zip(ranks, map_requests(kept_report, ranks, path), strict=True):
        if report is not None:
            trace.keep_rank_result(rank.ranks[0], report, report_of)


def make_report(rank: Trace) -> RankReport:
    """Return the report of a single-rank trace, and keep it in the folder of the rank, in a file named ``REPORT_NAME``.

    It is not kept of windows, of running recordings, where the folder cannot be written to, and in storages that do not
    say when a file has changed.
    """
    folder = rank.rank_folder
    states = {} if folder is None else folder.states()  # read first: a file that changes then makes the report stale
    if folder is not None:
        folder.read_ahead()
    report = report_rank(rank)
    is_complete = rank.manifest.finished and report.summary.finished is not None
    if folder is not None and is_complete and states and all(state.version for state in states.values()):
        save_report(folder.path, report, states)
    return report


def kept_report(rank: Trace) -> RankReport | None:
    """Return the report that is kept beside a single-rank trace; None where there is none for the trace as it is."""
    folder = rank.rank_folder
    if folder is None:
        return None
    listed = folder.listed_file(REPORT_NAME)
    if isinstance(folder.path, StoragePath) and listed is None:
        return None
    try:
        content = read_json_file(folder.path / REPORT_NAME, listed)
        if not isinstance(content, dict) or content.get("version") != [_VERSION, __version__]:
            return None
        stored: _StoredReport = parse_value(_StoredReport, content, signed=_SIGNED)
        if stored.files != folder.states():
            return None
    except (OSError, ValueError, RecursionError, InvalidMember):  # whatever is wrong with it, it is made again
        return None
    number = rank.manifest.rank
    loads = tuple(_read_load(load, number) for load in stored.loads)
    standing = None if stored.standing is None else replace(stored.standing, rank=number)
    return RankReport(replace(stored.summary, rank=number), standing, loads)


def save_report(folder: AnyPath, report: RankReport, files: dict[str, Entry]) -> None:
    """Keep a report in the folder of its rank, if the folder can be written to.

    Args:
        folder: of the rank, on disk or in a storage.
        report: what was made of it.
        files: the state of its files before they were read, by name.
    """
    loads = tuple(
        _StoredLoad(
            load.device,
            load.peak_bytes,
            load.bytes_by_category,
            tuple(load.step.tolist()),
            tuple(load.step_peak_bytes.tolist()),
        )
        for load in report.loads
    )
    stored = _StoredReport((_VERSION, __version__), files, report.summary, report.standing, loads)
    with suppress(OSError, MemtraceError):
        write_file(folder / REPORT_NAME, json.dumps(asdict(stored)).encode())


def _read_load(stored: _StoredLoad, rank: int) -> DeviceLoad:
    step, peaks = np.array(stored.step, np.int64), np.array(stored.step_peak_bytes, np.int64)
    return DeviceLoad(rank, stored.device, stored.peak_bytes, dict(stored.bytes_by_category), step, peaks)
