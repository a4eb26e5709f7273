"""Call stacks as a tree of frames, in which stacks share their outer frames: the form of flame graphs.

A stack takes one number on the page, whatever its depth, so that a page has every stack of most traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memtrace.dashboards.text import name_text

from memtrace.code_owner import Owner

if TYPE_CHECKING:
    from memtrace.format.arrays import Array
    from memtrace.frames import Frame
    from memtrace.trace import Trace

MAX_DEPTH: Final = 200
"""Most frames of a stack; deeper stacks lose their outermost ones."""
OWNERS: Final = (Owner.USER, Owner.PACKAGE, Owner.INTERNAL)


@dataclass(frozen=True)
class FrameTree:
    """The call stacks of a trace, outermost frames first, as paths from the root of a tree."""

    parent: Array
    """Node of the caller, by node; the root is node 0 and has parent -1. Parents precede their children."""
    frame: Array
    """Index into ``frames``, by node; -1 for the root."""
    node_of_stack: Array
    """Node of the innermost frame of each stack; 0 for a stack without frames."""
    frames: tuple[Frame, ...]


def build_frame_tree(trace: Trace, stacks: Sequence[int]) -> FrameTree:
    """Return the tree of some call stacks.

    Args:
        trace: A single-rank trace.
        stacks: Ids of call stacks in the table names; -1: none.
    """
    paths = [trace.frame_ids(stack)[:MAX_DEPTH][::-1] for stack in stacks]
    depth = np.array([len(path) for path in paths], np.int64)
    flat = np.array([identity for path in paths for identity in path], np.int64)
    ids, number = np.unique(flat, return_inverse=True)
    first = np.concatenate([[0], np.cumsum(depth)])
    node = np.zeros(len(paths), np.int64)
    parents, frames, num_nodes = [np.array([-1])], [np.array([-1])], 1
    for level in range(int(depth.max(initial=0))):
        deeper = np.flatnonzero(depth > level)
        key, index = np.unique(
            node[deeper] * len(ids) + number[first[deeper] + level], return_inverse=True
        )  # pairs of node and frame
        parents.append(key // len(ids))
        frames.append(key % len(ids))
        node[deeper] = num_nodes + index
        num_nodes += len(key)
    return FrameTree(
        np.concatenate(parents), np.concatenate(frames), node, tuple(trace.frame(int(identity)) for identity in ids)
    )


def encode_frames(trace: Trace, frames: Sequence[Frame]) -> dict[str, Any]:
    """Return frames as JSON: ``files``, ``functions``, and by frame the indices of both, its line and its owner."""
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    owner = trace.code_owner
    return {
        "file": [files.setdefault(frame.file, len(files)) for frame in frames],
        "line": [frame.line for frame in frames],
        "function": [functions.setdefault(frame.function, len(functions)) for frame in frames],
        "owner": [OWNERS.index(owner.owner(frame)) for frame in frames],
        "files": [name_text(file) for file in files],
        "functions": [name_text(function) for function in functions],
    }
