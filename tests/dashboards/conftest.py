from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboards.browser import launched_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium for the tests of one file."""
    with launched_browser() as running:
        yield running
