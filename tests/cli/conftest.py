from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import run_memtrace

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
"""Trains three steps; the first argument is its exit code."""


@pytest.fixture(scope="session")
def recorded_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of ``SCRIPT``, recorded from the command line."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.py").write_text(SCRIPT)
    result = run_memtrace("record", "-o", folder / "run.memtrace", folder / "train.py", "0", "--flag")
    assert result.returncode == 0, result.stderr
    assert "arguments ['0', '--flag'] __main__" in result.stdout
    return folder / "run.memtrace"
