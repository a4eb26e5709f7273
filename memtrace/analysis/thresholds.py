"""Thresholds of step detection, stability, findings, leaks, verdicts and swaps: value, unit and reason of each.

Shares are fractions from 0 to 1. The values were chosen on the eight programs of ``tests/programs/training.py``, the
loops in ``tests/analysis/test_step_detection.py`` and recorded CUDA snapshots. Those tests fail when a value is moved
too far.
"""

from __future__ import annotations

from typing import Final

# -- warm-up and minimum numbers of steps --------------------------------------------------------------------------

WARM_UP_STEPS: Final = 2
"""Number of steps excluded at the start: they allocate optimizer state and library workspaces, which then stay."""
MIN_GROWING_STEPS: Final = 3
"""Minimum number of steps in which a site must grow before it is reported as a leak; a buffer may fill up in two."""
MIN_STEPS_AFTER_WARM_UP: Final = MIN_GROWING_STEPS + 1
"""Minimum number of steps after warm-up that leak analysis needs: growth is measured between the ends of two steps."""
MIN_STEPS_FOR_ALLOCATION_FIT: Final = 4
"""Minimum number of steps for allocations = c0 + c1 n: with fewer, the median step is too often an unusual one."""

# -- periodicity ---------------------------------------------------------------------------------------------------

MIN_CYCLE_STARTS: Final = 3
"""Minimum number of occurrences of a symbol that starts a cycle, so that two complete cycles can be compared."""
MIN_SHARE_ONCE: Final = 0.8
"""Share of cycles in which a symbol must occur exactly once to belong to the cycle: warm-up and odd steps may
differ."""
MAX_CANDIDATE_COUNTS: Final = 8
"""Occurrence counts that are tried as the number of cycles, heaviest first; bounds the run time."""
MAX_REFERENCE_SYMBOLS: Final = 3
"""Symbols that are tried as the start of a cycle for each candidate count; bounds the run time."""
COUNT_TOLERANCE_DIVISOR: Final = 10
"""Symbols of one cycle may differ in occurrences by the candidate count divided by this: a symbol may be missing from
one cycle in ten."""
MIN_COUNT_TOLERANCE: Final = 2
"""The same difference in occurrences for short sequences: a cut first and a cut last cycle differ by two."""

# -- accepting detected steps --------------------------------------------------------------------------------------

MIN_CONFIDENCE: Final = 0.5
"""Minimum confidence of detected steps; below it a trace is reported as not iterative."""
MIN_COVERED_SHARE: Final = 0.5
"""Share of all events that the detected steps should cover. With less, confidence falls in proportion."""
MAX_STEP_LENGTH_RATIO: Final = 4
"""Length of the longest plausible step, in median steps: a cycle within steps has long pauses between its runs."""
MIN_REUSE: Final = 0.5
"""Share of the older blocks a step touches that the step before must have touched. Steps share the weights; the layers
of one step do not."""
MIN_FIRST_STEP_SHARE: Final = 0.5
"""Length of the events before the first boundary, in median steps, from which they count as a step of their own."""
MAX_FIRST_STEP_RATIO: Final = 3
"""Length of the events before the first boundary, in median steps, beyond which they also hold set-up work."""
LAST_STEP_RATIOS: Final = (0.5, 2)
"""Length of the events after the last boundary, in median steps, within which they count as the last step."""

MIN_REPEATS_PER_STEP: Final = 1.25
"""Occurrences of each frequent sequence of three operators in a call of ``Optimizer.step`` from which the optimizer is
taken to update its parameters one after the other."""

# -- detection from parameter updates ------------------------------------------------------------------------------

MIN_PARAMETER_LIFETIME_SHARE: Final = 0.4
"""Share of the trace for which a block must live to count as a parameter or a buffer."""
MIN_PAUSE_SHARE: Final = 0.5
"""Pause between updates, as a share of the longest within a cycle, after which a step may end (two optimizers that
alternate have two)."""
MAX_COUNTER_BYTES: Final = 8
"""Largest block that may be a counter (``step``, ``num_batches_tracked``); counters are updated out of step with the
optimizer."""
MIN_READS_PER_UPDATE: Final = 0.25
"""Reads outside of updates, per update, from which a block of counter size counts as a parameter: layers read it
too."""

# -- detection from allocations ------------------------------------------------------------------------------------

