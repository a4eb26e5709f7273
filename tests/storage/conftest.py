from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch

import memtrace
from memtrace.analysis.rank_reports import REPORT_NAME
from memtrace.format.manifest import write_manifest
from memtrace.format.part_reader import RankFolder
from memtrace.format.schema import TABLES
from memtrace.format.split import write_parts
from memtrace.format.storage import StoragePath
from tests.storage.faulty_proxy import Fault, FaultyProxy

BUCKET = "traces"


class TrainingResult(NamedTuple):
    """What a training leaves behind."""

    losses: list[float]
    random_state: object


def train(num_steps: int = 6) -> TrainingResult:
    """Train a small model, and draw from Python's random numbers as an augmentation would."""
    torch.manual_seed(0)
    random.seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(num_steps):
        loss = (model(torch.randn(16, 32)) * random.random()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return TrainingResult(losses, random.getstate())


@pytest.fixture(scope="session")
def unrecorded() -> TrainingResult:
    """What the training leaves behind without a recording."""
    return train()


@pytest.fixture(scope="session")
def local_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace on disk that has four parts."""
    recorded, path = (tmp_path_factory.mktemp("storage") / name for name in ("recorded.memtrace", "run.memtrace"))
    with memtrace.record(recorded):
        train()
    source = RankFolder(recorded / "rank=0")
    tables = {
        name: pa.concat_tables([*source.read(name, tuple(column.name for column in columns))])
        for name, columns in TABLES.items()
        if name != "live" and source.num_rows(name)
    }
    folder = path / "rank=0"
    folder.mkdir(parents=True)
    num_events = tables["events"].num_rows
    parts = write_parts(tables, folder, [num_events * part // 4 for part in range(4)])
    write_manifest(folder, replace(source.manifest, parts=parts))
    return path


@pytest.fixture
def memory() -> Iterator[StoragePath]:
    """The URL of an empty storage in the memory of this process."""
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield StoragePath("memory://bucket")
    filesystem.store.clear()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    """The address of an S3 server in this process."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture(scope="session")
def s3_proxy(s3_server: tuple[str, int]) -> Iterator[tuple[FaultyProxy, Any]]:
    """A proxy before the S3 server, and a file system that goes to the server directly."""
    import s3fs

    proxy = FaultyProxy(s3_server)
    server = f"http://{s3_server[0]}:{s3_server[1]}"
    direct = s3fs.S3FileSystem(key="testing", secret="testing", endpoint_url=server, use_listings_cache=False)
    direct.mkdir(BUCKET)
    yield proxy, direct
    proxy.close()


@pytest.fixture
def proxy(s3_proxy: tuple[FaultyProxy, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The proxy, which all access to S3 goes through; the bucket ``traces`` is empty."""
    proxy, direct = s3_proxy
    settings = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": proxy.address,
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for key in direct.find(BUCKET):
        direct.rm_file(key)
    yield proxy
    proxy.default = Fault("none")
    proxy.inject(())


@pytest.fixture
def s3(proxy: FaultyProxy) -> StoragePath:
    """The URL of an empty bucket."""
    return StoragePath(f"s3://{BUCKET}")


@pytest.fixture
def wrong_credentials(s3: StoragePath, monkeypatch: pytest.MonkeyPatch) -> StoragePath:
    """The URL of a bucket whose server checks the credentials, and refuses those of the environment."""
    from moto import settings
    from moto.core.authorization import ActionAuthenticatorMixin

    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    monkeypatch.setattr(ActionAuthenticatorMixin, "request_count", 0)
    return s3


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Return when a condition holds; fail if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files that a recording wrote into its trace on disk, by their names in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.name != REPORT_NAME
    }


def remote_contents(url: StoragePath) -> dict[str, bytes]:
    """Return all files below a URL, by their names relative to it."""
    filesystem, root = url.open_filesystem()
    filesystem.invalidate_cache()
    paths = filesystem.find(root)
    return {path.removeprefix(root.rstrip("/") + "/"): filesystem.cat_file(path) for path in paths}
