"""Formulas from the papers for bubbles, memory and time.

They hold for equal stages. The tests compare the simulator with them; nothing else uses them.
Sources: Chimera (Li and Hoefler, SC 2021), PipeDream-2BW (Narayanan et al., ICML 2021), Zero Bubble Pipeline
Parallelism (Qi et al., ICLR 2024), DualPipe (DeepSeek-AI, 2025), Megatron-LM (Narayanan et al., SC 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from memtrace.errors import MemtraceError


@dataclass(frozen=True, slots=True)
class ChimeraTableRow:
    """One row of the comparison of schedules in the Chimera paper."""

    bubble_ratio: Fraction
    weights: tuple[int, int]
    """Minimum and maximum over workers, in multiples of the weights of one stage."""
    activations: tuple[int, int]
    """Minimum and maximum over workers, in multiples of the activations of one stage and micro-batch."""


def chimera_table_row(name: str, num_stages: int, num_microbatches: int, *, f: int = 1) -> ChimeraTableRow:
    """The row of schedule ``name`` for N >= D micro-batches.

    The bubble ratio of GEMS is the limit of many micro-batches with backward = 2 x forward; that of Chimera has no
    bubbles between units (forward doubling).

    Raises:
        MemtraceError: the table has no such schedule.
    """
    d, n = num_stages, num_microbatches
    flushed = Fraction(d - 1, n + d - 1)
    rows = {
        "pipedream": ChimeraTableRow(Fraction(0), (1, d), (1, d)),
        "pipedream-2bw": ChimeraTableRow(Fraction(0), (2, 2), (1, d)),
        "gpipe": ChimeraTableRow(flushed, (1, 1), (n, n)),
        "gems": ChimeraTableRow(Fraction(2 * (d - 1), 2 * d + 1), (2, 2), (1, 1)),
        "1f1b": ChimeraTableRow(flushed, (1, 1), (1, d)),
    }
    if name == "chimera":
        ratio = Fraction(d - 2 * f, 2 * f * n + d - 2 * f)
        return ChimeraTableRow(ratio, (2 * f, 2 * f), (d - d // (2 * f) + 1, d))
    if name not in rows:
        raise MemtraceError(f"the Chimera paper has no row for {name!r}; choose one of {', '.join([*rows, 'chimera'])}")
    return rows[name]


def chimera_in_flight(num_stages: int, worker: int, *, f: int = 1) -> int:
    """Peak number of micro-batches in flight on a worker of Chimera with N = D, over all its stages."""
    group = num_stages // f
    place = worker % group
    return num_stages - num_stages // (2 * f) + 1 + min(place, group - 1 - place)


def interleaved_in_flight(num_workers: int, num_microbatches: int, worker: int, chunks: int) -> int:
    """Peak number of (chunk, micro-batch) pairs in flight on a worker of interleaved 1F1B."""
    ahead = 2 * (num_workers - worker - 1) + (chunks - 1) * num_workers + 1
    return min(ahead, chunks * num_microbatches)


def chimera_step_s(
    forward_s: float,
    backward_s: float,
    num_stages: int,
    *,
    message_s: float = 0.0,
    unoverlapped_s: float = 0.0,
) -> float:
    """Chimera's performance model for N = D, f = 1: D forwards and 2D - 2 backwards on the critical path."""
    forwards, backwards = num_stages, 2 * num_stages - 2
    return (forward_s + message_s) * forwards + (backward_s + message_s) * backwards + unoverlapped_s


def zero_bubble_idle_s(
    name: str, num_workers: int, forward_s: float, input_backward_s: float, weight_backward_s: float
) -> float:
    """Idle seconds of the busiest worker under 1f1b, zb-h1 or zb-h2 (at least 0)."""
    weights = {"1f1b": -1, "zb-h1": 1, "zb-h2": 2}[name]
    return max(0.0, (num_workers - 1) * (forward_s + input_backward_s - weights * weight_backward_s))


def dualpipe_idle_s(num_stages: int, overlapped_s: float, backward_s: float, weight_backward_s: float) -> float:
    """Idle seconds under DualPipe; ``overlapped_s`` is the time of an overlapped forward and backward."""
    return (num_stages / 2 - 1) * (overlapped_s + backward_s - 3 * weight_backward_s)


def two_bw_bytes(
    weight_bytes: float,
    activation_bytes: float,
    input_bytes: float,
    depth: int,
    *,
    recompute: bool = False,
    versions: int = 2,
) -> float:
    """Memory of the fullest worker under PipeDream-2BW.

    Args:
        weight_bytes: one version of the whole model's weights.
        activation_bytes: all intermediate activations of the whole model for one micro-batch.
        input_bytes: the input of one stage for one micro-batch.
        depth: number of stages.
        recompute: stages keep only their inputs.
        versions: weight versions; 1 is 1F1B with a flush.
    """
    kept = activation_bytes / depth * (1 if recompute else depth)
    return versions * weight_bytes / depth + kept + depth * input_bytes


def gpipe_recompute_bytes(
    weight_bytes: float, activation_bytes: float, input_bytes: float, depth: int, num_microbatches: int
) -> float:
    """Memory of the fullest worker under GPipe with recomputation, as the 2BW paper counts it."""
    return weight_bytes / depth + activation_bytes / depth + num_microbatches * input_bytes


def two_bw_microbatch_s(
    stage_s: list[float],
    message_s: list[float],
    all_reduce_s: list[float],
    updates_every: int,
    *,
    recompute: bool,
) -> float:
    """Seconds per micro-batch of PipeDream-2BW in the steady state: the slowest stage, or its share of the all-reduce.

    Args:
        stage_s: forward and backward of each stage.
        message_s: messages in and out of each stage.
        all_reduce_s: all-reduce of the weights of each stage.
        updates_every: micro-batches per update.
        recompute: stages repeat their forward before the backward.
    """
    factor = 4 / 3 if recompute else 1.0
    return max(
        max(factor * compute + message, reduce / updates_every)
        for compute, message, reduce in zip(stage_s, message_s, all_reduce_s, strict=True)
    )
