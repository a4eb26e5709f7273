"""How workers open traces: one rank at a time, and the same one again without reading it again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memtrace.engine import Engine, InProcess, TraceSource, sources
from memtrace.engine.processes import Processes
from memtrace.errors import TraceError
from memtrace.trace import load
from tests.engine import tasks


def test_a_worker_keeps_the_rank_that_it_opened_last_and_no_other(job: Path) -> None:
    trace, source = load(job), TraceSource.of((str(job),))
    first = source.only(trace, 0).open()
    assert source.only(trace, 0).open() is first
    second = source.only(trace, 1).open()
    assert source.only(trace, 1).open() is second
    assert source.only(trace, 0).open() is not first
    assert source.open().rank(0) is not source.only(trace, 0).open()


def test_a_worker_does_not_open_the_other_ranks_of_a_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, source = load(job), TraceSource.of((str(job),))
    monkeypatch.setattr(sources, "load", lambda *paths: pytest.fail("the whole job is opened"))
    assert source.only(trace, 2).open().events.equals(trace.rank(2).events)
    alone = TraceSource.of((str(job / "rank=1"),))
    monkeypatch.setattr(sources, "load", load)
    assert alone.only(load(job / "rank=1")).open().events.equals(trace.rank(1).events)


def test_a_rank_knows_which_other_ranks_cannot_be_read(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job.memtrace"
    shutil.copytree(job, folder)
    (folder / "rank=1" / "manifest.json").write_text("{}")
    trace = load(folder)
    opened = TraceSource.of((str(folder),)).only(trace, 2).open()
    assert opened.file_notes == trace.rank(2).file_notes
    assert any("rank 1" in note for note in opened.file_notes)


def test_a_later_question_sees_what_has_changed(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job.memtrace"
    shutil.copytree(job / "rank=0", folder / "rank=0")
    assert TraceSource.of((str(folder),)).open().ranks == (0,)
    shutil.copytree(job / "rank=1", folder / "rank=1")
    assert TraceSource.of((str(folder),)).open().ranks == (0, 1)
    assert TraceSource.of((str(folder),)).only(load(folder), 1).open().ranks == (1,)


@pytest.mark.parametrize("runs_here", [True, False])
def test_results_of_ranks_are_kept_with_the_job_and_ranks_that_cannot_be_read_are_left_out(
    job: Path, processes: Processes, runs_here: bool
) -> None:
    trace, source = load(job), TraceSource.of((str(job),))
    shown: list[str] = []
    engine = Engine(InProcess() if runs_here else processes, shown.append)
    answered = engine.analyze(trace, tasks.fail_on_rank_1, source=source, task="counting")
    assert answered.ranks == (0, 2) and answered.unreadable == {1: "rank 1 is broken"}
    assert all(answered.has_rank_result(rank, tasks.fail_on_rank_1) for rank in (0, 2))
    assert answered.rank_result(2, tasks.fail_on_rank_1) == trace.rank(2).num_rows("events")
    assert len(shown) == 3
    engine.analyze(answered, tasks.fail_on_rank_1, source=source, task="counting")
    assert len(shown) == 3, "what is known is not computed again"
    with pytest.raises(TraceError, match="rank 1 is broken"):
        answered.rank(1)
    with pytest.raises(TraceError, match="rank 1 is broken"):
        engine.analyze(trace.rank(1), tasks.fail_on_rank_1, source=source.only(trace, 1), task="counting")
