"""Processes that the null device ends, or that crash on it, say why or where."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import case_server
from tests.cuda.case import Case
from tests.cuda.settings import on_null_device

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not on_null_device(), reason="the null device reports crashes")]
HEADER = "nullcuda: SIGSEGV in thread"
FREED_MEMORY = """
import ctypes
runtime = ctypes.CDLL(RUNTIME)
device, host = ctypes.c_void_p(), ctypes.create_string_buffer(16)
assert runtime.cudaMalloc(ctypes.byref(device), 16) == runtime.cudaFree(device) == 0
runtime.cudaMemcpy(device, host, 16, 1)
"""
INVALID_FUNCTION = """
import ctypes
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
numbers = (ctypes.c_int * 2)(2, 1)
ctypes.CDLL(None).qsort(numbers, 2, 4, CALLBACK(16))
"""
"""Passes a pointer to no function: the unwinder cannot read the code of the innermost function."""


NO_HOST_MEMORY = """
import ctypes, resource
runtime, device = ctypes.CDLL(RUNTIME), ctypes.c_void_p()
assert runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(1 << 20)) == 0
resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))
runtime.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(1 << 30))
"""


def crash(program: str) -> tuple[str, list[str]]:
    """Run a program that crashes; return what it printed before the report, and the lines of the report."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == -signal.SIGSEGV, result.stderr
    before, header, report = result.stderr.partition(HEADER)
    assert header and HEADER not in report, result.stderr
    return before, report.splitlines()


def with_runtime(program: str) -> str:
    """Return a program that loads the runtime of the null device."""
    (runtime,) = Path(os.environ["NULLCUDA_LIB"]).glob("libcudart.so.*")
    return program.replace("RUNTIME", repr(str(runtime.resolve())))


@pytest.fixture
def freed_memory() -> str:
    """A program that has the null device write to freed memory."""
    return with_runtime(FREED_MEMORY)


def test_a_crash_prints_the_native_call_stack(freed_memory: str) -> None:
    before, (header, *functions) = crash(freed_memory)
    assert before == "" and "at address 0x7c" in header  # where the null device has its addresses
    assert any("(cudaMemcpy+0x" in line for line in functions), functions
    assert any("(_start+0x" in line for line in functions[-2:]), functions


def test_the_report_follows_that_of_faulthandler(freed_memory: str) -> None:
    before, functions = crash("import faulthandler; faulthandler.enable()" + freed_memory)
    assert 'File "<string>", line 6 in <module>' in before
    assert any("(cudaMemcpy+0x" in line for line in functions), functions


@pytest.mark.parametrize("faulthandler", ["", "import faulthandler; faulthandler.enable()"])
def test_the_caller_of_an_invalid_function_is_reported(faulthandler: str) -> None:
    _, functions = crash(faulthandler + INVALID_FUNCTION)
    assert any("(qsort_r+0x" in line for line in functions), functions


def test_a_crash_with_redirected_standard_error_is_reported_where_it_was(tmp_path: Path, freed_memory: str) -> None:
    redirect = f"import os; os.dup2(os.open({str(tmp_path / 'stderr.txt')!r}, os.O_CREAT | os.O_WRONLY), 2)"
    _, functions = crash(redirect + freed_memory)
    assert any("(cudaMemcpy+0x" in line for line in functions), functions
    assert (tmp_path / "stderr.txt").read_text().startswith(HEADER)


def test_the_error_of_a_case_quotes_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_server, "run_case", lambda _: ctypes.string_at(1))
    answer = json.loads(case_server._run_in_child(Case("sizes", "default", str(tmp_path / "run.memtrace"))))
    assert "ended by SIGSEGV" in answer["error"]
    assert "(_start+0x" in answer["error"].partition(HEADER)[2]


def test_a_host_without_memory_ends_the_process_with_the_reason() -> None:
    command = [sys.executable, "-c", with_runtime(NO_HOST_MEMORY)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == -signal.SIGABRT
    assert "nullcuda: the host has no memory or mappings left (mprotect: Cannot allocate memory)" in result.stderr
