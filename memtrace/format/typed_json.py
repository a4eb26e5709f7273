"""JSON values as typed values: frozen dataclasses, tuples, unions and plain types, with every value checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from memtrace.format.regular_file import require_regular_file
from memtrace.format.storage import AnyPath, Entry, StoragePath
from memtrace.text import to_printable

MAX_FILE_BYTES: Final = 64 << 20
MAX_NUMBER: Final = 1 << 62
MAX_DEPTH: Final = 20
"""Deepest nesting of a member without a type (``allocator_settings`` of a manifest)."""


class InvalidMember(Exception):
    """A member of a JSON document has an invalid value."""

    def __init__(self, member: str, value: object) -> None:
        is_plain = isinstance(value, str | float | bool | None) or (isinstance(value, int) and abs(value) < 10**30)
        text = ascii(str(value)[:80]) if is_plain else f"of type {type(value).__name__}"
        super().__init__(f"the member {to_printable(member.lstrip('.'))[:80]} has the invalid value {text}")


def read_json_file(path: AnyPath, entry: Entry | None = None) -> Any:
    """Return the JSON value in a regular file of at most ``MAX_FILE_BYTES``.

    Args:
        path: The file.
        entry: The file in the listing of a storage.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no JSON, or NaN or an infinity.
        RecursionError: It is nested too deeply.
    """
    if isinstance(path, StoragePath):
        text = path.read_bytes(MAX_FILE_BYTES, entry).decode("utf-8")
    else:
        require_regular_file(path, MAX_FILE_BYTES)
        text = path.read_text(encoding="utf-8")
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def parse_value(kind: Any, value: Any, member: str = "", signed: tuple[str, ...] = ()) -> Any:
    """Return a JSON value as ``kind``: a dataclass, a mapping, a tuple, a union, a literal or a plain type.

    In a union of dataclasses, the member ``kind`` of the value chooses: each has a field ``kind`` of one literal.

    Args:
        kind: The type.
        value: The value, as ``json`` reads it.
        member: Path of the value in the document, for errors.
        signed: Paths of the numbers that can be negative.

    Raises:
        InvalidMember: The value is not of this type, or out of range.
    """
    origin, arguments, is_class = _shape(kind)
    if is_class and isinstance(value, dict):
        return _parse_dataclass(kind, value, member, signed)
    if origin in (Union, UnionType):
        return parse_value(_choose(arguments, value, member), value, member, signed)
    if origin is tuple and isinstance(value, list):
        if arguments == (int, ...) and {*map(type, value)} == {int}:  # columns of many steps
            for extreme in (min(value), max(value)):
                _bounded(extreme, member, signed)
            return tuple(value)
        if arguments[-1] is ...:
            return tuple(parse_value(arguments[0], item, member, signed) for item in value)
        if len(value) == len(arguments):
            pairs = zip(arguments, value, strict=True)
            return tuple(parse_value(option, item, member, signed) for option, item in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {
            to_printable(key): parse_value(arguments[1], item, f"{member}.{key}", signed) for key, item in value.items()
        }
    if kind is Any:
        return _parse_any(value, member, MAX_DEPTH)
    if kind is NoneType and value is None:
        return None
    if (origin is Literal and value in arguments and isinstance(value, str)) or _is_plain(kind, value):
        return _bounded(value, member, signed)
    raise InvalidMember(member, value)


def _parse_dataclass(kind: type, value: dict[str, Any], member: str, signed: tuple[str, ...]) -> Any:
    arguments = {}
    for name, hint, is_required in _fields(kind):
        if name in value:
            arguments[name] = parse_value(hint, value[name], f"{member}.{name}", signed)
        elif is_required:
            raise InvalidMember(f"{member}.{name}", None)
    return kind(**arguments)


# A job has thousands of values of the same types.


@cache
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return the origin and the arguments of a type, and whether it is a dataclass."""
    return get_origin(kind), get_args(kind), is_dataclass(kind) and isinstance(kind, type)


@cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """Return name and type of each field of a dataclass, and whether a value is required."""
    hints = get_type_hints(kind)
    return tuple(
        (field.name, hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    )


def _choose(options: tuple[Any, ...], value: Any, member: str) -> Any:
    """Return the option of a union that fits a value: none, the dataclass of its kind, or the only other option."""
    if value is None and NoneType in options:
        return NoneType
    others = [option for option in options if option is not NoneType]
    if len(others) == 1:
        return others[0]
    name = value.get("kind") if isinstance(value, dict) else None
    for option in others:
        if is_dataclass(option) and isinstance(name, str) and name in get_args(get_type_hints(option).get("kind")):
            return option
    raise InvalidMember(f"{member}.kind", name)


def _is_plain(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _bounded(value: Any, member: str, signed: tuple[str, ...]) -> Any:
    """Return a plain value: text as printable characters on one line, numbers only where they are in range."""
    if isinstance(value, str):
        return to_printable(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        lowest = -MAX_NUMBER if member.lstrip(".") in signed else 0
        if not lowest <= value <= MAX_NUMBER:
            raise InvalidMember(member, value)
    return value


def _parse_any(value: Any, member: str, depth: int) -> Any:
    """Return a JSON value without a type of its own, such as a setting of the allocator."""
    if depth == 0:
        raise InvalidMember(member, value)
    if isinstance(value, dict):
        return {to_printable(key): _parse_any(item, member, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_parse_any(item, member, depth - 1) for item in value]
    if isinstance(value, int | float) and abs(value) > 1 << 64:
        raise InvalidMember(member, value)
    return to_printable(value) if isinstance(value, str) else value
