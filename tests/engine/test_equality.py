"""Every command prints the same JSON in this process, with worker processes, and on a Dask cluster."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memtrace.cli import cli
from memtrace.cli.workers import Workers

from memtrace.analysis import summary
from memtrace.analysis.by_part import summary as by_part
from memtrace.engine import Engine, InProcess, Runner
from memtrace.engine.processes import Processes
from tests.dask_cluster import local_cluster

COMMANDS = (
    "summary",
    "ranks",
    "check --max-peak 1MiB --max-growth 0",
    "leaks",
    "steps",
    "access",
    "findings",
    "diff TRACE",
    "pipeline",
    "stalls",
    "compare TRACE",
)
PAGE_COMMANDS = ("plot -o OUTPUT", "plot --figure categories -o OUTPUT", "report -o OUTPUT")
JOB_COMMANDS = (*PAGE_COMMANDS, "plot --figure ranks -o OUTPUT", "pipeline", "compare TRACE")
SHORT_COMMANDS = ("summary", "ranks", "check --max-peak 1MiB --max-growth 0", "leaks")
PICKY_COMMANDS = ("pipeline", "findings", "access", "stalls")
"""Commands that not every trace has an answer for; their errors are compared as well."""
FILES = {
    "complete_small": "snapshots/complete_small.pickle",
    "memory_timeline": "timeline/memory_timeline.raw.json.gz",
    "expandable": "snapshots/expandable_segments.pickle",
    "torch20": "snapshots/torch20_block_history.pickle",
    "transformer": "snapshots/transformer_training_step.pickle",
    "resnet50": "chrome/resnet50_2021_no_addr.pt.trace.json.gz",
}
"""Real files by a short name."""
HAS_ALL_TRACES = bool(os.environ.get("MEMTRACE_ALL_TRACES"))
"""Compare ten traces, with pages and figures, instead of three; takes some minutes for each."""
TRACES = ("job", "complete_small", "memory_timeline")
MORE_TRACES = ("expandable", "torch20", "transformer", "resnet50", "gpt_trace", "defects", "fixed")


@contextmanager
def running_on(runner: Runner, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have commands analyze with a runner, which stays open."""

    @contextmanager
    def engine(*_: object) -> Iterator[Engine]:
        yield Engine(runner)

    with patch.context() as context:
        context.setattr(Workers, "engine", engine)
        yield


def answer(command: str, trace: Path) -> tuple[int, list[str]]:
    """The exit code of a command and what it prints or writes, or its error."""
    words = command.replace("TRACE", str(trace)).split()
    if "OUTPUT" in words:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "page.html"
            words[words.index("OUTPUT")] = str(output)
            result = CliRunner().invoke(cli, [words[0], str(trace), *words[1:]])
            page = output.read_text() if output.exists() else str(result.exception)
        # What to recompute is the best choice that is found in two seconds; plotly numbers its figures at random.
        page = re.sub(r'<ol class="fixes">.*?</ol>|[0-9a-f]{8}-[0-9a-f-]{27}', "", page, flags=re.DOTALL)
        return result.exit_code, page.splitlines()
    result = CliRunner().invoke(cli, [words[0], str(trace), *words[1:], "--json"])
    if result.exit_code not in (0, 1) or not result.stdout:
        return result.exit_code, [str(result.exception)]
    answer = json.loads(result.stdout)
    for judged in (answer, answer.get("judged", {})):
        # What to recompute is the best choice that is found in two seconds, which differs from run to run.
        judged.get("verdict", {}).pop("fixes", None)
    return result.exit_code, json.dumps(answer, indent=1).splitlines()


def assert_equal(runners: dict[str, Runner], commands: tuple[str, ...], traces: list[Path], patch: Any) -> None:
    for trace in traces:
        for command in commands:
            with running_on(InProcess(), patch):
                expected = answer(command, trace)
            assert expected[0] in (0, 1) or command in PICKY_COMMANDS, (expected, command, trace.name)
            for name, runner in runners.items():
                with running_on(runner, patch):
                    assert answer(command, trace) == expected, (name, command, trace.name)


