"""A Dask cluster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from distributed import LocalCluster


@contextmanager
def local_cluster(num_workers: int = 2) -> Iterator[LocalCluster]:
    """Start a cluster of worker processes with one thread each; skip the test where Dask is not installed."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=num_workers, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        yield cluster
