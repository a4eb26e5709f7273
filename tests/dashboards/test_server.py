"""The server of ``memtrace serve``: who may ask, what it answers, and that windows are those of the analysis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.dashboards.server import pages, payloads, served
from memtrace.dashboards.server.access import is_own_host
from memtrace.dashboards.server.app import create_app
from memtrace.dashboards.server.index_cache import load_index, save_index
from memtrace.dashboards.server.payloads import build_window_payload
from memtrace.dashboards.server.served import ServedTrace
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from memtrace.analysis import indexed_trace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.indexed_trace import IndexedTrace
from memtrace.analysis.part_summary import summarize_part
from memtrace.analysis.peak import live_after, requested_bytes
from memtrace.analysis.trace_index import TraceIndex
from memtrace.format.manifest import read_manifest, write_manifest
from memtrace.format.schema import EVENT_KINDS
from memtrace.trace import Trace, load
from tests.dashboards.unpacking import unpack_columns
from tests.format.random_traces import RandomTrace, on_disk

TOKEN = "secret-token"
HEAD_KINDS = [EVENT_KINDS.index("live")]
WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def cache_in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def write_trace(folder: Path) -> Path:
    """Write a trace of several parts."""
    rows = RandomTrace(5, num_steps=6).rows
    on_disk(rows, folder / "run.memtrace", list(range(0, len(rows["events"]), 40)))
    return folder / "run.memtrace"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace that a test can change."""
    return write_trace(tmp_path)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ASGIApp]:
    trace = ServedTrace([str(write_trace(tmp_path_factory.mktemp("served")))])
    trace.start()
    assert trace.is_indexed.wait(WAIT_SECONDS)
    yield create_app(trace, token=TOKEN, host="127.0.0.1")
    trace.stop()


@pytest.fixture
def client(app: ASGIApp) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1:8000")


def authorized(client: TestClient) -> TestClient:
    client.headers["authorization"] = f"Bearer {TOKEN}"
    return client


# Access.


@pytest.mark.parametrize("path", ["/", "/range", "/api/payload", "/api/status", "/nothing"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "\u00e9"])
def test_nothing_is_answered_without_the_token(client: TestClient, path: str, token: str | None) -> None:
    answer = client.get(path, params={} if token is None else {"token": token}, follow_redirects=False)
    assert answer.status_code == 403
    assert "memtrace serve" in answer.text
    assert "set-cookie" not in answer.headers


def test_the_token_moves_from_the_address_into_a_cookie(client: TestClient) -> None:
    answer = client.get("/", params={"token": TOKEN, "x": "1"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/?x=1")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/status").status_code == 200  # the client sends the cookie now
    assert TOKEN not in client.get("/").text


def test_answers_cannot_be_framed_cached_shared_or_request_elsewhere(client: TestClient) -> None:
    for answer in (authorized(client).get("/"), client.get("/api/status"), client.get("/nothing")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "",
                                  "127.0.0.1@evil.example", "evil.example#127.0.0.1", "192.168.0.7"])  # fmt: skip
