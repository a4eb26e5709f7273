"""Groups of blocks: how many bytes each category, module or allocation site holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.blocks import blocks
from memtrace.analysis.missing_stacks import missing_stack_reasons
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

_NAMED_CATEGORIES = ("parameter", "gradient", "optimizer_state")
_STATE_NAMES = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "acc_delta"}
)


@dataclass(frozen=True)
class BlockGroup:
    """Blocks that share a category, a module or an allocation site."""

    name: str | None
    """Category, module or allocation site; None: the trace has none for these blocks."""
    bytes: int
    """Sum of the sizes of the blocks (requested bytes where the trace has them)."""
    num_blocks: int
    """Number of blocks in the group."""
    modules: tuple[str, ...] = ()
    """Of an allocation site: the modules that own its blocks, most bytes first; layers of a stack count as one."""
    no_stack_reason: str | None = None
    """Of blocks without an allocation site: why they have no call stack."""


@dataclass(frozen=True)
class ModuleCategoryGroup:
    """Blocks that share both the owning module and the category."""

    module: str | None
    """Fully qualified name of the module; None: outside any module."""
    category: str
    """One of ``schema.CATEGORIES``."""
    bytes: int
    """Sum of the sizes of the blocks (requested bytes where the trace has them)."""
    num_blocks: int
    """Number of blocks in the group."""


def group_by_category(trace: Trace, block_ids: Array) -> list[BlockGroup]:
    """Group blocks by category, largest group first."""
    return _group_by_column(trace, block_ids, "category", lambda code: CATEGORIES[code])


def group_by_site(trace: Trace, block_ids: Array) -> list[BlockGroup]:
    """Group blocks by allocation site, largest group first; blocks without a call stack by the reason for that."""
    table = blocks(trace)
    sites, site = allocation_sites(trace, table.stack[block_ids])
    keys: list[tuple[str | None, str | None]] = [(name, None) for name in sites]
    nameless = np.flatnonzero(np.array([name is None for name in sites], bool)[site]) if len(site) else site
    if len(nameless):
        reasons, reason = missing_stack_reasons(trace, block_ids[nameless])
        site = site.copy()
        site[nameless] = len(keys) + reason
        keys += [(None, text) for text in reasons]
    modules, owner = find_owning_modules(trace, block_ids)
    patterns = [module_pattern(module) for module in modules]
    names: dict[int, list[str]] = {}
    for key, _, _ in _sum_by_key(site * len(modules) + owner, table.size[block_ids]):
        pattern = patterns[key % len(modules)]
        known = names.setdefault(key // len(modules), [])
        if pattern is not None and pattern not in known:
            known.append(pattern)
    return [
        BlockGroup(keys[key][0], num_bytes, num_blocks, tuple(names.get(key, ())), keys[key][1])
        for key, num_bytes, num_blocks in _sum_by_key(site, table.size[block_ids])
    ]


def group_by_module_and_category(trace: Trace, block_ids: Array) -> list[ModuleCategoryGroup]:
    """Group blocks by owning module and category, largest group first; see ``find_owning_modules``."""
    table, (modules, owner) = blocks(trace), find_owning_modules(trace, block_ids)
    keys = owner * len(CATEGORIES) + table.category[block_ids]
    return [
        ModuleCategoryGroup(modules[key // len(CATEGORIES)], CATEGORIES[key % len(CATEGORIES)], num_bytes, num_blocks)
        for key, num_bytes, num_blocks in _sum_by_key(keys, table.size[block_ids])
    ]


def group_by_module_pattern(trace: Trace, block_ids: Array) -> list[BlockGroup]:
    """Group blocks by owning module, with the repeated layers of a stack as one group such as ``GPT.blocks.*.mlp``."""
    return _merge_by_name(
        BlockGroup(module_pattern(group.module), group.bytes, group.num_blocks)
        for group in group_by_module_and_category(trace, block_ids)
    )


def largest_module(trace: Trace, block_ids: Array) -> str | None:
    """Return the module that owns most bytes of some blocks, as a ``module_pattern``; None: outside any module."""
    groups = group_by_module_pattern(trace, np.unique(block_ids))
    return groups[0].name if groups else None


def module_pattern(module: str | None) -> str | None:
    """Replace the numbers in a module name: ``GPT.blocks.3.mlp`` becomes ``GPT.blocks.*.mlp``."""
    return module and ".".join("*" if part.isdigit() else part for part in module.split("."))


def find_owning_modules(trace: Trace, block_ids: Array) -> tuple[list[str | None], Array]:
    """Find the module that owns each block.

    The owner is the module that allocated the block. Parameters, gradients and optimizer state belong to the module
    that owns the parameter, which the name of the tensor gives.

    Returns:
        The distinct modules (None: unknown), and for each block the index of its module in that list.
    """
    table = blocks(trace)
    codes = [CATEGORIES.index(name) for name in _NAMED_CATEGORIES]
    is_named = np.isin(table.category[block_ids], codes) & (table.name[block_ids] >= 0)
    name_id = np.where(is_named, table.name[block_ids], table.module[block_ids]).astype(np.int64)
    keys, inverse = np.unique(2 * name_id + is_named, return_inverse=True)
    names = [_parameter_owner(trace.name(key // 2)) if key % 2 else trace.name(key // 2) for key in keys.tolist()]
    modules = list(dict.fromkeys(names))
    index = {module: number for number, module in enumerate(modules)}
    return modules, np.array([index[name] for name in names], np.int64)[inverse]


def _parameter_owner(name: str | None) -> str | None:
    """Return the module in a tensor name such as blocks.0.weight or blocks.0.weight.exp_avg."""
    if name is None:
        return None
    parts = name.split(".")
    if parts[-1] in _STATE_NAMES:
        parts.pop()
    return ".".join(parts[:-1]) or None


def _group_by_column(
    trace: Trace, block_ids: Array, column: str, name_of: Callable[[int], str | None]
) -> list[BlockGroup]:
    table = blocks(trace)
    sums = _sum_by_key(getattr(table, column)[block_ids], table.size[block_ids])
    return _merge_by_name(BlockGroup(name_of(key), num_bytes, num_blocks) for key, num_bytes, num_blocks in sums)


def _merge_by_name(groups: Iterable[BlockGroup]) -> list[BlockGroup]:
    """Add up groups of one name (several layers of a stack are one module); largest group first."""
    merged: dict[str | None, BlockGroup] = {}
    for group in groups:
        earlier = merged.get(group.name, BlockGroup(group.name, 0, 0))
        merged[group.name] = BlockGroup(group.name, earlier.bytes + group.bytes, earlier.num_blocks + group.num_blocks)
    return sorted(merged.values(), key=lambda group: -group.bytes)


def _sum_by_key(keys: Array, sizes: Array) -> list[tuple[int, int, int]]:
    """Return (key, bytes, number of blocks) of every key, most bytes first."""
    values, inverse = np.unique(keys, return_inverse=True)
    # Exact in float64 up to 2**53 bytes.
    num_bytes = np.bincount(inverse, weights=sizes, minlength=len(values)).astype(np.int64)
    num_blocks = np.bincount(inverse, minlength=len(values))
    order = np.argsort(-num_bytes, kind="stable")
    return [(int(values[i]), int(num_bytes[i]), int(num_blocks[i])) for i in order]
