"""Mutations of a trace folder: values, types and rows of its Parquet parts, its manifest, and its files."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memtrace.format.schema import TABLES
from tests.readers.fuzz import mutate_bytes

TEXTS = (
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b2J", "</script><img src=x onerror=alert(1)>", "<b>bold</b>",
    "\u202egnp.exe", "a\x00b", "line\nbreak", "tab\tin", "[bold]markup[/]", "[/]", "=HYPERLINK(1)", "\ud800", "x" * 5000,
    "", "\u2028", "\r\x1b[2K", "F99999999999.1", "/" * 300, "%s{}{0}", "\U000e0041",
)  # fmt: skip
"""Texts that a terminal, HTML, CSV, rich or a format string could interpret."""
INTEGERS = (
    -1, 0, 1, -2, 2**15, 2**31 - 1, 2**31, 2**40, 2**47, 2**48, 2**53, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**62), -(2**63),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 2**31, 2**63, 2**100, -(2**63), 10**400, 1.5, float("nan"), float("inf"), True, False, [], {}, [[]], [None],
    {"a": 1}, [[0, 10**12]], [[0, 0], [5, 3]], [[-5, 9]], *TEXTS,
)  # fmt: skip
_OTHER_TYPES = (
    pa.string(), pa.float64(), pa.float16(), pa.bool_(), pa.int8(), pa.uint64(), pa.timestamp("ns"), pa.binary(), pa.null(),
    pa.decimal128(38, 2), pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.large_string(), pa.date32(),
    pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.int64()),
)  # fmt: skip
Dice = random.Random


def mutate_trace(folder: Path, dice: Dice) -> str:
    """Apply one to three mutations to the trace in ``folder``, in place, and return what was done."""
    done = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        mutate = dice.choices(
            (_mutate_part, _mutate_manifest, _mutate_part_bytes, _mutate_files), weights=(60, 20, 8, 12)
        )[0]
        try:
            done.append(mutate(folder, dice))
        # What an earlier mutation damaged cannot always be mutated again.
        except (OSError, pa.ArrowException, ValueError, LookupError, RecursionError) as error:
            done.append(f"({type(error).__name__})")
    return ", ".join(done)


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.parquet") if path.is_file())


# -- Parquet parts ----------------------------------------------------------------------------------------------------


def _mutate_part(folder: Path, dice: Dice) -> str:
    path = dice.choice(_parts(folder))
    table = pq.read_table(path)
    mutate = dice.choice((_change_values, _change_values, _change_values, _change_column, _change_rows))
    table, what = mutate(table, dice)
    pq.write_table(table, path)
    return f"{path.name}: {what}"


def _change_values(table: pa.Table, dice: Dice) -> tuple[pa.Table, str]:
    index = dice.randrange(table.num_columns)
    field = table.schema.field(index)
    values = table.column(index).to_pylist()
    if not values:
        return table, "no rows"
    new = _new_value(field, dice)
    share = dice.choice((0.02, 0.3, 1.0))
    changed = [new() if dice.random() < share else value for value in values]
    if changed == values:
        changed[dice.randrange(len(values))] = new()
    return table.set_column(index, field, _array(changed, field.type)), f"values of {field.name}"


def _new_value(field: pa.Field, dice: Dice) -> Callable[[], Any]:
    if dice.random() < 0.15:
        return lambda: None
    if pa.types.is_dictionary(field.type):
        known = next((c.vocabulary for t in TABLES.values() for c in t if c.name == field.name and c.vocabulary), None)
        return lambda: dice.choice(known if known and dice.random() < 0.7 else ("cpu", "cuda:0", "cuda:-1", *TEXTS))
    if pa.types.is_integer(field.type):
        fixed = dice.choice(INTEGERS)
        if dice.random() < 0.5:
            return lambda: fixed
        return lambda: dice.choice((*INTEGERS, dice.getrandbits(63), dice.randrange(100)))
    if pa.types.is_string(field.type):
        return lambda: dice.choice((*TEXTS, "/a.py\t1\tf", "/a.py\t99999999999999999999999\tf", "/a.py\t²\tf"))
    if pa.types.is_list(field.type):
        return lambda: [dice.choice((0, 1, -1, 2**31 - 1, 7)) for _ in range(dice.choice((0, 1, 3, 200)))]
    return lambda: dice.choice((True, False))


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array; what does not fit into the type is null, and lone surrogates become invalid UTF-8."""
    if pa.types.is_dictionary(kind):
        text = _array(values, pa.string())
        return text.dictionary_encode().cast(kind) if len(set(values)) < 100 else text
    if pa.types.is_string(kind):
        encoded = [value if value is None else value.encode("utf-8", "surrogatepass") for value in values]
        plain = pa.array(encoded, pa.binary())
        return pa.Array.from_buffers(pa.string(), len(plain), plain.buffers())
    if pa.types.is_integer(kind):
        bound = 2 ** (kind.bit_width - 1)
        values = [value if value is None or -bound <= value < bound else None for value in values]
    return pa.array(values, kind)


def _change_column(table: pa.Table, dice: Dice) -> tuple[pa.Table, str]:
    index = dice.randrange(table.num_columns)
    field, column = table.schema.field(index), table.column(index)
    action = dice.randrange(5)
    if action == 0:
        return table.remove_column(index), f"without {field.name}"
    if action == 1:
        other = dice.choice(table.column_names)
        return table.rename_columns([other if n == index else c for n, c in enumerate(table.column_names)]), (
            f"{field.name} renamed to {other}"
        )
    if action == 2:
        return table.append_column(dice.choice((field.name, "extra")), column), f"{field.name} twice"
    if action == 3:
        order = list(range(table.num_columns))
        dice.shuffle(order)
        return table.select(order), "columns in another order"
    kind = dice.choice(_OTHER_TYPES)
    try:
        other_column = column.cast(kind, safe=False)
    except pa.ArrowException:
        other_column = pa.nulls(table.num_rows, kind)
        if pa.types.is_string(kind) or dice.random() < 0.3:
            kind, other_column = pa.string(), pa.array(["7"] * table.num_rows, pa.string())
    return table.set_column(index, pa.field(field.name, kind), other_column), f"{field.name} as {kind}"


