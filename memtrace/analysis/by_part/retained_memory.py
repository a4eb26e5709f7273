"""The retained memory of a long trace, for ``memtrace.analysis.leaks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.by_part.live_blocks import describe_blocks
from memtrace.analysis.by_part.retained import Changes, RetainedFacts, close_blocks
from memtrace.analysis.retained_memory import BlocksAtEnd, live_series
from memtrace.format.arrays import Array
from memtrace.trace import Trace


class LongRetainedMemory:
    """The blocks of a long trace that are live at two ends of steps or more (``leaks.RetainedMemory``)."""

    def __init__(
        self,
        trace: Trace,
        facts: RetainedFacts,
        numbers: Array,
        collected_bytes: Mapping[int, int] | None,
        *,
        has_phases: bool,
    ) -> None:
        self._trace = trace
        self._has_phases = has_phases
        self.num_ends = num_ends = len(numbers)
        self.numbers = numbers
        last = np.full(len(facts.open.id), trace.part_numbers[-1])
        still_live = close_blocks(facts.open, np.full(len(last), num_ends), last, num_ends)
        self._live = facts.live.joined(still_live.live)
        self._kept = facts.kept.joined(still_live.kept)
        self._at_end = facts.at_end.joined(still_live.at_end)
        stacks = np.unique(np.concatenate([facts.stacks, still_live.stacks]))
        sites, site = allocation_sites(trace, stacks)
        self.sites: Sequence[str | None] = sites
        self._stacks_of_site = [stacks[site == number] for number in range(len(sites))]
        self._collected_bytes = collected_bytes
        self.gc_freed_bytes = None if collected_bytes is None else sum(collected_bytes.values())

    def of_site(self, number: int) -> tuple[Array, Array]:
        """See ``RetainedMemory``."""
        stacks = self._stacks_of_site[number]
        return self._series(self._live, stacks), self._series(self._kept, stacks)[1:]

    def all_sites(self) -> tuple[Array, Array]:
        """See ``RetainedMemory``."""
        return self._series(self._live, None), self._series(self._kept, None)[1:]

    def _series(self, changes: Changes, stacks: Array | None) -> Array:
        chosen = np.isin(changes.stack, stacks) if stacks is not None else np.ones(len(changes.stack), bool)
        return live_series(changes.step[chosen], changes.bytes[chosen], self.num_ends)

    def at_end(self, number: int) -> BlocksAtEnd:
        """See ``RetainedMemory``."""
        members = self._at_end.take(np.flatnonzero(np.isin(self._at_end.stack, self._stacks_of_site[number])))
        members = members.take(np.argsort(members.id, kind="stable"))
        columns = describe_blocks(self._trace, members.id, members.part, has_phases=self._has_phases)
        return BlocksAtEnd(members.stack, members.size, columns["category"], members.first)

    def gc_freed_bytes_of(self, stacks: Array) -> int:
        """See ``RetainedMemory``."""
        collected = self._collected_bytes or {}
        return sum(collected.get(stack, 0) for stack in np.unique(stacks).tolist())
