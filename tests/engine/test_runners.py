"""Worker processes: results in order, death of workers, errors of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtrace.engine import Engine, EngineOptions, InProcess, RankError, TraceSource, WorkerError, choose_engine
from memtrace.engine.processes import Processes
from memtrace.errors import MemtraceError
from memtrace.trace import load
from tests.engine import tasks


def test_results_come_in_the_order_of_the_tasks_from_other_processes(processes: Processes) -> None:
    assert list(processes.map(tasks.square, range(40))) == [number * number for number in range(40)]
    assert os.getpid() not in set(processes.map(tasks.name_of_process, range(4)))


def test_a_task_whose_worker_dies_is_run_again(tmp_path: Path) -> None:
    with Processes(2) as runner:
        assert list(runner.map(tasks.die_once, [(number, str(tmp_path)) for number in range(8)])) == list(range(8))


@pytest.mark.slow
def test_a_task_that_always_kills_its_worker_is_reported_and_the_others_are_answered() -> None:
    with Processes(2) as runner:
        first, second, *rest = runner.map(tasks.die_always, range(6))
    assert first == 0 and rest == [2, 3, 4, 5]
    assert isinstance(second, WorkerError)
    assert "--workers 1" in str(second)


@pytest.mark.parametrize("runs_here", [True, False])
def test_the_other_ranks_are_answered_where_one_cannot_be_read(
    job: Path, processes: Processes, runs_here: bool
) -> None:
    trace, source = load(job), TraceSource.of((str(job),))
    shown: list[str] = []
    engine = Engine(InProcess() if runs_here else processes, shown.append)
    answers = dict(engine.map_ranks(trace, source, tasks.fail_on_rank_1, task="counting"))
    assert answers[1] == RankError(1, "rank 1 is broken")
    assert answers[0] == trace.rank(0).num_rows("events") and answers[2] == trace.rank(2).num_rows("events")
    assert shown == [f"counting: rank {rank} ({rank + 1} of 3)" for rank in range(3)]


def test_small_traces_are_analyzed_in_this_process_unless_workers_are_asked_for(job: Path) -> None:
    trace, source = load(job), TraceSource.of((str(job),))
    assert choose_engine(EngineOptions(), trace, source).runner.is_local
    assert choose_engine(EngineOptions(workers=1), trace, source).runner.is_local
    assert choose_engine(EngineOptions(workers=3), trace, source).runner.num_workers == 3


def test_a_scheduler_that_does_not_answer_is_an_error_that_says_so(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memtrace.engine import cluster

    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.2)
    with pytest.raises(MemtraceError, match=r"scheduler tcp://127.0.0.1:9 does not answer"):
        choose_engine(EngineOptions(scheduler="tcp://127.0.0.1:9"), load(job), TraceSource.of((str(job),)))
