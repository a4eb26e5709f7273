"""The command line, run as a user runs it, on one recorded trace."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from memtrace.cli import COMMANDS, cli
from memtrace.cli.plan import PLANS

from tests.cli.conftest import SCRIPT
from tests.cli.runner import run_memtrace


def test_help_lists_every_command_without_importing_torch_or_pandas() -> None:
    result = run_memtrace("--help", columns=80)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert all(any(line.split()[:1] == [command] for line in lines) for command in COMMANDS)
    assert max(map(len, lines)) <= 80
    program = (
        "import sys; from memtrace.cli import cli; cli(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_the_one_line_help_of_a_command_is_an_imperative_sentence(command: str) -> None:
    text = COMMANDS[command][1]
    first_word = text.split()[0]
    assert first_word[0].isupper() and not first_word.endswith("s") and text.endswith(".")
    assert len(text) + len("  findings  ") <= 80


@pytest.mark.parametrize(
    "words", [*([name] for name in COMMANDS if name != "plan"), *(["plan", name] for name in PLANS)]
)
def test_the_help_of_a_command_has_an_example_of_it(words: list[str]) -> None:
    text = CliRunner().invoke(cli, [*words, "--help"], prog_name="memtrace", terminal_width=80).output
    examples = re.findall(r"^  Examples?:\n((?:    .+\n)+)", text, re.MULTILINE)
    assert len(examples) == 1, text
    assert f"    memtrace {' '.join(words)} " in f"{examples[0]} " or f"    memtrace {' '.join(words)}\n" in examples[0]
    assert max(map(len, examples[0].splitlines())) <= 80


def test_summary_shows_the_peak_and_its_allocation_sites_in_80_columns(recorded_trace: Path) -> None:
    result = run_memtrace("summary", recorded_trace, columns=80)
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "3 steps" in text
    assert "Peak by allocation site" in text and "/train.py:" in text
    assert re.search(r"Peak [\d.]+ [KM]iB at [\d.]+ m?s \(step \d, \w+\); [a-z ]+ holds? \d+ %", text)
    assert "\x1b[" not in result.stdout
    lines = result.stdout.splitlines()
    assert len(lines) <= 50
    # Only a path or a command to copy may be longer than the terminal.
    assert [line for line in lines if len(line) > 80 and not line.startswith((str(recorded_trace), "Next: "))] == []


def test_the_json_of_summary_has_the_fields_of_the_result(recorded_trace: Path) -> None:
    summary = json.loads(run_memtrace("summary", recorded_trace, "--json").stdout)
    assert summary["steps"]["num_steps"] == 3 and summary["rank"] == 0
    (device,) = summary["devices"]
    weights = 4 * (32 * 32 + 32)
    assert device["device"] == "cpu"
    assert device["peak"]["by_category"]["parameter"] == weights
    assert device["peak"]["by_category"]["gradient"] == weights
    assert device["peak"]["by_category"]["optimizer_state"] == 2 * weights + 8
    assert sum(device["peak"]["by_category"].values()) == device["peak"]["requested_bytes"]
    assert set(device["peak"]["top_sites"][0]) == {"name", "bytes", "num_blocks", "modules", "no_stack_reason"}


@pytest.mark.parametrize("code", ["3", "text"])
def test_record_keeps_the_exit_code_and_the_traceback_of_the_program(code: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_memtrace("record", "-o", tmp_path / "run.memtrace", tmp_path / "train.py", code)
    assert result.returncode == (3 if code == "3" else 1)
    if code == "text":
        assert "ValueError" in result.stderr
        assert "record.py" not in result.stderr
    assert run_memtrace("summary", tmp_path / "run.memtrace").returncode == 0


def test_record_runs_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text("import torch; torch.ones(1000); print('module ran')")
    result = run_memtrace("record", "-o", tmp_path / "run.memtrace", "-m", "package", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "module ran" in result.stdout


def test_record_runs_code_as_python_does(tmp_path: Path) -> None:
    code = (
        "import sys, torch\nclass Net(torch.nn.Linear): ...\nkept = torch.ones(100_000)\n"
        "print(sys.argv, __name__, Net.__module__)\nsys.exit(7)"
    )
    result = run_memtrace("record", "-o", tmp_path / "run.memtrace", "-c", code, "--flag")
    assert result.returncode == 7
    assert "['-c', '--flag'] __main__ __main__" in result.stdout
    assert "<string>:3 <module>" in run_memtrace("summary", tmp_path / "run.memtrace").stdout


def test_doctor_names_the_observer() -> None:
    result = json.loads(run_memtrace("doctor", "--json").stdout)
    assert result["environment"]["observer"] in ("native", "dispatch")
    assert result["environment"]["versions"]["torch"]


def _set_newer_version(rank: Path) -> None:
    manifest = json.loads((rank / "manifest.json").read_text())
    (rank / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))


def _truncate_part(rank: Path) -> None:
    part = next(rank.glob("events-*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])


def _drop_column(rank: Path) -> None:
    part = next(rank.glob("events-*.parquet"))
    pq.write_table(pq.read_table(part, partitioning=None).drop(["kind"]), part)


def _delete_part(rank: Path) -> None:
    next(rank.glob("events-*.parquet")).unlink()


def _cut_manifest(rank: Path) -> None:
    (rank / "manifest.json").write_text("{")


def _empty_manifest(rank: Path) -> None:
    (rank / "manifest.json").write_text("{}")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "format version 99": _set_newer_version,
    "is damaged": _truncate_part,
    "lacks the column kind": _drop_column,
    "is missing": _delete_part,
    "cannot be read": _cut_manifest,
    "is not the manifest of a memtrace trace": _empty_manifest,
}
"""Part of the error message, and the damage that causes it."""


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_trace_is_an_error_message_and_exit_code_2(
    message: str, recorded_trace: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.memtrace"
    shutil.copytree(recorded_trace, copy)
    DAMAGE[message](copy / "rank=0")
    result = run_memtrace("summary", copy)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("summary", "/nowhere"), "/nowhere"),
        (("report", "/nowhere"), "/nowhere"),
        (("record", "/nowhere.py"), "/nowhere.py"),
        (("summary", "--nope", "x"), "No such option '--nope'"),
        (("sumary", "x"), "No such command 'sumary'. Did you mean summary?"),
        (("plan", "alocator"), "Did you mean allocator?"),
        (("record", "-m", "-c", "x"), "-m and -c exclude each other"),
        (("check", "x", "--max-peak", "20"), "add a unit, such as 20GiB"),
        (("summary",), "Missing argument 'TRACE...'"),
        (("summary", "x", "--from-step", "5", "--to-step", "2"), "--from-step 5 is greater than --to-step 2"),
        (("leaks", "x", "--capacity", "many"), "invalid size 'many'"),
        (("leaks", "x", "--capacity", "0"), "it must be positive"),
    ],
)
def test_wrong_arguments_are_an_error_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run_memtrace(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_page_in_a_folder_that_does_not_exist_is_an_error_message_and_exit_code_2(
    recorded_trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "missing"):
        result = run_memtrace("report", recorded_trace, "-o", folder / "report.html")
        assert result.returncode == 2
        assert f"the folder {folder} does not exist" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "missing").exists()


def test_a_page_has_source_lines_unless_they_are_left_out(recorded_trace: Path, tmp_path: Path) -> None:
    pages = []
    for options in ((), ("--no-source",)):
        result = run_memtrace("report", recorded_trace, "-o", tmp_path / "page.html", *options)
        assert result.returncode == 0, result.stderr
        pages.append("The page contains source lines of" in (tmp_path / "page.html").read_text(encoding="utf-8"))
    assert pages == [True, False]
    result = run_memtrace("report", recorded_trace, "--source-root", tmp_path / "missing")
    assert result.returncode == 2 and "does not exist" in result.stderr


def test_files_and_folders_that_are_not_traces_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    for path, message in ((tmp_path, "is not a memtrace trace"), (tmp_path / "file", "unrecognised file format")):
        result = run_memtrace("summary", path)
        assert result.returncode == 2
        assert str(path) in result.stderr and message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    ["steps", "access", "leaks", "findings", "stalls", "plan allocator", "check --max-peak 1GiB", "summary", "ranks"],
)
def test_several_traces_are_the_ranks_of_one_job(command: str, recorded_trace: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "rank1.memtrace", tmp_path / "rank0.memtrace"]
    for path in paths:
        path.symlink_to(recorded_trace)
    result = run_memtrace(*command.split(), *paths, "--json")
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    if command == "summary":
        assert [rank["rank"] for rank in output["ranks"]] == [0, 1]
    elif command == "ranks":
        assert len(output["ranks"]) == 2
    elif command.startswith("check"):
        assert [limit["rank"] for limit in output["limits"]] == [0, 1]
    else:
        assert "rank 0 of 2" in result.stderr
        second = run_memtrace(*command.split(), *paths, "--rank", "1")
        assert second.returncode == 0 and "rank 0 of 2" not in second.stderr


def test_summary_of_a_job_shows_every_rank_and_the_one_with_the_highest_peak(
    recorded_trace: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / "rank0.memtrace", tmp_path / "rank1.memtrace"]
    for path in paths:
        path.symlink_to(recorded_trace)
    result = run_memtrace("summary", *paths)
    assert result.returncode == 0, result.stderr
    assert "Rank 0 has the highest peak" in result.stdout
