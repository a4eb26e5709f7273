"""How the clocks of the ranks of a job relate."""

from __future__ import annotations

from memtrace.format.manifest import Manifest


def clock_shift_ns(manifest: Manifest, reference: Manifest) -> int:
    """Return what to add to the times of one rank to get times of the reference rank.

    The offset measured during recording, else the difference of the wall clocks, or 0 where these are unknown.
    """
    offsets = [each.clock.offset_ns if each.clock else None for each in (manifest, reference)]
    if offsets[0] is not None and offsets[1] is not None:
        return int(offsets[0]) - int(offsets[1])
    begins = [each.t0_epoch_ns for each in (manifest, reference)]
    return int(begins[0]) - int(begins[1]) if begins[0] is not None and begins[1] is not None else 0
