"""A snapshot gives the same tables in every file format."""

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

import pytest

from memtrace import readers
from memtrace.errors import TraceError
from memtrace.readers.rank import ReadRank
from tests.readers.snapshot_maker import SnapshotMaker, frame, random_history

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


FILE_FORMATS: dict[str, Callable[[Any], bytes]] = {
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


def read(path: Path, data: bytes) -> ReadRank:
    path.write_bytes(data)
    (rank,) = readers.read(path)
    return rank


@pytest.fixture(scope="module")
def value() -> dict[str, Any]:
    return random_history(5, 300).snapshot()


@pytest.mark.parametrize("file_format", FILE_FORMATS)
def test_every_file_format_gives_the_same_tables(tmp_path: Path, value: dict[str, Any], file_format: str) -> None:
    # The content of a file decides its format, not its name.
    expected = read(tmp_path / "trace.json", FILE_FORMATS["protocol 4"](value))
    rank = read(tmp_path / "trace.json", FILE_FORMATS[file_format](value))
    assert rank.manifest == expected.manifest
    for name, table in expected.tables.items():
        assert rank.tables[name].equals(table), name


def test_a_page_of_the_installed_torch_is_read(tmp_path: Path, value: dict[str, Any]) -> None:
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
    (expected,) = readers.read(tmp_path / "a")
    (rank,) = readers.read(tmp_path / "b")
    assert rank.tables["events"].equals(expected.tables["events"])


def test_the_list_of_memory_snapshot_becomes_baseline_blocks(tmp_path: Path, value: dict[str, Any]) -> None:
    rank = read(tmp_path / "a", pickle.dumps(value["segments"]))
    events = rank.tables["events"]
    assert set(events["kind"].to_pylist()) == {"baseline"}
    assert sum(events["size"].to_pylist()) == sum(segment["requested_size"] for segment in value["segments"])
    assert any("no history" in note for note in rank.manifest.coverage.notes)


def test_an_empty_snapshot_gives_a_trace_without_events(tmp_path: Path) -> None:
    rank = read(tmp_path / "a", pickle.dumps({"segments": [], "device_traces": [[], []]}))
    assert all(table.num_rows == 0 for table in rank.tables.values())
    assert any("no history" in note for note in rank.manifest.coverage.notes)


def test_shared_and_copied_frames_give_the_same_stacks(tmp_path: Path) -> None:
    """A pickle shares lists of frames, newer pickles share only the frames, and JSON shares neither."""
    maker = SnapshotMaker()
    stack = [frame("train.py", 3, "step"), frame("main.py", 1, "<module>")]
    for _ in range(3):
        maker.alloc(100, stack)
    shared = maker.snapshot()
    copied = json.loads(json.dumps(shared))
    lists = {
        **shared,
        "device_traces": [[{**entry, "frames": list(entry["frames"])} for entry in shared["device_traces"][0]]],
    }
    expected = read(tmp_path / "a", pickle.dumps(shared)).tables
    assert expected["ops"].num_rows == 1
    for value in (copied, lists):
        tables = read(tmp_path / "b", pickle.dumps(value)).tables
        assert tables["ops"].equals(expected["ops"]) and tables["names"].equals(expected["names"])


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, "text", 7, None, {"segments": 5}, {"segments": [[]]}])
def test_other_pickles_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TraceError, match="not a valid CUDA memory snapshot"):
        read(tmp_path / "a", pickle.dumps(value))
