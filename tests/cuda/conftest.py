from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.case_server import CaseServer


@pytest.fixture(scope="session")
def cases() -> Iterator[CaseServer]:
    """The process that runs the cases."""
    with CaseServer() as server:
        yield server