def test_commands_on_a_job_print_the_same_with_two_workers(
    job: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal({"processes": processes}, SHORT_COMMANDS, [job], monkeypatch)


def test_a_pipeline_is_measured_the_same_with_two_workers(
    pipeline_job: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal({"processes": processes}, ("pipeline --capacity 1KiB",), [pipeline_job], monkeypatch)


@pytest.mark.parametrize("runs_here", [True, False])
def test_a_stage_that_cannot_be_read_is_named_and_the_others_are_measured(
    pipeline_job: Path,
    damaged: Callable[[Path, int], Path],
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    runs_here: bool,
) -> None:
    with running_on(InProcess() if runs_here else processes, monkeypatch):
        code, lines = answer("pipeline", damaged(pipeline_job, 2))
    result = json.loads("\n".join(lines))["measured"]
    assert code == 0
    assert [stage["stage"] for stage in result["stages"]] == [0, 1, 3]
    assert result["missing_ranks"] == [2] and [left_out["rank"] for left_out in result["unreadable"]] == [2]
    assert "events-00000.parquet is damaged" in result["unreadable"][0]["reason"]


@pytest.mark.parametrize("runs_here", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_page_names_a_rank_that_cannot_be_read_and_shows_the_others(
    pipeline_job: Path,
    damaged: Callable[[Path, int], Path],
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    runs_here: bool,
) -> None:
    with running_on(InProcess() if runs_here else processes, monkeypatch):
        code, lines = answer("report -o OUTPUT", damaged(pipeline_job, 2))
    page = "\n".join(lines)
    assert code == 0
    assert all(f'"{rank}-cpu"' in page for rank in (0, 1, 3)) and '"2-cpu"' not in page
    assert "events-00000.parquet is damaged" in page


@pytest.fixture(scope="module")
def cluster() -> Iterator[Runner]:
    """A Dask cluster of two processes on this machine."""
    from memtrace.engine.cluster import Cluster

    with local_cluster() as local, Cluster(local.scheduler_address) as runner:
        yield runner


@pytest.fixture
def trace_path(request: pytest.FixtureRequest, data: Path) -> Path:
    """The trace that the test is parametrized with the name of."""
    name: str = request.param
    if name in FILES:
        return data / FILES[name]
    if name in ("defects", "fixed"):
        path: Path = getattr(request.getfixturevalue("defect_traces"), name)
    else:
        path = request.getfixturevalue(name)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("trace_path", (*TRACES, *(MORE_TRACES if HAS_ALL_TRACES else ())), indirect=True)
def test_every_command_prints_the_same_everywhere(
    trace_path: Path, processes: Processes, cluster: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = (*COMMANDS, *PAGE_COMMANDS) if HAS_ALL_TRACES else COMMANDS
    assert_equal({"processes": processes, "cluster": cluster}, commands, [trace_path], monkeypatch)


@pytest.mark.slow
def test_every_command_on_a_pipeline_prints_the_same_everywhere(
    pipeline_job: Path, processes: Processes, cluster: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal({"processes": processes, "cluster": cluster}, JOB_COMMANDS, [pipeline_job], monkeypatch)


@pytest.mark.slow
def test_long_traces_print_the_same_by_parts(
    job: Path, processes: Processes, cluster: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long traces are not searched for patterns; without this limit every trace is long.
    monkeypatch.setattr(summary, "MAX_PATTERN_EVENTS", 0)
    monkeypatch.setattr("memtrace.planning.fixes.MAX_PATTERN_EVENTS", 0)
    monkeypatch.setattr("memtrace.planning.fixes.MAX_SWEPT_ENTRIES", 0)
    for command in ("summary --rank 1", "summary --rank 2 --capacity 1KiB"):
        monkeypatch.setattr("memtrace.engine.questions.is_divisible", lambda _: False)
        with running_on(InProcess(), monkeypatch):
            whole = answer(command, job)
        monkeypatch.setattr("memtrace.engine.questions.is_divisible", lambda trace: len(trace.part_numbers) > 1)
        divided: list[object] = []
        summarize_parts = by_part.summarize_parts

        def counted(*arguments: Any, summarize: Any = summarize_parts, results: list[object] = divided) -> Any:
            results.append(summarize(*arguments))
            return results[-1]

        monkeypatch.setattr("memtrace.engine.questions.summarize_parts", counted)
        for runner in (InProcess(), processes, cluster):
            with running_on(runner, monkeypatch):
                assert answer(command, job) == whole
        assert None not in divided and len(divided) == 3