def _change_rows(table: pa.Table, dice: Dice) -> tuple[pa.Table, str]:
    rows = list(range(table.num_rows))
    action = dice.randrange(6)
    if action == 0:
        dice.shuffle(rows)
    elif action == 1:
        rows = rows[: dice.randrange(len(rows) + 1)]
    elif action == 2:
        rows = rows * dice.choice((2, 3))
    elif action == 3:
        rows = rows[::-1]
    elif action == 4:
        rows = []
    else:
        metadata = dict(table.schema.metadata or {})
        key = dice.choice([*metadata, b"memtrace.order_ns"])
        metadata[key] = dice.choice((b"", b"abc", b"9" * 400, b"-" + b"9" * 30, b"1.5", b"\xff\x00", b"0"))
        return table.replace_schema_metadata(metadata), f"metadata {key!r}"
    return table.take(pa.array(rows, pa.int64())), ("shuffled", "cut", "repeated", "reversed", "emptied")[action]


def _mutate_part_bytes(folder: Path, dice: Dice) -> str:
    path = dice.choice(_parts(folder))
    data = path.read_bytes()
    if dice.random() < 0.5:
        # The footer: its length, and the Thrift structures before it.
        tail = min(len(data), 2000)
        data = data[:-tail] + mutate_bytes(data[-tail:], dice)
    else:
        data = mutate_bytes(data, dice)
    path.write_bytes(data)
    return f"bytes of {path.name}"


# -- manifest ---------------------------------------------------------------------------------------------------------


def _mutate_manifest(folder: Path, dice: Dice) -> str:
    path = dice.choice(sorted(file for file in folder.rglob("manifest.json") if file.is_file()))
    if dice.random() < 0.1:
        path.write_bytes(mutate_bytes(path.read_bytes(), dice))
        return "bytes of the manifest"
    if dice.random() < 0.05:
        path.write_text(dice.choice(("[" * 100_000, '{"a":' * 100_000, "null", "[]", "0", '"' + "x" * 10**6 + '"')))
        return "manifest replaced"
    content = json.loads(path.read_text())
    if dice.random() < 0.1:
        nested: Any = 1
        for _ in range(dice.choice((50, 900))):
            nested = {"a": nested}
        content[dice.choice(("allocator_settings", "devices", "versions", "notes"))] = nested
    for _ in range(dice.choice((1, 1, 2, 4))):
        _change_member(content, dice)
    path.write_text(json.dumps(content))
    return "manifest"


def _change_member(content: dict[str, Any], dice: Dice) -> None:
    container: Any = content
    while isinstance(container, dict | list):
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        if not keys:
            return
        key = dice.choice(keys)
        inner = container[key]
        if isinstance(inner, dict | list) and inner and dice.random() < 0.8:
            container = inner
            continue
        if dice.random() < 0.15:
            del container[key]
        elif isinstance(inner, str) and dice.random() < 0.6:
            container[key] = dice.choice(TEXTS)
        elif isinstance(inner, int) and dice.random() < 0.6:
            container[key] = dice.choice((*INTEGERS, 10**400, not inner))
        else:
            container[key] = copy.deepcopy(dice.choice(VALUES))
        if isinstance(container, dict) and dice.random() < 0.1:
            container[dice.choice(TEXTS)] = copy.deepcopy(inner)
        return


# -- files ------------------------------------------------------------------------------------------------------------


def _mutate_files(folder: Path, dice: Dice) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    path, other = dice.choice(files), dice.choice(files)
    action = dice.choice(
        ("removed", "emptied", "made a folder", "linked to itself", "linked to /dev/zero", "made a pipe", "swapped",
         "given the number of another part", "copied as a rank", "rank renamed", "linked out of the trace", "unreadable name")
    )  # fmt: skip
    if action in ("removed", "made a folder", "linked to itself", "linked to /dev/zero", "made a pipe"):
        path.unlink()
    if action == "emptied":
        path.write_bytes(b"")
    elif action == "made a folder":
        path.mkdir()
    elif action == "linked to itself":
        path.symlink_to(path.name)
    elif action == "linked to /dev/zero":
        path.symlink_to("/dev/zero")
    elif action == "made a pipe":
        os.mkfifo(path)
    elif action == "swapped" and path.is_file() and other.is_file():
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif action == "given the number of another part":
        number = dice.choice(("00001", "00007", "1", "99999999999999999999999", "000000", "-1", "²"))
        shutil.copy(path, path.with_name(f"{path.name.partition('-')[0]}-{number}.parquet"))
    elif action == "copied as a rank":
        number = dice.choice(("1", "7", "-1", "01", "x", "99999999999999999999999", "²", "\x1b[31m"))
        shutil.copytree(path.parent, folder / f"rank={number}", dirs_exist_ok=True, symlinks=True)
    elif action == "rank renamed":
        path.parent.rename(path.parent.with_name(dice.choice(("rank=3", "rank=", "rank=0x0", "rank=\x1b[31m"))))
    elif action == "linked out of the trace":
        path.unlink()
        path.symlink_to(dice.choice(("/etc/passwd", "../../..", "/proc/self/mem", "/nonexistent")))
    elif action == "unreadable name":
        path.with_name(".events-00009.parquet\x1b[31m.tmp").write_bytes(b"x")
    return f"{path.name} {action}"
