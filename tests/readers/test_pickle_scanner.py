"""The pickle scanner reads the values that Python's unpickler reads, and leaves to it what it does not know."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import TraceError
from memtrace.readers import cuda_snapshot
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot import PickledSnapshot
from memtrace.readers.pickle_scanner import Scanner, TruncatedPickle, UnsupportedPickle, build, scan
from memtrace.readers.pickle_scanner.library import Scan
from memtrace.readers.rows import Coded, Rows
from tests.readers.scan_campaign import (
    assert_same,
    campaign,
    compare_file,
    compare_values,
    is_same,
    read_in_python,
)
from tests.readers.snapshot_maker import SnapshotMaker, frame, random_history
from tests.readers.test_fuzz import SNAPSHOT

PICKLERS = (pickle.Pickler, pickle._Pickler)  # type: ignore[attr-defined]  # in C, and in Python
PROTOCOLS = (2, 3, 4, 5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**63), 2**64) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=40,
)


@pytest.fixture(scope="module")
def scanner() -> Scanner:
    """The compiled scanner, which is built if this version is not in the cache."""
    if not build.find_compilers():
        pytest.skip("no C++ compiler")
    scanner = build.load_scanner()
    assert scanner is not None
    return scanner


def scanned(scanner: Scanner, data: bytes, chunk_bytes: int = 1 << 20) -> Any:
    """Return the value of a pickle that is fed in chunks."""
    pickled = Scan(scanner)
    for start in range(0, len(data), chunk_bytes):
        pickled.feed(np.frombuffer(data[start : start + chunk_bytes], np.uint8))
    word = pickled.result()
    assert word is not None
    return pickled.objects(np.array([word], np.uint64))[0]


def pickles(value: Any) -> list[bytes]:
    """Return a value as each pickler writes it with each protocol."""
    result = []
    for pickler, protocol in product(PICKLERS, PROTOCOLS):
        stream = io.BytesIO()
        pickler(stream, protocol).dump(value)
        result.append(stream.getvalue())
    return result


@given(value=VALUES, chunk_bytes=st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_every_plain_value_is_scanned(scanner: Scanner, value: Any, chunk_bytes: int) -> None:
    for data in pickles(value):
        assert is_same(scanned(scanner, data, chunk_bytes), value)


@given(value=VALUES, data=st.data())
@settings(deadline=None, max_examples=30)
def test_a_pickle_that_is_cut_off_is_never_whole(scanner: Scanner, value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value, data.draw(st.sampled_from(PROTOCOLS)))
    pickled = Scan(scanner)
    pickled.feed(np.frombuffer(whole[: data.draw(st.integers(0, len(whole) - 1))], np.uint8))
    assert pickled.result() is None
    with pytest.raises(TruncatedPickle):
        scan(scanner, io.BytesIO(whole[:-1]), (), ())


@given(snapshot=SNAPSHOT, protocol=st.sampled_from(PROTOCOLS))
@settings(deadline=None, max_examples=50)
def test_generated_snapshots_have_the_same_tables(
    scanner: Scanner, tmp_path_factory: pytest.TempPathFactory, snapshot: Any, protocol: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"scanned-{os.getpid()}.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    assert compare_file(scanner, path) in ("trace", "message", "handed_over")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_random_history_has_the_same_tables(scanner: Scanner, tmp_path: Path, protocol: int) -> None:
    first, second = random_history(protocol, 300), random_history(protocol + 9, 200, SnapshotMaker(device=2, stream=5))
    first.out_of_memory(1 << 40, 77)
    first.alloc(5, [frame("a.py", 1, "f")], user_metadata="layer 1", compile_context="0/0", pool_id=(0, 3))
    first.alloc(5, forward_frames=['  File "a.py", line 3, in f\n'], user_metadata="", compile_context="N/A")
    first.snapshot_entry()
    value = first.snapshot()
    value["segments"] += second.snapshot()["segments"]
    value["device_traces"] += second.snapshot()["device_traces"][1:]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value, protocol))
    assert compare_file(scanner, path) == "trace"


def test_real_files_have_the_same_tables(scanner: Scanner, data: Path) -> None:
    for path in sorted((data / "snapshots").glob("*.pickle")):
        assert compare_file(scanner, path) == "trace", path.name


@pytest.mark.parametrize("num_files", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutated_files_have_the_same_verdict(scanner: Scanner, data: Path, num_files: int) -> None:
    """``python -m tests.readers.scan_campaign --mutations 10000`` is the whole one, with --sanitize under ASan."""
    outcomes = campaign(scanner, num_files, 3, None, limited=True)
    assert not outcomes["failure"]
    # Mutations that all have the same outcome would test nothing.
    assert min(outcomes[name] for name in ("trace", "message", "handed_over")) > num_files / 40


@pytest.mark.parametrize("lines", [(7, 7.0), (7.0, 7), (1, True), (7, 7.5), (0, -0.0), (7, None), (7, "7"), (7, 7)])
@pytest.mark.parametrize("has_all_stacks", [True, False])
def test_equal_frames_with_values_of_other_types_have_the_same_verdict(
    scanner: Scanner, tmp_path: Path, lines: tuple[Any, Any], has_all_stacks: bool
) -> None:
    """Call stacks that differ in the type of a line only; where a block has none, rows are read one by one."""
    first, middle, last = (frame(f"{name}.py", 3, name) for name in "abc")
    history = SnapshotMaker()
    for line in lines:
        history.alloc(512, [first, middle, {**last, "line": line}])
    history.alloc(512, [first, middle])
    value = history.snapshot()
    blocks = [block for segment in value["segments"] for block in segment["blocks"] if block["frames"]]
    assert len(blocks) == 3
    if not has_all_stacks:
        del blocks[2]["frames"]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    assert compare_file(scanner, path) == "trace"
    texts = {name["text"] for name in read_in_python(Content.of(path)).tables["names"].to_pylist()}
    numbers = [line if isinstance(line, int | float) and line == int(line) else 0 for line in lines]
    assert {text for text in texts if text and text.startswith("c.py")} == {f"c.py\t{int(line)}\tc" for line in numbers}


@pytest.mark.parametrize("value", [None, (), [], {}, ({"blocks": []},), [1], {"segments": ({},)}, {"device_traces": 5}])
def test_values_that_are_no_snapshot_have_the_same_verdict(scanner: Scanner, tmp_path: Path, value: Any) -> None:
    path = tmp_path / "value.pickle"
    path.write_bytes(pickle.dumps(value))
    assert compare_file(scanner, path) == ("trace" if value == [] else "message")


def test_shared_lists_are_stored_once(scanner: Scanner) -> None:
    """A billion laughs: each list holds the one before it ten times."""
    value: list[Any] = ["ha"]
    for _ in range(60):
        value = [value] * 10
    pickled = Scan(scanner)
    pickled.feed(np.frombuffer(pickle.dumps([value, value]), np.uint8))
    word = pickled.result()
    assert word is not None
    first, second = pickled.objects(np.array([word], np.uint64))[0]
    assert first is second and first[0] is first[9]


def test_values_that_contain_themselves_are_scanned(scanner: Scanner) -> None:
    own: list[Any] = [1]
    own.append({"own": own})
    (result,) = scanned(scanner, pickle.dumps([own]))
    assert result[1]["own"] is result


def test_deep_nesting_is_left_to_python(scanner: Scanner) -> None:
    deep = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    pickled = Scan(scanner)
    pickled.feed(np.frombuffer(deep, np.uint8))
    word = pickled.result()
    assert word is not None
    with pytest.raises(UnsupportedPickle, match="nested too deeply"):
        pickled.objects(np.array([word], np.uint64))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Path, 2),
        pickle.dumps(Path, 4),
        pickle.dumps({1, 2}),
        pickle.dumps({1: 2}),
        pickle.dumps(bytearray(b"x"), 5),
        pickle.dumps([b"", b"a" * 300, b"a" * 300, "a"], 3),
        pickle.dumps([b"", b"a" * 300, b"a" * 300, "a"], 5),
        pickle.dumps({"a": Path("x")}),
        b"\x80\x04]K\x01K\x02s.",  # items of a list
        b"\x80\x04}K\x01a.",  # an element of a dict
        b"\x80\x04}(X\x01\x00\x00\x00au.",  # a key without a value
        b"\x80\x04h\x05.",  # never memoized
        b"\x80\x04e.",  # no mark
        b"\x80\x04].a",  # valid, whatever follows
        b"\x80\x04(.",  # nothing on the stack above the mark
        b"\x80\x04K\x01(h\x00e.",
        b"\x80\x04](e.",
        b"\x80\x04]\x94(h\x00h\x00e.",
        b"\x80\x04}\x94(\x8c\x01aK\x01\x8c\x01aK\x02u.",  # a repeated key
        b"\x80\x04}(\x8c\x01aK\x01u\x8c\x01bK\x02s.",  # a dict that is changed
        b"\x80\x04](K\x01eK\x02a(K\x03e.",  # a list that is changed
        b"\x80\x04]\x94(K\x01eh\x00h\x00a.",
        b"\x80\x04\x8c\x02\xff\xff.",  # not UTF-8
        b"\x80\x04\x8c\x03\xed\xa0\x80.",  # a surrogate
        b"\x80\x04\x8c\x02\xc0\x80.",
        b"\x80\x04\x8c\x04\xf4\x90\x80\x80.",
        b"\x80\x04X\xff\xff\xff\xffabc.",  # lengths beyond the end
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.",
        b"\x80\x04\x95" + struct.pack("<Q", 1) + b"K\x01.",
        b"\x80\x04\x95" + struct.pack("<Q", 4) + b"K\x01.",  # a frame beyond the end
        b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"K\x01.",
        b"\x80\x04K\x01r\xff\xff\xff\xff.",  # a memo of 32 GiB
        b"\x80\x06K\x01.",
        b"\x80\x04\x8a\x00\x8a\x02\x00\x80\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00\x87.",
        b"\x80\x04",
        b"\x80",
    ],
)  # fmt: skip
def test_unusual_pickles_have_the_same_value_or_are_left_to_python(scanner: Scanner, data: bytes) -> None:
    compare_values(scanner, data)


def test_every_opcode_is_scanned_or_left_to_python(scanner: Scanner) -> None:
    """Each opcode after a list, a memoized dict, a mark, and two values; with an argument that may suit it."""
    for opcode in pickletools.opcodes:
        for argument in (b"", b"\x00", b"\x01\x00\x00\x00\x00\x00\x00\x00x", b"1\n", b"a\nb\n"):
            for before in (b"", b"]", b"}\x94", b"}\x94(\x8c\x01aK\x01", b"](K\x01K\x02"):
                compare_values(scanner, b"\x80\x04" + before + opcode.code.encode("latin-1") + argument + b".")


def test_large_dicts_and_lists_are_scanned(scanner: Scanner) -> None:
    value = {
        "long": list(range(5000)),
        "wide": {f"key {number}": number for number in range(5000)},
        "shapes": [{f"key {number}": 1} for number in range(6000)],
        "widening": [{"a": number << shift} for shift in (0, 20, 40, 70) for number in range(-50, 50)],
    }
    for data in pickles(value):
        assert is_same(scanned(scanner, data, 1000), value)


def fresh_lists(order: Sequence[int]) -> list[list[str]]:
    """Return lists of shared strings: equal ones are different objects, and some differ in their end only."""
    names = [f"frame {number}" for number in range(300)]
    contents = [names[:30], names[:31], [*names[:29], names[40]], names[250:300], names[5:10], names[200:]]
    return [list(contents[number % len(contents)]) for number in order]


@given(order=st.lists(st.integers(0, 5), max_size=60), chunk_bytes=st.integers(1, 3000))
@settings(deadline=None, max_examples=30)
def test_lists_that_appear_again_are_scanned(scanner: Scanner, order: list[int], chunk_bytes: int) -> None:
    value = [[f"frame {number}" for number in range(300)], fresh_lists(order)]
    value[0] = value[1][0][:] if value[1] and order[0] == 0 else value[0]
    for data in pickles(value):
        assert is_same(scanned(scanner, data, chunk_bytes), value)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_lists_with_the_same_bytes_differ_once_the_memo_has_changed(scanner: Scanner, chunk_bytes: int) -> None:
    put_a, put_b = b"K\x01q\x07", b"K\x02q\x07"  # both give a value to number 7 of the memo
    again = b"](" + b"h\x07" * 20 + b"e"
    data = b"\x80\x02](" + put_a + again + again + put_b + again + b"](K\x05" + again + b"](" + b"e" + b"ee."
    value = pickle.loads(data)
    assert value[1] == [1] * 20 and value[4] == [2] * 20
    assert is_same(scanned(scanner, data, chunk_bytes), value)


def test_a_known_list_is_appended_to_a_list_that_has_elements(scanner: Scanner) -> None:
    again = b"(" + b"h\x07" * 20 + b"e"
    data = b"\x80\x02](K\x01q\x07]" + again + b"]" + again + again + b"]K\x03a" + again + b"e."
    assert is_same(scanned(scanner, data), pickle.loads(data))
    for broken in (b"\x80\x02](K\x01q\x07]" + again + b"K\x01" + again + b"e.", b"\x80\x02" + again + b"."):
        with pytest.raises(UnsupportedPickle):
            scanned(scanner, broken)


def test_large_tables_are_scanned(scanner: Scanner) -> None:
    numbers = np.arange(280_000)
    columns = {"small": numbers % 100, "growing": numbers * 1000, "large": (numbers << 20) + 2**40}
    value = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    rows = rows_of_list(scanner, value)
    for key, column in columns.items():
        assert np.array_equal(np.asarray(rows.numbers(key)), column)
    rows.close()


def rows_of_list(scanner: Scanner, value: Any) -> Rows:
    rows = scan(scanner, io.BytesIO(pickle.dumps({"rows": value})), ("rows",), ())["rows"]
    assert isinstance(rows, Rows)
    return rows


def test_columns_equal_the_values_of_the_rows(scanner: Scanner) -> None:
    dicts: list[dict[str, Any]] = [
        {"a": 1, "b": [1, 2]}, {"a": 2**62, "b": [1, 2], "c": "x"}, {"b": (3,), "a": -5}, {"a": True, "b": None, "c": 2**70},
    ]  # fmt: skip
    rows = rows_of_list(scanner, dicts)
    numbers = rows.numbers("a")
    assert isinstance(numbers, np.ndarray) and numbers.tolist() == [1, 2**62, -5, 1]
    for key in ("b", "c", "absent"):
        assert list(rows.values(key)) == [row.get(key) for row in dicts]
        assert rows.numbers(key) == [row.get(key) for row in dicts]
    coded = rows.coded("b")
    assert coded.codes is not None and coded.codes.tolist() == [0, 0, 1, 2]
    assert [rows.row(number) for number in range(4)] == dicts
    chosen = rows.take(np.array([False, True, False, True]))
    assert list(chosen.values("c")) == ["x", 2**70]


@given(
    values=st.lists(st.text(max_size=1), min_size=1, max_size=30),
    selected=st.lists(st.integers(0, 29), max_size=40),
)
def test_taken_rows_keep_their_values_in_order_of_first_appearance(values: list[str], selected: list[int]) -> None:
    rows = np.array([row % len(values) for row in selected], np.int64)
    coded = Coded(values).numbered()
    for taken in (coded.take(rows), Coded(values).take(rows), Coded.joined([coded, Coded(values)]).take(rows)):
        assert list(taken.rows()) == [values[row] for row in rows]
        assert [taken.value(row) for row in range(len(rows))] == list(taken.rows())
    assert list(coded.take(rows).values) == list(dict.fromkeys(values[row] for row in rows))


@pytest.fixture
def no_scanner_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "_has_failed", False)
    monkeypatch.setenv("MEMTRACE_CACHE", str(tmp_path / "cache"))


def test_small_files_are_read_without_a_build(no_scanner_loaded: None) -> None:
    assert build.find_scanner(build.MIN_SCANNED_BYTES - 1) is None
    assert build.find_scanner(build.MIN_BUILD_BYTES - 1) is None


@pytest.mark.parametrize("compiler", ["", "/bin/false"])
def test_without_a_working_compiler_large_files_are_read_in_python(
    no_scanner_loaded: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    compiler: str,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(build, "MIN_BUILD_BYTES", 1)
    monkeypatch.setattr(build, "MIN_SCANNED_BYTES", 1)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(random_history(1, 50).snapshot()))
    content = Content.of(path)
    (rank,) = PickledSnapshot().read(content)
    assert_same(rank, read_in_python(content))
    assert build._has_failed
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_the_scanner_is_built_once(
    scanner: Scanner, no_scanner_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("built again")

    calls: list[int] = []
    compile_module: Callable[..., Any] = build.compile_module
    small = tmp_path / "small"
    small.mkdir()
    names = ", ".join(name for name, _, _ in build_signatures())
    functions = "".join(f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return 0; }}\n' for name in names.split(", "))  # fmt: skip
    (small / "library.cpp").write_text(functions)
    monkeypatch.setattr(build, "SOURCES", small)
    monkeypatch.setattr(build, "compile_module", lambda *arguments: (calls.append(1), compile_module(*arguments))[1])
    assert build.load_scanner(build=False) is None
    assert build.load_scanner() is not None and calls == [1]
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "compile_module", fail)
    assert build.load_scanner() is not None
    (small / "library.cpp").write_text(functions + "// changed\n")
    monkeypatch.setattr(build, "_loaded", None)
    assert build.load_scanner(build=False) is None


def build_signatures() -> Any:
    from memtrace.readers.pickle_scanner.library import _SIGNATURES

    return _SIGNATURES


def test_a_truncated_file_is_reported_by_the_scanner(
    scanner: Scanner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("read in Python")

    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(random_history(1, 50).snapshot())[:-100])
    monkeypatch.setattr(cuda_snapshot, "load_plain", fail)
    monkeypatch.setattr(cuda_snapshot, "find_scanner", lambda _: scanner)
    with pytest.raises(TraceError, match=r"snapshot.pickle: the pickle is truncated. Copy the file again"):
        PickledSnapshot().read(Content.of(path))