MAX_RATED_CYCLES: Final = 4
"""Cycles whose boundaries are examined in full; bounds the run time."""
MAX_DRIFT: Final = 0.5
"""Change of live bytes from step to step, as a share of what a step allocates beyond its start. The layers of one
forward pass retain their activations and exceed it."""
MAX_OFFSET_SHARE: Final = 0.1
"""Distance of a cycle's memory minimum from the usual place, as a share of the cycle, beyond which the usual place is
used."""
MIN_LIKELY_CONFIDENCE: Final = 0.9
"""Confidence of a cycle that is considered at all, as a share of the highest."""
MIN_LIKELY_WEIGHT: Final = 0.2
"""Weight of a cycle that is considered at all, as a share of the heaviest."""
MAX_SLOWER_CYCLE_SHARE: Final = 0.6
"""Number of cycles of a slower repetition, as a share of the faster one it may replace (accumulation: a half or
less)."""
CONFIDENCE_WITH_BACKWARD: Final = 0.95
"""Confidence factor where each step holds one backward pass."""
CONFIDENCE_WITHOUT_BACKWARD: Final = 0.8
"""Confidence factor where the trace does not record backward passes."""
CONFIDENCE_SEVERAL_BACKWARDS: Final = 0.6
"""Confidence factor where steps hold several backward passes: the optimizer may have stepped after each of them."""
CONFIDENCE_MAYBE_LAYERS: Final = 0.4
"""Confidence factor where neither backward passes nor modules distinguish a step from one layer of many."""

# -- stability and block signatures --------------------------------------------------------------------------------

MIN_USUAL_SHARE: Final = 0.5
"""Share of steps in which a signature, or a size of it, must occur to be part of the usual step."""
MIN_MATCHING_BYTES: Final = 0.99
"""Share of matching bytes below which a step is reported as unusual: scalars such as losses may differ in any step."""
MIN_SHIFTED_AGREEMENT: Final = 0.5
"""Share of marked steps whose detected end must have the same offset for the offset to be reported."""

# -- wasted memory ---------------------------------------------------------------------------------------------------

MIN_STEPS_FOR_LEAKS: Final = WARM_UP_STEPS + MIN_STEPS_AFTER_WARM_UP
"""Minimum number of steps for finding leaks: with fewer, they look like memory that is allocated once."""
MIN_FINDING_SHARE: Final = 0.01
"""Share of the peak that a finding must waste or save to be reported (unless ``min_bytes`` is given) or to be a
hint."""
MAX_REPLAYS: Final = 25
"""Most findings of one pattern that are replayed: those that waste most at the peak."""
MIN_IDLE_SHARE: Final = 0.1
"""A block is idle if no operator touches it for this share of the operator calls of a step (of the whole trace where
no steps are known)."""
MAX_SILENT_NODES: Final = 16
"""Most consecutive nodes of a graph that may run in backward without an operator of their own."""
MIN_SHARE_OF_GRAPH: Final = 0.9
"""Share of the bytes of a dead graph that the line must make which is reported for the graph."""
MAX_OPS_OF_CALL: Final = 3
"""Operator calls from an operator to the one that it passes its result on to, within one call of the program."""

# -- leaks ---------------------------------------------------------------------------------------------------------

MAX_LOST_SHARE: Final = 0.1
"""Share of its gains that a leaking site may free again; a cache that is emptied frees more."""
MIN_GROWTH_SPAN: Final = 3
"""Growth must extend over one in this many steps, and into the last such part: a cache that has filled up does
neither."""
MIN_TREND_DEVIATIONS: Final = 3.3
"""Standard deviations by which the rank correlation of live bytes and step (Mann-Kendall) must exceed that of chance:
one steady program in two thousand does."""
MIN_EXTRA_STEPS: Final = 2
"""Steps beyond the usual lifetime of its signature from which a block is reported as retained for longer than
usual."""
MAX_USUAL_LIFETIME_STEPS: Final = 1
"""Usual lifetime, in step ends, up to which a signature is expected to be freed within its step or the next."""

# -- swap candidates -----------------------------------------------------------------------------------------------

MIN_SWAP_BYTES: Final = 1 << 20
"""Smallest block worth swapping by default: below about 1 MiB the latency of a copy dominates its time."""

# -- verdicts and explanations ----------------------------------------------------------------------------------------

MIN_WAIT_SHARE: Final = 0.1
"""Share of the time of all steps that waiting for data must take to be a hint."""
MIN_ROUNDING_SHARE: Final = 0.1
"""Share of the requested bytes that rounding must add before it is worth reducing."""
CONTEXT_BYTES: Final = 1 << 30
"""More than the context and the libraries of one process usually take on a GPU."""
MIN_FRAGMENTED_SHARE: Final = 0.05
"""Share of the reserved memory that must be unused when a request fails for fragmentation to be the cause: a little is
always unused."""
