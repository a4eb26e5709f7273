"""Adds the classes to the names of functions in stack traces that were written as text.

``torch.fx`` keeps the stack traces of graph nodes as text, with ``forward`` where a live frame has ``GPT.forward``.
"""

from __future__ import annotations

import ast
import linecache
import sys
from dataclasses import replace
from functools import lru_cache
from typing import Final

from memtrace.frames import Frame

_LIVE_FRAMES_ARE_QUALIFIED: Final = sys.version_info >= (3, 11)


def with_qualified_name(frame: Frame) -> Frame:
    """Return the frame with the qualified name that a live frame has; the frame itself where its source is missing."""
    if not _LIVE_FRAMES_ARE_QUALIFIED:
        return frame
    names = [name for first, last, name in _functions(frame.file) if first <= frame.line <= last]
    name = names[-1] if names else frame.function
    return replace(frame, function=name) if name.rpartition(".")[2] == frame.function else frame


@lru_cache(maxsize=256)
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """First and last line and qualified name of the functions of a file, outer ones before those within them."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    functions: list[tuple[int, int, str]] = []
    open_nodes: list[tuple[ast.AST, str]] = [(tree, "")]
    while open_nodes:
        parent, prefix = open_nodes.pop()
        for node in ast.iter_child_nodes(parent):
            inner = prefix
            if isinstance(node, ast.ClassDef):
                inner = f"{prefix}{node.name}."
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.lineno, node.end_lineno or node.lineno, prefix + node.name))
                inner = f"{prefix}{node.name}.<locals>."
            open_nodes.append((node, inner))
    return tuple(sorted(functions, key=lambda function: (function[0], -function[1])))
