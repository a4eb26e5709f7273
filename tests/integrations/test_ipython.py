"""The cell magic, in a real shell of IPython."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memtrace
from memtrace.analysis import find_peak

CELL = """import torch
weight = torch.zeros(1 << 18, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(5):
    (weight * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
7"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shell of IPython that has loaded the extension."""
    pytest.importorskip("IPython", reason="IPython is not installed")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    shell.run_line_magic("load_ext", "memtrace")
    yield shell
    # Functions that IPython calls at exit keep the shell, which must not keep what the cells made.
    shell.reset()
    shell.restore_sys_module_state()  # else the emptied module stays __main__, and no process can be spawned
    InteractiveShell.clear_instance()


def test_a_cell_shows_its_peak_and_runs_in_the_namespace_of_the_user(
    shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = shell.run_cell(f"%%memtrace\n{CELL}")
    assert result.error_in_exec is None
    assert result.result == 7
    assert shell.user_ns["weight"].shape == (1 << 18,)
    output = capsys.readouterr().out
    assert "cpu: Peak" in output
    assert "parameters" in output
    assert "optimizer.step()" not in output
    assert "5 steps; growth per step:" in output
    assert not list(tmp_path.glob("*.memtrace"))


def test_a_cell_computes_bitwise_the_same(shell: Any) -> None:
    results = []
    for magic in ("", "%%memtrace -q\n"):
        shell.run_cell(f"{magic}import torch\ntorch.manual_seed(3)\n{CELL}\nresult = weight.detach().clone()")
        results.append(shell.user_ns["result"])
    assert results[0].equal(results[1])


def test_the_trace_is_kept_in_a_variable_and_a_folder_on_request(
    shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell(f"%%memtrace --trace trace -q\n{CELL}")
    assert "Peak" not in capsys.readouterr().out
    assert find_peak(shell.user_ns["trace"], "cpu").requested.bytes >= 4 << 18
    shell.run_cell(f"%%memtrace -o run.memtrace --no-accesses\n{CELL};")
    assert not memtrace.load(tmp_path / "run.memtrace").manifest.options.accesses
    assert "memtrace report" in capsys.readouterr().out


def test_an_error_of_the_cell_is_shown_once_and_its_peak_too(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = shell.run_cell("%%memtrace\nimport torch\nkept = torch.ones(1 << 18)\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    output = capsys.readouterr().out
    assert output.count("ZeroDivisionError: ") == 1
    assert "1.00 MiB" in output
    assert "_record_cell" not in output


def test_lines_of_cells_have_the_numbers_that_the_notebook_shows(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import torch\ndef make():\n    return torch.ones(1 << 18)"
    shell.run_cell(source, store_history=True)
    shell.run_cell("%%memtrace\n\nkept = make()\nother = torch.ones(1 << 20)", store_history=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if "4.00 MiB" in line and "In[" in line] == [["%", "In[2]:4"]]
    assert [line.split()[-2:] for line in lines if "1.00 MiB" in line and "In[" in line] == [["In[1]:3", "make"]]


def test_a_cell_with_an_assignment_or_nothing_has_no_result(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell("%%memtrace\nx = 1").result is None
    assert shell.run_cell("%%memtrace\nx;").result is None
    assert shell.run_cell("%%memtrace\n# nothing").success
    assert "The cell allocated no memory in PyTorch." in capsys.readouterr().out
