"""Quiet, verbose, progress, shell completion and the version of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memtrace.cli import COMMANDS
from memtrace.cli.feedback import Feedback, Verbosity
from memtrace.cli.output import SCHEMA_VERSION, print_json
from memtrace.cli.plan import PLANS

from tests.cli.runner import run_memtrace


@pytest.mark.parametrize("arguments", [("-q", "summary"), ("summary", "--quiet")])
def test_quiet_prints_the_result_alone(arguments: tuple[str, ...], recorded_trace: Path) -> None:
    loud, quiet = run_memtrace("summary", recorded_trace), run_memtrace(*arguments, recorded_trace)
    assert "Next: " in loud.stdout
    assert quiet.stdout == loud.stdout[: loud.stdout.index("\nNext: ")] and quiet.stderr == ""


def test_quiet_reports_errors(tmp_path: Path) -> None:
    result = run_memtrace("-q", "summary", tmp_path / "missing")
    assert result.returncode == 2 and "does not exist" in " ".join(result.stderr.split())


def test_a_quiet_recording_leaves_the_output_to_the_program(tmp_path: Path) -> None:
    result = run_memtrace("record", "-q", "-o", tmp_path / "run.memtrace", "-c", "print('trained')", "-q")
    assert (result.returncode, result.stdout, result.stderr) == (0, "trained\n", "")


def test_verbose_reports_what_was_read_and_how_long_it_took(recorded_trace: Path) -> None:
    result = run_memtrace("summary", "-v", recorded_trace)
    assert result.stdout == run_memtrace("summary", recorded_trace).stdout
    lines = result.stderr.splitlines()
    assert lines[0].startswith("memtrace: rank 0: ") and " events, " in lines[0]
    assert any(line.startswith("memtrace: _compute_blocks in memtrace.analysis.blocks: ") for line in lines)
    assert lines[-1].startswith("memtrace: finished in ")


class Terminal:
    """A stderr that claims to be a terminal."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def test_progress_ends_before_other_output_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    feedback = Feedback()
    monkeypatch.setattr(sys, "stderr", Terminal())
    feedback.begin("analyzing")
    timer = feedback._timer
    feedback.begin("drawing")
    assert timer is not None and timer.is_alive() and feedback._timer is timer
    feedback._show()  # what happens after a second
    assert feedback._status is not None and "drawing" in str(feedback._status.status)
    feedback.end()
    assert feedback._status is None and feedback._timer is None and not timer.is_alive()


@pytest.mark.parametrize(("verbosity", "is_terminal"), [(Verbosity.QUIET, True), (Verbosity.NORMAL, False)])
def test_there_is_no_progress_when_quiet_or_in_a_pipe(
    verbosity: Verbosity, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback = Feedback()
    feedback.verbosity = verbosity
    monkeypatch.setattr(Terminal, "isatty", lambda self: is_terminal)
    monkeypatch.setattr(sys, "stderr", Terminal())
    feedback.begin("analyzing")
    assert feedback._timer is None


def complete(*words: str) -> list[str]:
    """Return what the shell is offered for the last word."""
    environment = os.environ | {
        "_MEMTRACE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(("memtrace", *words)),
        "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    command = [sys.executable, "-m", "memtrace.cli"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [line.partition(",")[2] for line in output.splitlines()]


def test_the_shell_completes_commands_plans_and_options() -> None:
    assert complete("su") == ["summary"]
    assert complete("plan", "re") == ["recompute"]
    assert complete("check", "--max-p") == ["--max-peak"]
    assert set(complete("")) == set(COMMANDS)
    assert set(complete("plan", "")) == set(PLANS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(shell: str) -> None:
    result = run_memtrace("completion", shell)
    assert result.returncode == 0 and f"_MEMTRACE_COMPLETE={shell}_complete" in result.stdout


def test_a_script_of_bash_is_valid(tmp_path: Path) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(run_memtrace("completion", "bash").stdout)
    subprocess.run(["bash", "-c", f"source {script} && complete -p memtrace"], check=True, capture_output=True)


def test_json_begins_with_the_version_of_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"peak_bytes": 1})
    printed = json.loads(capsys.readouterr().out)
    assert list(printed.items()) == [("schema_version", SCHEMA_VERSION), ("peak_bytes", 1)]


def test_a_pause_of_the_progress_runs_beside_no_thread_and_then_shows_the_task_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feedback = Feedback()
    monkeypatch.setattr(sys, "stderr", Terminal())
    with feedback.paused():
        pass
    assert feedback._timer is None  # there was no progress to show again
    feedback.begin("analyzing")
    timer = feedback._timer
    assert timer is not None
    with feedback.paused():
        assert feedback._timer is None and not timer.is_alive()
    assert feedback._timer is not None and feedback._task == "analyzing"
    feedback.end()
