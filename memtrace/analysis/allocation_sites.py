"""Allocation sites: the line of the program that each call stack of a trace stands for."""

from __future__ import annotations

import numpy as np

from memtrace.format.arrays import Array
from memtrace.trace import Trace


def allocation_site(trace: Trace, stack: int) -> str | None:
    """Return the allocation site of a call stack, such as ``train.py:12 forward``; None where there is no stack.

    Args:
        trace: the trace of one rank.
        stack: the id of the stack in the table ``names``; -1 for none.
    """
    return trace.code_owner.format_site(trace.frames(stack))


def allocation_sites(trace: Trace, stacks: Array) -> tuple[list[str | None], Array]:
    """Return the distinct allocation sites of many call stacks; several stacks can share one.

    Args:
        trace: the trace of one rank.
        stacks: ids of stacks in the table ``names``, -1 for none.

    Returns:
        The distinct sites, and for each element of ``stacks`` the index of its site.
    """
    distinct_stacks, stack_index = np.unique(stacks, return_inverse=True)
    site_of_stack = [trace.cached(allocation_site, int(stack)) for stack in distinct_stacks]
    sites = list(dict.fromkeys(site_of_stack))
    site_number = {site: number for number, site in enumerate(sites)}
    return sites, np.array([site_number[site] for site in site_of_stack], np.int64)[stack_index]