def test_other_names_of_the_machine_are_refused(client: TestClient, host: str) -> None:
    assert authorized(client).get("/api/status", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:9", "[::1]:8000"])
def test_local_names_are_accepted_on_every_port(client: TestClient, host: str) -> None:
    assert authorized(client).get("/api/status", headers={"host": host}).status_code == 200


def test_a_server_on_all_addresses_accepts_addresses_but_no_foreign_names() -> None:
    assert is_own_host("192.168.0.7:8000", "0.0.0.0")
    assert is_own_host("[fe80::1]:8000", "::")
    assert is_own_host("10.1.2.3", "10.1.2.3")
    assert not is_own_host("evil.example", "0.0.0.0")
    assert not is_own_host("10.1.2.4", "10.1.2.3")


def test_requests_of_other_sites_and_other_methods_are_refused(client: TestClient) -> None:
    assert authorized(client).get("/api/status", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.request(method, "/api/status").status_code == 405


@pytest.mark.parametrize("parameters", [
    {}, {"view": "1-cpu"}, {"view": "../../etc/passwd"}, {"view": "0-cpu", "from_ns": "x"},
    {"view": "0-cpu", "to_ns": "9" * 30}, {"view": "0-cpu", "from_ns": "\u0663"}, {"view": "0-cpu", "from_ns": ""},
    {"view": "0-cpu", "from_ns": "1.5"},
])  # fmt: skip
def test_hostile_parameters_are_refused(client: TestClient, parameters: dict[str, str]) -> None:
    answer = authorized(client).get("/api/payload", params=parameters)
    assert answer.status_code == 400
    assert answer.text.startswith("memtrace: the parameter")


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/%2e%2e/etc/passwd", "/templates/served.js", "/api", "/api/payload/x"]
)
def test_there_are_no_files(client: TestClient, path: str) -> None:
    assert authorized(client).get(path).status_code == 404


# Windows.


def indexed(trace: Trace) -> IndexedTrace:
    index = TraceIndex()
    for number in trace.part_numbers:
        index.add(summarize_part(trace, number))
    index.spans.extend(trace)
    return IndexedTrace(trace, index)


def live_ids(data: dict[str, Any], row: int) -> set[int]:
    """The blocks that a payload shows as live after one of its rows."""
    table = data["blocks"]
    begin = table["begin_row"]
    end = begin + table["live_rows"]
    return set(table["block"][(begin <= row) & (end > row)].astype(int).tolist())


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.integers(10, 80), st.data())
def test_an_exact_window_has_the_live_sets_the_curve_and_the_rows_of_the_analysis(
    tmp_path_factory: pytest.TempPathFactory, seed: int, part_rows: int, data: st.DataObject
) -> None:
    rows = RandomTrace(seed, num_steps=5).rows
    folder = tmp_path_factory.mktemp("trace")
    trace = on_disk(rows, folder, list(range(0, len(rows["events"]), part_rows)))
    whole, time_ns = indexed(trace), trace.columns("events", "time_ns")["time_ns"]
    first_ns, last_ns = sorted(data.draw(st.integers(-1, int(time_ns.max()) + 2)) for _ in range(2))
    window = trace.window(start_ns=first_ns, end_ns=last_ns)
    table, ids = blocks(window), window.block_ids
    num_head = int(np.isin(window.columns("events", "kind")["kind"], HEAD_KINDS).sum())
    for device in window.devices:
        payload = build_window_payload(whole, device, first_ns, last_ns)
        if payload is None:
            continue
        served_rows = payload.plain["served"]
        assert served_rows["is_exact"]
        unpacked = {name: unpack_columns(packed) for name, packed in payload.packed.items() if "columns" in packed}
        live = requested_bytes(window, device)
        for place, row in enumerate(unpacked["curve"]["event"].astype(int).tolist()):
            total = sum(int(unpacked["curve"][name][place]) for name in whole_names(payload.plain))
            assert total == np.concatenate([[live.start], live.bytes])[np.searchsorted(live.rows, row, side="right")]
            expected = live_after(table, window.devices.index(device), row)
            expected = expected[table.size[expected] > 0]
            assert live_ids(unpacked, row) == set((expected if ids is None else ids[expected]).tolist())
        # A row of the window is that of the same event in the whole trace.
        own = np.arange(served_rows["first_row"], window.num_rows("events"))
        assert served_rows["first_row"] >= num_head or not len(own)
        for name in ("time_ns", "kind", "op_id"):
            ours, theirs = (each.columns("events", name)[name] for each in (window, trace))
            assert np.array_equal(ours[own], theirs[own + served_rows["row_offset"]])


def whole_names(plain: dict[str, Any]) -> list[str]:
    return [category["name"] for category in plain["categories"]]


def test_an_overview_keeps_the_peak_and_says_what_its_rows_stand_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_trace, "MAX_EXACT_EVENTS", 10)
    monkeypatch.setattr(payloads, "MAX_POINTS", 30)
    monkeypatch.setattr(payloads, "MAX_BLOCKS", 5)
    trace = load(folder).rank(0)
    whole = indexed(trace)
    for device in trace.devices:
        payload = build_window_payload(whole, device)
        assert payload is not None
        assert not payload.plain["served"]["is_exact"]
        curve = unpack_columns(payload.packed["curve"])
        total = sum(curve[name] for name in whole_names(payload.plain))
        live = requested_bytes(trace, device)
        assert total.max() == max(live.start, live.bytes.max(initial=0)) == payload.plain["peak"]["bytes"]
        rows = unpack_columns(payload.packed["served_rows"])["row"]
        assert len(rows) == payload.plain["num_rows"]
        assert (np.diff(rows) >= 0).all()
        assert rows.max() < trace.num_rows("events")


def test_the_page_of_a_small_trace_is_that_of_the_report(client: TestClient) -> None:
    page = authorized(client).get("/").text
    assert 'id="payload-0-cpu"' in page
    assert 'id="served"' not in page


