"""What ``make test-compat`` runs exists."""

from __future__ import annotations

from tests.compatibility.__main__ import QUICK_TESTS, ROOT


def test_the_tests_of_a_combination_exist() -> None:
    files = [name for name in QUICK_TESTS if name.startswith("tests/")]
    assert files and all((ROOT / name).is_file() for name in files)
