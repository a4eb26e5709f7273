from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings

from memtrace.analysis import rank_reports
from memtrace.analysis.rank_summary import RankReport, report_rank
from memtrace.trace import Trace

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
# A shell that starts the tests in the background has them ignore interrupts, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# CI repeats the same examples, so that a change is judged by what it changes; elsewhere every run tries new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real files; tests that need it are skipped where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no real files: {DATA} is absent")
    return DATA


@pytest.fixture(scope="session")
def gpt_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of examples/gpt.py, recorded in a process of its own."""
    path = tmp_path_factory.mktemp("gpt") / "run.memtrace"
    program = Path(__file__).parents[1] / "examples" / "gpt.py"
    subprocess.run([sys.executable, program, "--steps", "8", "--record", path], check=True, capture_output=True)
    return path


@pytest.fixture
def ranks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of which events were read."""
    ranks: list[int] = []

    def report(trace: Trace) -> RankReport:
        ranks.extend(trace.ranks)
        return report_rank(trace)

    monkeypatch.setattr(rank_reports, "report_rank", report)
    return ranks


class DefectTraces(NamedTuple):
    """Paths of two recordings of examples/defects.py."""

    defects: Path
    fixed: Path


@pytest.fixture(scope="session")
def defect_traces(tmp_path_factory: pytest.TempPathFactory) -> DefectTraces:
    """Traces of examples/defects.py with its defects, and with all of them fixed."""
    from defects import train

    folder = tmp_path_factory.mktemp("defects")
    traces = DefectTraces(folder / "defects.memtrace", folder / "fixed.memtrace")
    train(traces.defects, fixed=False)
    train(traces.fixed, fixed=True)
    return traces


LONG_FILES = (
    "recording/test_kinds_of_programs.py",
    "pipeline/test_recorded_jobs.py",
    "planning/test_whatif.py",
    "analysis/test_findings_precision.py",
    "campaigns/test_campaign.py",
    "recording/test_faults.py",
    "readers/test_fuzz.py",
)
"""Files that take longest, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A process that began a long file last would leave the other processes without work.
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


@pytest.fixture(autouse=True)
def nothing_left_hooked() -> Iterator[None]:
    """Every test must leave torch as it found it."""
    from torch.optim import optimizer

    instrumented: tuple[Any, ...] = (
        torch.nn.Module._wrapped_call_impl,
        torch.nn.Module.__init__,
        torch.nn.Module.__setstate__,
        torch.autograd.graph._engine_run_backward,
        torch.nn.utils.stateless._functional_call,
    )

    def hooks() -> tuple[object, ...]:
        return (
            torch.nn.Module.__call__,
            *(function.__code__ for function in instrumented),
            dict(optimizer._global_optimizer_pre_hooks),
            dict(optimizer._global_optimizer_post_hooks),
            torch._C._len_torch_dispatch_stack(),
            [finder for finder in sys.meta_path if type(finder).__module__.startswith("memtrace")],
        )

    before = hooks()
    yield
    assert hooks() == before
    if "memtrace_native" in sys.modules:
        status = sys.modules["memtrace_native"].status()
        assert not status["active"]
        assert not status["thread_enabled"]


@pytest.fixture(scope="session", autouse=True)
def frozen_imports() -> None:
    """Keep what torch and pandas have created out of every collection: each would take a twentieth of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Free what earlier tests left before fixtures of a module record: it would be live until it is collected."""
    gc.collect()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    # torch.profiler does not see what the helper threads of an operator allocate; we do.
    torch.set_num_threads(1)
    gc.collect()


@pytest.fixture(scope="session")
def program_traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Traces of the programs in ``tests/programs/training.py``, by the name of the program."""
    from tests.programs.training import PROGRAMS, recorded

    folder = tmp_path_factory.mktemp("programs")
    return {
        program.name: recorded(program.run, folder / f"{number}.memtrace") for number, program in enumerate(PROGRAMS)
    }
