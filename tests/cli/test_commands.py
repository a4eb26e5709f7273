"""The command line as its users meet it, over one recorded trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
print("arguments", sys.argv[1:], __name__)
sys.exit(int(sys.argv[1]))
"""


def memtrace(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from memtrace.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.py").write_text(SCRIPT)
    done = memtrace("record", "-o", folder / "run.memtrace", folder / "train.py", "0", "--flag")
    assert done.returncode == 0, done.stderr
    assert "arguments ['0', '--flag'] __main__" in done.stdout
    return folder / "run.memtrace"


def test_help_is_quick_and_lists_the_commands():
    done = memtrace("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("record", "summary", "report", "doctor"))
    program = (
        "import sys; from memtrace.cli import cli; cli(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_summary_says_the_peak_and_the_line(trace):
    done = memtrace("summary", trace)
    assert done.returncode == 0, done.stderr
    assert "3 steps" in done.stdout
    assert "peak" in done.stdout
    assert "train.py:" in done.stdout
    assert "\x1b[" not in done.stdout
    assert len(done.stdout.splitlines()) <= 50


def test_summary_json(trace):
    found = json.loads(memtrace("summary", trace, "--json").stdout)
    assert found["steps"]["count"] == 3
    device = found["devices"][0]
    weights = 4 * (32 * 32 + 32)
    assert device["device"] == "cpu"
    assert device["peak"]["by_category"]["parameter"] == weights
    assert device["peak"]["by_category"]["gradient"] == weights
    assert device["peak"]["by_category"]["optimizer_state"] == 2 * weights + 8
    assert sum(device["peak"]["by_category"].values()) == device["peak"]["requested_bytes"]


@pytest.mark.parametrize("code", ["3", "text"])
def test_record_keeps_the_exit_code_and_the_traceback_of_the_program(code, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = memtrace("record", "-o", tmp_path / "run.memtrace", tmp_path / "train.py", code)
    assert done.returncode == (3 if code == "3" else 1)
    if code == "text":
        assert "ValueError" in done.stderr
        assert "record.py" not in done.stderr
    assert memtrace("summary", tmp_path / "run.memtrace").returncode == 0


def test_record_runs_a_module(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text("import torch; torch.ones(1000); print('module ran')")
    done = memtrace("record", "-o", tmp_path / "run.memtrace", "-m", "package", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "module ran" in done.stdout


def test_doctor_names_the_observer():
    found = json.loads(memtrace("doctor", "--json").stdout)
    assert found["environment"]["observer"] in ("native", "dispatch")
    assert found["environment"]["versions"]["torch"]


def _rewritten(trace: Path, folder: Path, change) -> Path:
    import shutil

    copy = folder / "copy.memtrace"
    shutil.copytree(trace, copy)
    change(copy / "rank=0")
    return copy


def _newer(rank: Path) -> None:
    manifest = json.loads((rank / "manifest.json").read_text())
    (rank / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))


def _truncated(rank: Path) -> None:
    part = next(rank.glob("events-*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])


def _without_column(rank: Path) -> None:
    part = next(rank.glob("events-*.parquet"))
    pq.write_table(pq.read_table(part).drop(["kind"]), part)


DAMAGE = {
    "format version 99": _newer,
    "is damaged": _truncated,
    "lacks the column kind": _without_column,
    "is missing": lambda rank: next(rank.glob("events-*.parquet")).unlink(),
    "cannot be read": lambda rank: (rank / "manifest.json").write_text("{"),
    "is not the manifest of a memtrace trace": lambda rank: (rank / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("sentence", DAMAGE)
def test_damaged_traces_get_one_sentence_and_exit_code_2(sentence, trace, tmp_path):
    done = memtrace("summary", _rewritten(trace, tmp_path, DAMAGE[sentence]))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [("summary", "/nowhere"), ("report", "/nowhere"), ("record", "/nowhere.py"), ("summary", "--nope", "x")],
)
def test_what_is_not_there_is_exit_code_2(arguments):
    done = memtrace(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_not_a_trace_and_a_file(tmp_path):
    (tmp_path / "file").write_text("hello")
    for path, sentence in (
        (tmp_path, "is not a memtrace trace"),
        (tmp_path / "file", "unrecognised file format"),
    ):
        done = memtrace("summary", path)
        assert done.returncode == 2
        assert sentence in done.stderr


@pytest.mark.parametrize(
    "command",
    ["steps", "access", "leaks", "findings", "stalls", "plan allocator", "check --max-peak 1GiB", "summary", "ranks"],
)
def test_several_traces_are_the_ranks_of_a_job(command, trace, tmp_path):
    (tmp_path / "rank1.memtrace").symlink_to(trace)
    (tmp_path / "rank0.memtrace").symlink_to(trace)
    done = memtrace(*command.split(), tmp_path / "rank1.memtrace", tmp_path / "rank0.memtrace", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if command == "summary":
        assert [one["rank"] for one in told["ranks"]] == [0, 1]
    elif command == "ranks":
        assert len(told["ranks"]) == 2
    elif command.startswith("check"):
        assert [one["rank"] for one in told["limits"]] == [0, 1]
    else:
        assert "rank 0 of 2" in done.stderr
        second = memtrace(*command.split(), tmp_path / "rank1.memtrace", tmp_path / "rank0.memtrace", "--rank", "1")
        assert second.returncode == 0 and "rank 0 of 2" not in second.stderr
