"""Nodes of the autograd graph: which operator calls autograd recorded, and through which of them a backward ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import PHASE, op_column
from memtrace.analysis.counterfactual import END_OF_TRACE
from memtrace.analysis.thresholds import MAX_SILENT_NODES
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_SILENT_OPERATORS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "add", "sub", "sum", "cat", "stack", "clone", "copy", "contiguous", "constant_pad_nd", "lift", "alias",
        "detach", "_to_copy", "expand", "repeat", "reshape", "view", "roll", "flip", "squeeze", "unsqueeze",
        "index_add", "scatter_add",
    )
)  # fmt: skip
"""Operators whose backward may pass the gradient on, or a view of it, without running an operator."""


@dataclass(frozen=True)
class _Nodes:
    """The nodes that are known to have run in backward or not, by sequence number."""

    number: Array
    """Sequence numbers, ascending."""
    run_by: Array
    """The first operator call of backward that ran each node; -1: no backward ran it."""


def is_recorded_forward(trace: Trace, op: Array) -> Array:
    """Return whether autograd recorded each operator call, outside of backward."""
    is_recorded = op_column(trace, op, "sequence_nr") >= 0
    return np.asarray(is_recorded & (op_column(trace, op, "phase") != PHASE["backward"]))


def ran_only_forward(trace: Trace, op: Array) -> Array:
    """Return whether autograd recorded each operator call, and no backward ran through its node.

    A node can run without an operator of its own (that of a sum, for example). It counts as run if the nearest known
    nodes on both sides were run by the same backward, which runs the later node first. If two backwards ran them, the
    later node ran second.
    """
    nodes = trace.cached(_known_nodes)
    node = op_column(trace, op, "sequence_nr").astype(np.int64)
    # Sentinels on both sides: nodes that no backward encloses.
    number = np.concatenate([[-END_OF_TRACE], nodes.number, [END_OF_TRACE]])
    run_by = np.concatenate([[-1], nodes.run_by, [-1]])
    after = np.clip(np.searchsorted(number, node, side="right"), 1, len(number) - 1)  # a damaged trace has any number
    before = after - 1
    in_one_backward = (run_by[before] > run_by[after]) & (run_by[after] >= 0)
    ran_silently = in_one_backward & (number[after] - number[before] <= MAX_SILENT_NODES)
    is_known = number[before] == node
    has_backward = np.where(is_known, run_by[before] >= 0, ran_silently)
    return np.asarray(is_recorded_forward(trace, op) & ~has_backward)


def _known_nodes(trace: Trace) -> _Nodes:
    """Return the nodes that ran in backward, and those that would have left operators if they had run."""
    ops = trace.columns("ops", "op_id", "name", "phase", "sequence_nr")
    is_node, in_backward = ops["sequence_nr"] >= 0, ops["phase"] == PHASE["backward"]
    backward, forward = np.flatnonzero(is_node & in_backward), np.flatnonzero(is_node & ~in_backward)
    backward = backward[np.argsort(ops["op_id"][backward], kind="stable")]
    run, first = np.unique(ops["sequence_nr"][backward], return_index=True)
    did_run = np.isin(ops["sequence_nr"][forward], run)
    runs_operators = np.isin(ops["name"][forward], _loud_operators(trace, ops["name"][forward][did_run]))
    skipped = np.unique(ops["sequence_nr"][forward][runs_operators & ~did_run])
    number = np.concatenate([run, skipped]).astype(np.int64)
    run_by = np.concatenate([ops["op_id"][backward[first]], np.full(len(skipped), -1)])
    order = np.argsort(number, kind="stable")
    return _Nodes(number[order], run_by[order])


def _loud_operators(trace: Trace, names: Array) -> list[int]:
    """Return those of ``names``, which ran operators in some backward, that run operators in every backward."""
    distinct = np.unique(names).tolist()
    return [name for name in distinct if (trace.name(name) or "").split(".")[0].rstrip("_") not in _SILENT_OPERATORS]
