"""Summaries of parts for an index: the same from worker processes, and errors of parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memtrace.analysis.part_summary import PartSummary, summarize_part
from memtrace.analysis.trace_index import TraceIndex
from memtrace.engine import Engine, EngineOptions, InProcess, indexing
from memtrace.engine.processes import Processes
from memtrace.errors import MemtraceError
from memtrace.trace import load

NO_OPTIONS = EngineOptions()


def plain(summaries: list[PartSummary]) -> Any:
    """An index of the parts, as values that can be compared."""
    index = TraceIndex()
    for summary in summaries:
        index.add(summary)
    arrays, rest = index.to_arrays()
    return {name: values.tolist() for name, values in arrays.items()}, rest


def test_workers_make_the_same_index_and_few_parts_need_none(
    job: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = load(job).rank(1)
    here = plain([summarize_part(trace, number) for number in trace.part_numbers])
    chosen: list[EngineOptions] = []

    def choose(options: EngineOptions, *_: object) -> Engine:
        chosen.append(options)
        return Engine(processes if options.workers == 2 else InProcess())

    monkeypatch.setattr(indexing, "choose_engine", choose)
    monkeypatch.setattr(processes, "close", lambda: None)
    numbers = trace.part_numbers
    assert plain(list(indexing.summarize_parts(trace, numbers, [str(job)], NO_OPTIONS))) == here and not chosen
    monkeypatch.setattr(indexing, "MIN_PARTS_FOR_WORKERS", len(numbers))
    monkeypatch.setattr(indexing, "default_workers", lambda: 2)
    for options in (NO_OPTIONS, EngineOptions(2), EngineOptions(1), EngineOptions(scheduler="tcp://127.0.0.1:1")):
        assert plain(list(indexing.summarize_parts(trace, numbers, [str(job)], options))) == here
    assert [options.workers for options in chosen] == [2, 2, 1, None]
    assert chosen[-1].scheduler == "tcp://127.0.0.1:1"


def test_a_part_that_workers_cannot_read_is_an_error(
    job: Path, damaged: Callable[[Path, int], Path], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged(job, 1)
    trace = load(folder).rank(1)
    monkeypatch.setattr(indexing, "MIN_PARTS_FOR_WORKERS", 1)
    monkeypatch.setattr(indexing, "choose_engine", lambda *_: Engine(processes))
    monkeypatch.setattr(processes, "close", lambda: None)
    with pytest.raises(MemtraceError, match=r"events-00000.parquet is damaged"):
        list(indexing.summarize_parts(trace, trace.part_numbers, [str(folder)], NO_OPTIONS))
