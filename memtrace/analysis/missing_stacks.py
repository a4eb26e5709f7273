"""Why blocks have no call stack."""

from __future__ import annotations

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column
from memtrace.analysis.blocks import blocks
from memtrace.analysis.gaps import find_gaps
from memtrace.analysis.operators import operator_index
from memtrace.format.arrays import Array
from memtrace.trace import Trace
from memtrace.units import format_bytes

BEFORE_RECORDING = "allocated before the recording"
IN_GAP = "allocated between recorded steps"
STACKS_OFF = "recorded without stacks"
OUTSIDE_OPERATORS = "allocated outside torch's operators (NumPy, C++ code)"
OPERATOR_NOT_WRITTEN = "its operator call is not in the trace"
UNMATCHED_BACKWARD = "backward operator without a recorded forward operator"
NO_PYTHON_FRAMES = "allocated on a thread without Python frames"
NOT_IN_FILE = "the file has no stack"


def missing_stack_reasons(trace: Trace, block_ids: Array) -> tuple[list[str], Array]:
    """Return why each of some blocks without a call stack has none.

    Args:
        trace: the trace of one rank.
        block_ids: blocks whose ``stack`` is -1.

    Returns:
        The distinct reasons, as phrases, and for each block the index of its reason.
    """
    events = trace.columns("events", "kind", "block_id", "op_id")
    begins = np.flatnonzero(np.isin(events["kind"], [KIND["alloc"], KIND["live"], KIND["baseline"]]))
    begins = begins[events["block_id"][begins] >= 0]
    row = np.full(len(blocks(trace)), -1, np.int64)
    row[events["block_id"][begins[::-1]]] = begins[::-1]
    row = row[block_ids]
    op = np.where(row >= 0, events["op_id"][row], -1) if len(events["op_id"]) else np.full(len(row), -1)
    is_older = (row < 0) | (events["kind"][row] == KIND["baseline"]) if len(events["kind"]) else row < 0
    options = trace.manifest.options
    if options is None:
        conditions = {BEFORE_RECORDING: is_older}
        otherwise = NOT_IN_FILE
    else:
        conditions = {
            BEFORE_RECORDING: is_older,
            IN_GAP: find_gaps(trace).contain_rows(row),
            STACKS_OFF: np.full(len(row), not options.stacks),
            OUTSIDE_OPERATORS: op < 0,
            OPERATOR_NOT_WRITTEN: operator_index(trace).rows(op) < 0,
            UNMATCHED_BACKWARD: op_column(trace, op, "phase") == PHASE["backward"],
            _below(options.stack_min_bytes): blocks(trace).size[block_ids] < options.stack_min_bytes,
        }
        otherwise = NO_PYTHON_FRAMES
    reasons = [*conditions, otherwise]
    index = np.select(list(conditions.values()), list(range(len(conditions))), len(conditions))
    used = np.unique(index)
    return [reasons[number] for number in used], np.searchsorted(used, index)


def _below(stack_min_bytes: int) -> str:
    return f"allocated by operators that allocate less than stack_min_bytes ({format_bytes(stack_min_bytes)})"
