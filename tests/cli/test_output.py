"""What reaches the terminal, CSV files and pipes: printable characters, and nothing that another program interprets."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import pytest
from memtrace.cli import INTERNAL_ERROR, main
from memtrace.cli.output import escape, site_with_modules
from memtrace.cli.safe_console import SafeConsole
from memtrace.cli.tabular import print_csv

from tests.cli.runner import run_memtrace

HOSTILE = "a\x1b[31m\x9b2J\u202e\x07\r[bold]b"


def test_no_text_that_is_printed_has_control_characters() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, width=80, force_terminal=False)
    console.print(HOSTILE, markup=False)
    console.print(f"first\n{escape(HOSTILE)}")
    assert out.getvalue() == "\n".join(
        ["a\ufffd[31m\ufffd2J\ufffd\ufffd\ufffd[bold]b", "first", "a\ufffd[31m\ufffd2J\ufffd\ufffd\ufffd[bold]b", ""]
    )


def test_a_name_is_printed_on_one_line() -> None:
    assert escape("a\nb") == "a\ufffdb"


def test_csv_has_neither_control_characters_nor_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    print_csv(("site", "bytes"), [{"site": HOSTILE, "bytes": -5}, {"site": "=HYPERLINK(1)", "bytes": 0}])
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows == [["site", "bytes"], ["a\ufffd[31m\ufffd2J\ufffd\ufffd\ufffd[bold]b", "-5"], ["'=HYPERLINK(1)", "0"]]


def test_a_site_is_followed_by_the_largest_of_its_modules() -> None:
    assert site_with_modules("train.py:3 f", ("net.*.mlp", "net.head")) == "train.py:3 f [net.*.mlp +1]"
    assert site_with_modules("train.py:3 f", ()) == "train.py:3 f"


def test_an_unexpected_exception_becomes_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recorded_trace: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret\x1b[31m")

    monkeypatch.setattr("memtrace.trace.load", fail)
    monkeypatch.delenv("MEMTRACE_DEBUG", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["summary", str(recorded_trace)])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError in test_output.py" in line and INTERNAL_ERROR in line and "MEMTRACE_DEBUG=1" in line
    monkeypatch.setenv("MEMTRACE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["summary", str(recorded_trace)])


def test_the_name_of_a_folder_is_printed_without_escape_sequences(recorded_trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run\x1b[31m.memtrace"
    shutil.copytree(recorded_trace, folder)
    result = run_memtrace("summary", folder)
    assert result.returncode == 0 and "\x1b" not in result.stdout and "run\ufffd[31m.memtrace" in result.stdout
    (folder / "rank=0" / "manifest.json").unlink()
    result = run_memtrace("summary", folder)
    assert result.returncode == 2 and "\x1b" not in result.stderr
