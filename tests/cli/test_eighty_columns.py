"""Every command at 80 columns: no line is longer, and nothing that identifies something is cut off."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from memtrace.cli import COMMANDS, cli, main
from memtrace.cli.plan import PLANS

from tests.cli.runner import run_memtrace

COLUMNS = 80
COPIED = re.compile(r"^(Next: |memtrace: | {4,}(PYTORCH_|memtrace |python |optimizers = ))")
"""Lines to copy as a whole (commands, settings, code), and messages, which a pipe gets unwrapped."""
EVERY_COMMAND = [(name,) for name in COMMANDS if name != "plan"] + [("plan",)] + [("plan", name) for name in PLANS]


@pytest.fixture(scope="module", autouse=True)
def eighty_columns() -> Iterator[None]:
    """In-process runs take their width from the environment."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(COLUMNS)
    yield
    del os.environ["COLUMNS"]
    if before is not None:
        os.environ["COLUMNS"] = before


@pytest.fixture(scope="module")
def two_ranks(recorded_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two traces that stand for the ranks of a job."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = [folder / f"a_rather_long_name_of_a_rank_{number}.memtrace" for number in range(2)]
    for path in paths:
        shutil.copytree(recorded_trace, path)
    return paths


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="memtrace")


def assert_readable(output: str) -> None:
    for line in output.splitlines():
        assert len(line) <= COLUMNS or COPIED.match(line), line
        assert "…" not in line and not re.search(r"\w\.\.\.\w", line), line


ON_ONE_TRACE = (
    ("summary",), ("summary", "--capacity", "1KiB"), ("findings",), ("steps",), ("access",), ("leaks",), ("stalls",),
    ("pipeline",), ("check", "--max-peak", "1GiB"), ("plan", "allocator"), ("plan", "recompute"), ("plan", "auto"),
    ("plan", "offload"), ("plan", "spill", "--budget", "1MiB"), ("plan", "whatif", "--scale-batch", "2"),
)  # fmt: skip


@pytest.mark.parametrize("command", ON_ONE_TRACE, ids=" ".join)
def test_a_trace(command: tuple[str, ...], recorded_trace: Path) -> None:
    assert_readable(run(*command, recorded_trace).output)


@pytest.mark.parametrize("command", ["summary", "ranks", "diff"])
def test_several_traces(command: str, two_ranks: list[Path]) -> None:
    result = run(command, *two_ranks)
    assert result.exit_code == 0, result.output
    assert_readable(result.output)


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_help(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0 and "--quiet" in result.output and "--verbose" in result.output
    assert_readable(result.output)
    if command not in (("plan",), ("doctor",)):
        assert "Example" in result.output, "the help has no example"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("summry", "x"), "Did you mean summary?"),
        (("summary", "x", "--jso"), "Did you mean '--json'?"),
        (("plan", "alocator", "x"), "Did you mean allocator?"),
        (("summary", "missing-" * 14), "does not exist"),
        (("check", "x", "--max-peak", "20"), "add a unit"),
        (("report", "x", "-o", "no/such/folder/x.html"), "does not exist"),
    ],
)
def test_errors(arguments: tuple[str, ...], message: str) -> None:
    result = run_memtrace(*arguments, columns=COLUMNS)
    assert result.returncode == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split())


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_errors_in_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with pytest.raises(SystemExit):
        main(["report", "x", "-o", "a/folder/that/is/not/there/x.html"])
    lines = stderr.getvalue().splitlines()
    assert len(lines) > 1 and all(len(line) <= COLUMNS for line in lines)
    assert "Create it, or pass another path with -o." in " ".join(lines)
