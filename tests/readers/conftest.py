from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real files; tests that need it are skipped where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no real files: {DATA} is absent")
    return DATA
