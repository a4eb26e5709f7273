"""Loading a compiled module from bytes, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from memtrace.native_build import compilers
from memtrace.native_build.loading import load_library

SOURCE = """#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_small() { return PyModule_Create(&definition); }
"""
LOAD = """
import os, sys
from pathlib import Path
from memtrace.native_build.loading import load_extension
exec(sys.argv[2])
descriptors = len(os.listdir("/proc/self/fd"))
try:
    print(load_extension("small", Path(sys.argv[1]).read_bytes()).answer())
except ImportError as error:
    print("ImportError:", error)
assert len(os.listdir("/proc/self/fd")) == descriptors
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not compilers.find_compilers():
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "small.cpp").write_text(SOURCE)
    (compiler, *_) = compilers.find_compilers()
    flags = ["-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", "-o", "small.so"]
    subprocess.run([*compiler.command, *flags, "small.cpp"], check=True, cwd=folder)
    return folder / "small.so"


def load(path: Path, before: str = "", **environment: str) -> str:
    command = [sys.executable, "-c", LOAD, str(path), before]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


NO_MEMORY_FILES = "del os.memfd_create"
FORBIDDEN = "def f(*_): raise PermissionError(1, 'no')\nos.memfd_create = f"


def test_a_library_is_loaded_from_memory_without_a_file(library: Path) -> None:
    """So the cache may lie on a file system that forbids execution."""
    assert load(library, "import tempfile; del tempfile.TemporaryDirectory") == "42"


@pytest.mark.parametrize("before", [NO_MEMORY_FILES, FORBIDDEN])
def test_without_files_in_memory_a_temporary_file_is_loaded(library: Path, before: str, tmp_path: Path) -> None:
    assert load(library, before, TMPDIR=str(tmp_path)) == "42"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no module", b"\x7fELF"])
def test_what_is_no_module_is_an_import_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    assert load(path).startswith("ImportError:")
    assert load(path, NO_MEMORY_FILES).startswith("ImportError:")


def test_each_library_has_a_path_of_its_own(tmp_path: Path) -> None:
    """A descriptor is used again, but the loader knows a library that is still loaded by its path."""
    if not compilers.find_compilers():
        pytest.skip("no C++ compiler")
    (compiler, *_) = compilers.find_compilers()
    contents = []
    for name in ("first", "second"):
        (tmp_path / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return {len(name)}; }}')
        flags = ["-shared", "-fPIC", "-o", f"{name}.so"]
        subprocess.run([*compiler.command, *flags, f"{name}.cpp"], check=True, cwd=tmp_path)
        contents.append((tmp_path / f"{name}.so").read_bytes())
    first, second = (load_library("small", content) for content in contents)
    assert (first.first(), second.second()) == (5, 6)
