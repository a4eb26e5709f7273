"""Closed forms from the papers: bubbles, memory and time without a simulation.

They hold for equal stages and are what the simulator is tested against; the planner simulates.
Sources: Chimera (Li and Hoefler, SC'21), PipeDream-2BW (Narayanan et al., ICML'21), Zero Bubble Pipeline
Parallelism (Qi et al., ICLR'24), DualPipe (DeepSeek-AI), Megatron-LM (Narayanan et al., SC'21).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from memtrace.errors import MemtraceError


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row of Chimera's comparison table; weights and activations in units of one stage."""

    bubble_ratio: Fraction
    weights: tuple[int, int]
    """Least and most over workers, in weights of one stage."""
    activations: tuple[int, int]
    """Least and most over workers, in activations of one stage and micro-batch."""


def scheme(name: str, num_stages: int, num_microbatches: int, *, f: int = 1) -> Scheme:
    """The row of ``name`` for N >= D micro-batches; MemtraceError for a name that is not in the table.

    Ratios are the paper's: of GEMS the limit of many micro-batches with backward = 2 x forward, of Chimera
    the one without bubbles between units (forward doubling).
    """
    d, n = num_stages, num_microbatches
    flushed = Fraction(d - 1, n + d - 1)
    rows = {
        "pipedream": Scheme(Fraction(0), (1, d), (1, d)),
        "pipedream-2bw": Scheme(Fraction(0), (2, 2), (1, d)),
        "gpipe": Scheme(flushed, (1, 1), (n, n)),
        "gems": Scheme(Fraction(2 * (d - 1), 2 * d + 1), (2, 2), (1, 1)),
        "dapple": Scheme(flushed, (1, 1), (1, d)),
    }
    if name == "chimera":
        ratio = Fraction(d - 2 * f, 2 * f * n + d - 2 * f)
        return Scheme(ratio, (2 * f, 2 * f), (d - d // (2 * f) + 1, d))
    if name not in rows:
        raise MemtraceError(f"{name!r} is not in Chimera's table of schemes: {', '.join([*rows, 'chimera'])}")
    return rows[name]


def chimera_in_flight(num_stages: int, worker: int, *, f: int = 1) -> int:
    """Most micro-batches in flight on a worker of Chimera with N = D, over all its stages."""
    group = num_stages // f
    place = worker % group
    return num_stages - num_stages // (2 * f) + 1 + min(place, group - 1 - place)


def interleaved_in_flight(num_workers: int, num_microbatches: int, worker: int, chunks: int) -> int:
    """Most (chunk, micro-batch) pairs in flight on a worker of interleaved 1F1B."""
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
    """Chimera's performance model for N = D, f = 1: its critical path has D forwards and 2D - 2 backwards."""
    forwards, backwards = num_stages, 2 * num_stages - 2
    return (forward_s + message_s) * forwards + (backward_s + message_s) * backwards + unoverlapped_s


def zero_bubble_idle_s(
    name: str, num_workers: int, forward_s: float, input_backward_s: float, weight_backward_s: float
) -> float:
    """Idle seconds of the busiest worker under dapple, zb-h1 and zb-h2 (not below 0)."""
    weights = {"dapple": -1, "zb-h1": 1, "zb-h2": 2}[name]
    return max(0.0, (num_workers - 1) * (forward_s + input_backward_s - weights * weight_backward_s))


def dualpipe_idle_s(num_stages: int, overlapped_s: float, backward_s: float, weight_backward_s: float) -> float:
    """Idle seconds under DualPipe; ``overlapped_s`` is of a forward and a backward together."""
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
    """PipeDream-2BW's memory of the fullest worker; ``versions`` = 1 gives 1F1B with a flush.

    Args:
        weight_bytes: one version of the whole model's weights.
        activation_bytes: all intermediate activations of the whole model for one micro-batch.
        input_bytes: the input of one stage for one micro-batch.
        depth: stages.
        recompute: keep only inputs.
        versions: of the weights.
    """
    kept = activation_bytes / depth * (1 if recompute else depth)
    return versions * weight_bytes / depth + kept + depth * input_bytes


def gpipe_recompute_bytes(
    weight_bytes: float, activation_bytes: float, input_bytes: float, depth: int, num_microbatches: int
) -> float:
    """GPipe's memory with recomputation, as the 2BW paper counts it."""
    return weight_bytes / depth + activation_bytes / depth + num_microbatches * input_bytes


def two_bw_microbatch_s(
    stage_s: list[float],
    message_s: list[float],
    all_reduce_s: list[float],
    updates_every: int,
    *,
    recompute: bool,
) -> float:
    """2BW's seconds a micro-batch once pipelined: the slowest stage, or its share of the all-reduce.

    One entry a stage: compute of forward and backward, messages in and out, all-reduce of its weights.
    """
    factor = 4 / 3 if recompute else 1.0
    return max(
        max(factor * compute + message, reduce / updates_every)
        for compute, message, reduce in zip(stage_s, message_s, all_reduce_s, strict=True)
    )
