"""The memory of a step as a function of which modules are recomputed.

A position on the timeline is a row of events, or lies between two rows: memory that recomputation allocates appears
between the rows of backward before which the recomputation runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from memtrace.format.arrays import Array


@dataclass(frozen=True)
class MemoryLevels:
    """A byte count over the timeline."""

    positions: Array
    """Positions after which the level changes, ascending."""
    bytes: Array
    """Level after each of ``positions``."""

    @property
    def peak_bytes(self) -> int:
        """The highest level."""
        return int(self.bytes.max())


@dataclass(frozen=True)
class RecomputeModel:
    """The blocks of a step and what holds them under each choice of options.

    An option is one way to save memory (the recomputation of one module); options are numbered from 0. Of the options
    in a group at most one can be chosen.

    A block is live from its allocation until the last of its holders releases it. Holders are the program, nodes of the
    autograd graph (unless an option is chosen that recomputes what the node saves), and options that keep the block
    (recomputation keeps the inputs of the module).
    """

    fixed_positions: Array
    """Positions at which the level of the blocks changes that no option affects; the first one is the start."""
    fixed_changes: Array
    """Bytes of these changes."""
    begin: Array
    """Allocation of each block that options affect."""
    size: Array
    """Bytes of each block."""
    program_end: Array
    """Position until which the program itself holds each block."""
    node_block: Array
    """One element for each block that a node of the graph holds."""
    node_end: Array
    """Position at which the node releases the block."""
    release_node: Array
    """Pairs: an element of ``node_block`` ..."""
    release_option: Array
    """... and an option with which the node does not hold the block."""
    kept_block: Array
    """Triples: a block ..."""
    kept_option: Array
    """... an option that holds it ..."""
    kept_end: Array
    """... and the position until which it does."""
    added_option: Array
    """Memory that exists only with an option: the option ..."""
    added_begin: Array
    added_end: Array
    added_bytes: Array
    cost_ns: Array
    """Time that each option adds to the step."""
    groups: tuple[tuple[int, ...], ...]
    """Options that exclude each other."""

    @property
    def num_options(self) -> int:
        """The number of options."""
        return len(self.cost_ns)

    def is_allowed(self, chosen: Array) -> bool:
        """Return whether no two of the chosen options exclude each other."""
        return all(int(chosen[list(group)].sum()) <= 1 for group in self.groups)

    def conflicts(self, option: int) -> set[int]:
        """Return the options that exclude an option."""
        return {other for group in self.groups if option in group for other in group} - {option}

    def block_ends(self, chosen: Array) -> Array:
        """Return the position at which each block is freed.

        Args:
            chosen: For each option whether it is chosen.
        """
        held = np.ones(len(self.node_block), bool)
        held[self.release_node[chosen[self.release_option]]] = False
        keeps = chosen[self.kept_option]
        end: Array = self.program_end.copy()
        np.maximum.at(end, self.node_block[held], self.node_end[held])
        np.maximum.at(end, self.kept_block[keeps], self.kept_end[keeps])
        return end

    def replay(self, chosen: Array | Iterable[int]) -> MemoryLevels:
        """Return the memory over the step with a choice of options: a mask, or their numbers."""
        chosen = self.mask(chosen)
        added = chosen[self.added_option]
        positions = np.concatenate(
            [
                self.fixed_positions,
                self.begin,
                self.block_ends(chosen),
                self.added_begin[added],
                self.added_end[added],
            ]
        )
        added_bytes = self.added_bytes[added]
        changes = np.concatenate([self.fixed_changes, self.size, -self.size, added_bytes, -added_bytes])
        order = np.lexsort((changes, positions))
        return MemoryLevels(positions[order], np.cumsum(changes[order]))

    def mask(self, chosen: Array | Iterable[int]) -> Array:
        """Return for each option whether it is chosen, from such a mask or from numbers of options."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == bool:
            return chosen
        mask = np.zeros(self.num_options, bool)
        mask[list(chosen)] = True
        return mask

    def with_fixed_changes(self, positions: Array, changes: Array) -> RecomputeModel:
        """Return the model with more changes of the level that no option affects."""
        positions = np.concatenate([self.fixed_positions, positions])
        changes = np.concatenate([self.fixed_changes, changes])
        order = np.lexsort((changes, positions))
        return replace(self, fixed_positions=positions[order], fixed_changes=changes[order])

    def without_options(self, excluded: Array) -> RecomputeModel:
        """Return the model in which some options (a mask) have no effect; their numbers stay as they are."""
        release, kept, added = (
            ~excluded[column] for column in (self.release_option, self.kept_option, self.added_option)
        )
        return replace(
            self,
            release_node=self.release_node[release],
            release_option=self.release_option[release],
            kept_block=self.kept_block[kept],
            kept_option=self.kept_option[kept],
            kept_end=self.kept_end[kept],
            added_option=self.added_option[added],
            added_begin=self.added_begin[added],
            added_end=self.added_end[added],
            added_bytes=self.added_bytes[added],
        )

    def fixed_level(self, position: float) -> int:
        """Return the bytes of the blocks that no option affects, after a position."""
        return int(self.fixed_changes[self.fixed_positions <= position].sum())

    def level_terms(self, position: float) -> LevelTerms:
        """Return the level after a position as a function of the options."""
        # Negative numbers stand for "unless one of these options is chosen", so that a literal is a sorted tuple.
        present = self.begin <= position
        always = present & (self.program_end > position)
        literals: dict[int, set[tuple[int, ...]]] = {}
        releases = self._releases
        for node in np.flatnonzero((self.node_end > position) & (present & ~always)[self.node_block]).tolist():
            released = tuple(sorted(-1 - option for option in releases.get(node, ())))
            literals.setdefault(int(self.node_block[node]), set()).add(released)
        keeps = (self.kept_end > position) & (present & ~always)[self.kept_block]
        for block, option in zip(self.kept_block[keeps].tolist(), self.kept_option[keeps].tolist(), strict=True):
            literals.setdefault(block, set()).add((option,))
        constant = self.fixed_level(position) + int(self.size[always].sum())
        terms: dict[frozenset[tuple[int, ...]], int] = {}
        for block, alternatives in literals.items():
            condition = frozenset(_simplify(alternatives))
            if () in condition:
                constant += int(self.size[block])
            else:
                terms[condition] = terms.get(condition, 0) + int(self.size[block])
        adds = (self.added_begin <= position) & (self.added_end > position)
        added = np.bincount(self.added_option[adds], self.added_bytes[adds], minlength=self.num_options)
        return LevelTerms(constant, terms, added.astype(np.int64))

    @property
    def _releases(self) -> dict[int, list[int]]:
        releases: dict[int, list[int]] = {}
        for node, option in zip(self.release_node.tolist(), self.release_option.tolist(), strict=True):
            releases.setdefault(node, []).append(option)
        return releases


@dataclass(frozen=True)
class LevelTerms:
    """The level at one position: a constant, bytes that are present if a condition holds, and bytes of options."""

    constant: int
    conditional: dict[frozenset[tuple[int, ...]], int]
    """Bytes by condition. A condition is a set of alternatives: ``(k,)`` holds if option k is chosen, a tuple of
    negative numbers -1 - k holds if none of these options is chosen."""
    added: Array
    """Bytes of each option."""


def _simplify(alternatives: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Remove options that hold a block themselves from those that release the block's only node.

    Options that release the same node exclude each other, so one of them cannot release what another one holds.
    """
    nodes = [each for each in alternatives if each and each[0] < 0]
    if len(nodes) != 1 or () in alternatives:
        return alternatives
    kept = {each[0] for each in alternatives if each[0] >= 0}
    releasing = {-1 - number for number in nodes[0]}
    remaining = tuple(sorted(-1 - option for option in releasing - kept))
    others = {(option,) for option in kept - releasing}
    return {remaining, *others} if remaining else {()}
