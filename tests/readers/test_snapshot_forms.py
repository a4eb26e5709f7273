"""One snapshot in every form it comes in gives the same tables."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from memtrace import readers
from memtrace.errors import TraceError
from tests.readers.making import Maker, frame, random_life

PAGE = """
<!DOCTYPE html>
<html>
<head>
</head>
<body>
<script type="module">
import {add_local_files} from "https://cdn.jsdelivr.net/gh/pytorch/pytorch@main/torch/utils/viz/MemoryViz.js"
const local_files = [{"name": "snapshot.pickle", "base64": "%s"}]
add_local_files(local_files, "Active Memory Timeline")
</script>
</body>
"""


def _page(value: Any) -> bytes:
    pickled = pickle.dumps(value)
    pickled += b"\x00" * (3 - len(pickled) % 3)
    return (PAGE % base64.b64encode(pickled).decode()).encode()


FORMS: dict[str, Callable[[Any], bytes]] = {
    **{f"protocol {number}": lambda value, number=number: pickle.dumps(value, protocol=number) for number in (2, 3, 4, 5)},
    "gzip": lambda value: gzip.compress(pickle.dumps(value, protocol=4)),
    "gzip of two members": lambda value: b"".join(gzip.compress(half) for half in _halves(pickle.dumps(value, protocol=4))),
    "JSON": lambda value: json.dumps(value).encode(),
    "JSON, indented, with a byte order mark": lambda value: b"\xef\xbb\xbf\n " + json.dumps(value, indent=2).encode(),
    "JSON, gzip": lambda value: gzip.compress(json.dumps(value).encode()),
    "memory_viz page": _page,
    "memory_viz page, gzip": lambda value: gzip.compress(_page(value)),
}  # fmt: skip


def _halves(data: bytes) -> tuple[bytes, bytes]:
    return data[: len(data) // 2], data[len(data) // 2 :]


def read(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    path.write_bytes(data)
    (rank,) = readers.read(path)
    return rank


@pytest.fixture(scope="module")
def value() -> dict[str, Any]:
    return random_life(5, 300).snapshot()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_the_same(tmp_path: Path, value: dict[str, Any], form: str) -> None:
    # The name tells nothing: what a file holds does.
    want_manifest, want = read(tmp_path / "trace.json", FORMS["protocol 4"](value))
    manifest, tables = read(tmp_path / "trace.json", FORMS[form](value))
    assert manifest == want_manifest
    for name in want:
        assert tables[name].equals(want[name]), name


def test_a_real_page_of_this_torch(tmp_path: Path, value: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    (tmp_path / "a").write_bytes(pickle.dumps(value))
    command = [
        sys.executable,
        "-m",
        "torch.cuda._memory_viz",
        "trace_plot",
        str(tmp_path / "a"),
        "-o",
        str(tmp_path / "b"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    ((_, want),) = readers.read(tmp_path / "a")
    ((_, tables),) = readers.read(tmp_path / "b")
    assert tables["events"].equals(want["events"])


def test_the_bare_list_of_memory_snapshot(tmp_path: Path, value: dict[str, Any]) -> None:
    manifest, tables = read(tmp_path / "a", pickle.dumps(value["segments"]))
    kinds = set(tables["events"]["kind"].to_pylist())
    assert kinds == {"baseline"}
    live = sum(segment["requested_size"] for segment in value["segments"])
    assert sum(tables["events"]["size"].to_pylist()) == live
    assert any("no history" in note for note in manifest.coverage.notes)


def test_an_empty_snapshot_is_a_trace_without_events(tmp_path: Path) -> None:
    manifest, tables = read(tmp_path / "a", pickle.dumps({"segments": [], "device_traces": [[], []]}))
    assert all(table.num_rows == 0 for table in tables.values())
    assert any("no history" in note for note in manifest.coverage.notes)


def test_shared_and_copied_frames_are_the_same_stacks(tmp_path: Path) -> None:
    """A pickle shares frame lists, newer ones share only the frames, JSON neither."""
    maker = Maker()
    stack = [frame("train.py", 3, "step"), frame("main.py", 1, "<module>")]
    for _ in range(3):
        maker.alloc(100, stack)
    shared = maker.snapshot()
    fresh = json.loads(json.dumps(shared))
    lists = {
        **shared,
        "device_traces": [[{**entry, "frames": list(entry["frames"])} for entry in shared["device_traces"][0]]],
    }
    _, want = read(tmp_path / "a", pickle.dumps(shared))
    assert want["ops"].num_rows == 1
    for value in (fresh, lists):
        _, tables = read(tmp_path / "b", pickle.dumps(value))
        assert tables["ops"].equals(want["ops"]) and tables["names"].equals(want["names"])


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, "text", 7, None, {"segments": 5}, {"segments": [[]]}])
def test_other_pickles_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TraceError, match="is no memory snapshot that torch wrote"):
        read(tmp_path / "a", pickle.dumps(value))