def test_the_page_of_a_large_trace_has_no_data_in_it(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_REPORT_EVENTS", 10)
    page = authorized(client).get("/").text
    assert 'id="payload-0-cpu"' not in page
    assert 'id="served"' in page
    assert "Peak memory by category" in page


def test_all_results_of_a_range_are_a_page_of_their_own(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    page = authorized(client).get("/range", params={"view": "0-cpu", "from_ns": "20", "to_ns": "300"})
    assert page.status_code == 200
    assert "This is a window of the trace: 20 ns to 300 ns." in page.text
    monkeypatch.setattr("memtrace.dashboards.server.app.MAX_REPORT_EVENTS", 10)
    refused = client.get("/range", params={"view": "0-cpu"})
    assert refused.status_code == 400
    assert "Zoom in" in refused.text


# The index.


def test_a_cached_index_is_used_until_a_part_changes(folder: Path) -> None:
    trace, rank_folder = load(folder).rank(0), folder / "rank=0"
    assert load_index(rank_folder) is None
    save_index(rank_folder, indexed(trace).index)
    cached = load_index(rank_folder)
    assert cached is not None
    assert cached.num_events == trace.num_rows("events")
    part = rank_folder / "events-00001.parquet"
    part.touch()
    assert load_index(rank_folder) is None


def test_a_cache_that_cannot_be_written_or_read_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    save_index(folder / "rank=0", indexed(load(folder).rank(0)).index)
    assert load_index(folder / "rank=0") is None


# Recordings that are being written.


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def parts_of(folder: Path, numbers: range) -> list[Path]:
    return [path for path in folder.glob("*-*.parquet") if int(path.stem.rpartition("-")[2]) in numbers]


def test_a_growing_trace_is_followed_part_by_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(served, "IDLE_SECONDS", 1e9)
    complete, growing = folder / "rank=0", tmp_path / "growing.memtrace" / "rank=0"
    growing.mkdir(parents=True)
    manifest = read_manifest(complete / "manifest.json")
    numbers = load(folder).rank(0).part_numbers

    def publish(up_to: int) -> None:
        for part in parts_of(complete, range(up_to)):
            (growing / part.name).write_bytes(part.read_bytes())
        shown = {
            table: tuple((low, min(high, up_to - 1)) for low, high in ranges if low < up_to)
            for table, ranges in (manifest.parts or {}).items()
        }
        write_manifest(growing, replace(manifest, parts=shown, finished=False))

    publish(1)
    following = ServedTrace([str(growing.parent)], follow=True)
    rank = following.ranks[0]
    following.start()
    try:
        for up_to in range(2, len(numbers) + 1):
            wait_for(lambda: rank.progress.is_complete and rank.current is not None)
            seen = rank.version
            publish(up_to)
            wait_for(lambda seen=seen: rank.version > seen)
        whole = load(folder).rank(0)
        wait_for(lambda: rank.current is not None and rank.current.index.num_events == whole.num_rows("events"))
        current = rank.current
        assert current is not None
        for device in whole.devices:
            ours = current.index.curve(current.trace, device, max_points=10_000)
            expected = indexed(whole).index.curve(whole, device, max_points=10_000)
            assert all(np.array_equal(values, getattr(expected, name)) for name, values in vars(ours).items())
    finally:
        following.stop()


def test_parts_that_a_ring_deletes_are_forgotten(folder: Path) -> None:
    trace = load(folder).rank(0)
    index, numbers = indexed(trace).index, trace.part_numbers
    index.drop_before(numbers[2])
    rest = folder / "rank=0"
    for part in parts_of(rest, range(numbers[2])):
        if not part.name.startswith("names"):
            part.unlink()
    manifest = read_manifest(rest / "manifest.json")
    write_manifest(rest, replace(manifest, parts=None))
    kept = load(folder).rank(0)
    assert kept.part_numbers == numbers[2:]
    for device in kept.devices:
        ours = index.curve(kept, device, max_points=10_000)
        expected = indexed(kept).index.curve(kept, device, max_points=10_000)
        assert np.array_equal(ours.row, expected.row)
        assert np.array_equal(ours.levels[0], expected.levels[0])


def test_the_status_says_how_far_the_index_is_and_that_a_recording_has_ended(folder: Path) -> None:
    trace = ServedTrace([str(folder)], follow=True)
    client = authorized(TestClient(create_app(trace, token=TOKEN, host="127.0.0.1"), base_url="http://127.0.0.1"))
    (rank,) = client.get("/api/status").json()["ranks"]
    assert (rank["num_indexed"], rank["views"]) == (0, {})
    assert client.get("/api/payload", params={"view": "0-cpu"}).status_code == 400
    trace.start()
    assert trace.is_indexed.wait(WAIT_SECONDS)
    (rank,) = client.get("/api/status").json()["ranks"]
    assert rank["num_indexed"] == rank["num_parts"] == len(load(folder).rank(0).part_numbers)
    assert rank["live"] == {"state": "finished", "devices": []}
    trace.stop()
    json.dumps(rank)
