"""Build ids are those that binutils reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.native_build.build_id import read_build_id
from memtrace.native_build.compilers import find_compilers

LIBRARIES = sorted((Path(torch.__file__).parent / "lib").glob("*.so*"))


def build_id_by_readelf(path: Path) -> str | None:
    output = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Build ID: ([0-9a-f]+)", output)
    return found[1] if found else None


@pytest.mark.skipif(shutil.which("readelf") is None, reason="binutils is not installed")
def test_build_ids_are_those_of_readelf() -> None:
    paths = [*LIBRARIES, Path(sys.executable).resolve(), Path(torch._C.__file__)]
    expected = {path: build_id_by_readelf(path) for path in paths}
    assert {path: read_build_id(path) for path in paths} == expected
    assert any(expected.values())


def test_a_library_without_a_build_id_and_another_file_have_none(tmp_path: Path) -> None:
    source, library, compiler = tmp_path / "empty.cpp", tmp_path / "libempty.so", find_compilers()[0]
    source.write_text("int empty;\n")
    subprocess.run([*compiler.command, "-shared", "-Wl,--build-id=none", "-o", library, source], check=True)
    assert read_build_id(library) is None
    assert read_build_id(source) is None
    source.write_text("")
    assert read_build_id(source) is None


@pytest.mark.parametrize("start", [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_table_outside_the_file_gives_none(start: int, tmp_path: Path) -> None:
    damaged = tmp_path / "libdamaged.so"
    header = bytearray((Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()[:64])
    header[32:40] = start.to_bytes(8, "little")
    damaged.write_bytes(header)
    assert read_build_id(damaged) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_a_damaged_library_has_any_build_id_or_none(data: st.DataObject, tmp_path: Path) -> None:
    with (Path(torch.__file__).parent / "lib" / "libc10.so").open("rb") as file:
        content = bytearray(file.read(4096))
    content = content[: data.draw(st.integers(0, len(content)))]
    for place in data.draw(st.lists(st.integers(0, max(len(content) - 1, 0)), max_size=8)):
        if content:
            content[place] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "libdamaged.so"
    damaged.write_bytes(content)
    assert isinstance(read_build_id(damaged), str | None)
