"""Roles: the same block of every step, recognised across steps by where and in which order it is allocated.

A role is a device, a stack, an operator, a module, a size, and a place in the order of the blocks of a step that share
these. Where a size is not that of most steps (sequences of varying lengths) the size is left out of it.

    found = roles(trace)
    found.of_block[block]      # the block's role, -1 for one of no step (older, or made between steps)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Roles:
    """``of_block``: the role of each block, -1 for none. The other arrays are indexed by role.

    ``device``, ``stack``, ``op_name`` and ``module`` are codes and ids as in ``Blocks``; ``size`` is -1 where it
    varies; ``order`` counts the blocks of a step that share all these from 0; ``num_steps``: in how many steps it is.
    """

    of_block: Array
    device: Array
    stack: Array
    op_name: Array
    module: Array
    size: Array
    order: Array
    num_steps: Array

    def __len__(self) -> int:
        return len(self.size)


def roles(trace: Trace) -> Roles:
    """The roles of the blocks made in the steps of a trace, worked out once; n log n."""
    return trace.cached(_compute)


def combined(*columns: Array) -> Array:
    """One number for each distinct row of the columns (integers from -1), dense from 0."""
    code, width = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        span = int(column.max(initial=-1)) + 2
        if width * span >= 1 << 62:  # compress only what would overflow: every sort costs
            values, code = np.unique(code, return_inverse=True)
            width = len(values)
        code, width = code * span + column + 1, width * span
    return np.unique(code, return_inverse=True)[1]


def _compute(trace: Trace) -> Roles:
    found = blocks(trace)
    made = np.flatnonzero(found.step >= 0)
    made = made[np.argsort(found.alloc_event[made], kind="stable")]
    step, size = found.step[made], found.size[made]
    where = combined(found.device[made], found.stack[made], found.op_name[made], found.module[made])
    sized = combined(where, size)
    usual = len(step_rows(trace).number) / 2
    regular = _distinct_steps(sized, step)[sized] >= usual if len(made) else np.empty(0, bool)
    role_size = np.where(regular, size, -1)
    group = combined(where, role_size)
    order = _places_within(group, step)
    role = combined(group, order)
    count = int(role.max(initial=-1)) + 1
    sample = np.zeros(count, np.int64)
    sample[role] = np.arange(len(role))
    of_block = np.full(len(found), -1, np.int64)
    of_block[made] = role
    return Roles(
        of_block=of_block,
        device=found.device[made][sample],
        stack=found.stack[made][sample],
        op_name=found.op_name[made][sample],
        module=found.module[made][sample],
        size=role_size[sample],
        order=order[sample],
        num_steps=np.bincount(role, minlength=count),
    )


def _distinct_steps(group: Array, step: Array) -> Array:
    """In how many steps each group occurs."""
    width = int(step.max()) + 1
    pairs = np.unique(group * width + step)
    return np.bincount(pairs // width, minlength=int(group.max()) + 1)


def _places_within(group: Array, step: Array) -> Array:
    """The place of each row among the rows of its group and step, in the order of the rows."""
    key = combined(group, step)
    sort = np.argsort(key, kind="stable")
    first = np.searchsorted(key[sort], np.arange(int(key.max(initial=-1)) + 1))
    places = np.empty(len(key), np.int64)
    places[sort] = np.arange(len(key)) - first[key[sort]]
    return places


def middle_by(group: Array, values: Array, count: int) -> Array:
    """The (lower) median of the values of each group from 0 to ``count``; -1 for a group without any."""
    order = np.lexsort((values, group))
    bounds = np.searchsorted(group[order], np.arange(count + 1))
    number = np.diff(bounds)
    place = bounds[:-1] + np.maximum(number - 1, 0) // 2
    padded = np.append(values[order], -1)
    middle: Array = np.where(number > 0, padded[np.minimum(place, len(values))], -1)
    return middle


def role_text(trace: Trace, role: int) -> str:
    """'file:line function, operator' of a role, as far as they are known."""
    found = roles(trace)
    where = allocation_site(trace, int(found.stack[role])) or trace.name(int(found.module[role]))
    parts = [part for part in (where, trace.name(int(found.op_name[role]))) if part]
    return ", ".join(parts) or "no site"


def roles_table(trace: Trace) -> pd.DataFrame:
    """One row a role: site, operator, module (NA: unknown), size (bytes, NA: varies), order, num_steps, and over the
    steps mean and spread (standard deviation): lifetime_mean_ns, lifetime_std_ns (of the blocks that were freed),
    accesses_mean, accesses_std, interval_mean_ns, interval_std_ns (of a block's mean time between its accesses).
    """
    import pandas as pd

    found, told = roles(trace), blocks(trace)
    mine = np.flatnonzero(found.of_block >= 0)
    role = found.of_block[mine]
    accesses = (told.num_reads + told.num_writes)[mine].astype(np.float64)
    lifetime = np.where(told.free_ns[mine] >= 0, told.free_ns[mine] - told.alloc_ns[mine], np.nan)
    between = (told.last_access_ns - told.first_access_ns)[mine] / np.maximum(accesses - 1, 1)
    table: dict[str, object] = {
        "site": [allocation_site(trace, int(stack)) for stack in found.stack],
        "operator": [trace.name(int(name)) for name in found.op_name],
        "module": [trace.name(int(name)) for name in found.module],
        "size": pd.arrays.IntegerArray(found.size.astype(np.int64), found.size < 0),
        "order": found.order,
        "num_steps": found.num_steps,
    }
    for name, values in (
        ("lifetime_{}_ns", lifetime),
        ("accesses_{}", accesses),
        ("interval_{}_ns", np.where(accesses > 1, between, np.nan)),
    ):
        mean, spread = _mean_and_spread(role, values, len(found))
        table[name.format("mean")], table[name.format("std")] = mean, spread
    frame: pd.DataFrame = pd.DataFrame(table).rename_axis("role")
    return frame


def _mean_and_spread(group: Array, values: Array, count: int) -> tuple[Array, Array]:
    """Mean and standard deviation of the known values of each group; NaN where there are none."""
    known = ~np.isnan(values)
    number = np.bincount(group[known], minlength=count).astype(np.float64)
    number[number == 0] = np.nan
    mean = np.bincount(group[known], values[known], minlength=count) / number
    square = np.bincount(group[known], (values[known] - mean[group[known]]) ** 2, minlength=count) / number
    return mean, np.sqrt(square)
