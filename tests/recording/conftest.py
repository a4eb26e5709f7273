from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.recording.helpers import PROGRAMS, free_port


@pytest.fixture(scope="session")
def data_parallel_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of four ranks under torchrun with ``memtrace record``; rank 2 has by far the largest batch."""
    path = tmp_path_factory.mktemp("data_parallel") / "job.memtrace"
    torchrun = ["torch.distributed.run", "--nproc-per-node=4", f"--master-port={free_port()}"]
    record = ["-m", "memtrace.cli", "record", "-o", str(path), str(PROGRAMS / "ranks.py"), "data_parallel"]
    result = subprocess.run(
        [sys.executable, "-m", *torchrun, *record], capture_output=True, text=True, check=False, timeout=180
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return path
