"""Available memory: what /proc/meminfo reports, and what the limit of a container leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtrace import machine_memory

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def limit(machine: Path, limit: str) -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text("3000000000\n")
    (machine / "memory.stat").write_text("anon 2000000000\ninactive_file 500000000\n")


def test_caches_count_as_available(machine: Path) -> None:
    assert machine_memory.available_memory_bytes() == 8_000_000 * 1024


@pytest.mark.parametrize(
    ("limit_text", "available"),
    [("max", 8_000_000 * 1024), ("4000000000", 1_500_000_000), ("2000000000", 0), ("9" * 15, 8_000_000 * 1024)],
)
def test_a_container_has_at_most_what_its_limit_leaves(machine: Path, limit_text: str, available: int) -> None:
    limit(machine, limit_text)
    assert machine_memory.available_memory_bytes() == available


def test_a_system_that_reports_nothing_is_unknown(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").write_text("nothing")
    monkeypatch.setattr(machine_memory.os, "sysconf", lambda name: int("?"))
    assert machine_memory.available_memory_bytes() is None
