"""The changes that a what-if can make to a step: what each does to its memory and to its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final, Protocol

import numpy as np

from memtrace.analysis.attribution import op_column
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning import operator_graph, sharding
from memtrace.planning.operator_graph import OperatorGraph
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.step_accesses import step_accesses
from memtrace.planning.tensor_parallel import KINDS, Kind, split_tensors
from memtrace.planning.timeline import Timeline
from memtrace.planning.timeline_moments import StepMoments
from memtrace.planning.timeline_selection import BlockSelection, check_category
from memtrace.planning.whatif_accumulate import accumulate
from memtrace.planning.whatif_autocast import autocast
from memtrace.planning.whatif_optimizer import (
    IMPLEMENTATIONS,
    Implementation,
    change_optimizer,
    default_implementation,
    remove_update,
)
from memtrace.trace import Trace
from memtrace.units import format_count

ELEMENT_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1, "int4": 0.5}
_ABBREVIATIONS: Final = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16",
                         "bf16": "bfloat16", "fp8": "float8"}  # fmt: skip
_NO_KERNEL_TIMES: Final = (
    "The time is unknown, because the trace has no times of kernels: record with device_time=True on a GPU."
)


@dataclass(frozen=True)
class StepState:
    """A recorded step with changes."""

    trace: Trace
    device: str
    step: RecordedStep
    moments: StepMoments
    timeline: Timeline
    graph: OperatorGraph | None
    """None: the time of the changed step is unknown."""
    batch_factor: float = 1
    """The batch as a multiple of the recorded one."""
    assumptions: tuple[str, ...] = ()
    """What the figures rest on, one sentence each."""

    @property
    def times_kernels(self) -> bool:
        """Whether the graph has the time of what the operators compute: on a GPU only with device times."""
        return self.graph is not None and (self.device == "cpu" or bool(self.graph.is_device.any()))

    def with_memory(self, timeline: Timeline) -> StepState:
        """Return the state with another timeline."""
        return replace(self, timeline=timeline)

    def with_time(self, change: Callable[[OperatorGraph], OperatorGraph]) -> StepState:
        """Return the state with a changed operator graph, if it has one."""
        return self if self.graph is None else replace(self, graph=change(self.graph))

    def without_time(self, reason: str) -> StepState:
        """Return the state without a time, which a change makes unknown; the first reason is enough."""
        return self if self.graph is None else replace(self, graph=None).assuming(reason)

    def assuming(self, *sentences: str) -> StepState:
        """Return the state with further assumptions."""
        return replace(self, assumptions=tuple(dict.fromkeys((*self.assumptions, *sentences))))


class Change(Protocol):
    """One change to a step."""

    def describe(self) -> str:
        """Return the change as a short line of text."""

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change; MemtraceError where the trace lacks what the change needs."""


@dataclass(frozen=True)
class ScaleBatch:
    """Make the batch larger or smaller."""

    factor: float

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"batch x {self.factor:g}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        scaled = state.with_memory(state.timeline.scale_batch(self.factor))
        scaled = replace(scaled, batch_factor=state.batch_factor * self.factor)
        grown = state.timeline.block[(state.timeline.block >= 0) & (state.timeline.constant < state.timeline.size)]
        if not state.times_kernels:
            return scaled.without_time(_NO_KERNEL_TIMES)
        accesses = step_accesses(state.trace, state.step)
        calls = accesses.op_id[np.unique(accesses.call[np.isin(accesses.block, grown)])]
        timed = scaled.with_time(lambda graph: graph.scale(np.isin(graph.op_id, calls) & graph.computes(), self.factor))
        return timed.assuming(
            "The time of operators that use data of the batch is taken as proportional to its size; small operators "
            "take less."
        )


@dataclass(frozen=True)
class Accumulate:
    """Split the batch into micro-batches and accumulate their gradients."""

    num_microbatches: int

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"accumulate over {format_count(self.num_microbatches, 'micro-batch', 'micro-batches')}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        return state.with_memory(accumulate(state.timeline, self.num_microbatches)).assuming(
            "The micro-batches together compute as long as the batch."
        )


@dataclass(frozen=True)
class Remove:
    """Remove blocks, such as activations that are recomputed."""

    selection: BlockSelection

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"remove {self.selection.describe()}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        mask = _find(self.selection, state)
        reason = "The time without the removed blocks is unknown."
        return state.with_memory(state.timeline.remove(mask)).without_time(reason)


@dataclass(frozen=True)
class Resize:
    """Make blocks smaller or larger by a factor, for example by compression."""

    selection: BlockSelection
    factor: float

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"{self.selection.describe()} x {self.factor:g}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        mask = _find(self.selection, state)
        reason = "The time with resized blocks is unknown."
        return state.with_memory(state.timeline.resize(mask, self.factor)).without_time(reason)


@dataclass(frozen=True)
class RemoveOperators:
    """Remove operators, with what they allocate."""

    pattern: str
    """Such as ``aten::native_dropout*``."""

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"remove operators {self.pattern}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        accesses = step_accesses(state.trace, state.step)
        name = op_column(state.trace, accesses.op_id, "name")
        hits = [number for number in np.unique(name).tolist() if self._matches(state.trace.name(number) or "")]
        calls = np.isin(name, hits)
        if not calls.any():
            raise MemtraceError(f"no operator of the step matches {self.pattern!r}. memtrace access lists operators.")
        allocated = accesses.block[accesses.is_alloc & calls[accesses.call]]
        passing = ~state.timeline.of_category("parameter", "gradient", "optimizer_state", "input")
        mask = np.isin(state.timeline.block, allocated) & passing
        removed = state.with_memory(state.timeline.remove(mask))
        return removed.with_time(lambda graph: graph.remove(graph.of_operators(state.trace, self._matches)))

    def _matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern) or fnmatchcase(name.partition(".")[0], self.pattern)


@dataclass(frozen=True)
class ChangeDtype:
    """Keep the blocks of a category in another type."""

    category: str
    dtype: str
    """One of ``ELEMENT_BYTES``."""

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"{self.category} in {self.dtype}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        check_category(self.category)
        factor = ELEMENT_BYTES[self.dtype] / ELEMENT_BYTES["float32"]
        mask = state.timeline.of_category(self.category)
        resized = state.with_memory(state.timeline.resize(mask, factor))
        return resized.without_time("The time with another type of numbers is unknown; --amp predicts it.").assuming(
            f"Every {self.category} block is taken to hold float32, and nothing to be copied to convert it."
        )


@dataclass(frozen=True)
class Autocast:
    """Run forward under ``torch.autocast``."""

    dtype: str

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"autocast to {self.dtype}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        changed = state.with_memory(autocast(state.trace, state.timeline, state.step, state.device))
        changed = changed.assuming("The recorded step computes in float32.")
        if state.device == "cpu" or not state.times_kernels:
            return changed.without_time(
                "The time in half precision is predicted for GPUs with device times only (device_time=True)."
            )
        return changed.with_time(lambda graph: operator_graph.use_half_precision(state.trace, graph)).assuming(
            f"Matrix products take 1/{operator_graph.COMPUTE_SPEEDUP:g} of their time and other kernels "
            f"1/{operator_graph.MEMORY_SPEEDUP:g}, as on GPUs with tensor cores."
        )


@dataclass(frozen=True)
class ChangeOptimizer:
    """Train with another optimizer."""

    name: str
    """One of ``whatif_optimizer.OPTIMIZERS``."""
    implementation: Implementation | None = None
    """None: the one that torch chooses for the device."""

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"optimizer {self.name}" + (f" ({self.implementation})" if self.implementation else "")

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        implementation = self.implementation or default_implementation(state.device)
        timeline = change_optimizer(state.trace, state.timeline, state.moments, self.name, implementation)
        return (
            state.with_memory(timeline)
            .without_time("The time of another optimizer is unknown.")
            .assuming("The optimizer has torch's default options and all of its state.")
        )


@dataclass(frozen=True)
class FuseOptimizer:
    """Update all parameters with one kernel."""

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return "fused optimizer"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        state.moments.require("optimizer")
        fused = state.with_memory(remove_update(state.trace, state.timeline))
        if state.times_kernels:
            fused = fused.with_time(operator_graph.fuse_optimizer)
        else:
            fused = fused.without_time(_NO_KERNEL_TIMES)
        return fused.assuming(
            "A fused update allocates nothing, and takes as long as the operators that it replaces compute together."
        )


@dataclass(frozen=True)
class ScaleBandwidth:
    """Copy between devices and ranks faster or slower."""

    factor: float

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"bandwidth x {self.factor:g}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        return state.with_time(
            lambda graph: graph.scale(graph.of_operators(state.trace, operator_graph.is_transfer), 1 / self.factor)
        )


@dataclass(frozen=True)
class Shard:
    """Split state over the ranks of a job."""

    what: str
    """One of ``sharding.METHODS``, or a category."""
    num_ranks: int
    units: tuple[str, ...] = ()
    """For ``fsdp``: patterns of the wrapped modules; empty: the repeated blocks of the model."""

    def describe(self) -> str:
        """Return the change as a short line of text."""
        units = f" ({', '.join(self.units)})" if self.units else ""
        return f"{self.what}{units} over {format_count(self.num_ranks, 'rank')}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        untimed = state.without_time("The time of communication between ranks is unknown.").assuming(
            "Each rank has the batch of the recorded step."
        )
        if self.what not in sharding.METHODS:
            check_category(self.what)
            split = sharding.shard_category(state.timeline, self.what, self.num_ranks)
            return untimed.with_memory(split)
        units = self.units
        if self.what == "fsdp" and not units:
            units = sharding.find_default_units(state.trace)
        method = next(method for method in sharding.METHODS if method == self.what)
        split = sharding.shard(state.trace, state.timeline, state.moments, method, self.num_ranks, units)
        if self.what not in ("zero3", "fsdp"):
            return untimed.with_memory(split)
        buffers = "Gloo also holds one buffer per collective." if state.device == "cpu" else ""
        sentence = f"Parameters are padded to equal parts and gathered per unit, with prefetch in backward. {buffers}"
        return untimed.with_memory(split).assuming(sentence.strip())


@dataclass(frozen=True)
class TensorParallel:
    """Split every layer over ranks."""

    kind: Kind
    num_ranks: int

    def describe(self) -> str:
        """Return the change as a short line of text."""
        return f"{self.kind} tensor parallelism over {format_count(self.num_ranks, 'rank')}"

    def apply(self, state: StepState) -> StepState:
        """Return the state with the change."""
        split = split_tensors(state.trace, state.timeline, state.step, state.moments, self.kind, self.num_ranks)
        changed = state.with_memory(split).without_time("The time of communication between ranks is unknown.")
        if self.kind == "1d":
            return changed.assuming("Layers are split in pairs, in the order of their forward: by columns, by rows.")
        return changed.assuming("Every layer divides evenly; blocks for a product live while its layer runs.")


def parse_dtype(text: str) -> str:
    """Return the name of a type in ``ELEMENT_BYTES``; MemtraceError if there is none."""
    name = _ABBREVIATIONS.get(text.lower(), text.lower())
    if name not in ELEMENT_BYTES:
        raise MemtraceError(f"the type {text!r} is unknown. Types: {', '.join([*ELEMENT_BYTES, *_ABBREVIATIONS])}.")
    return name


def parse_half_precision(text: str) -> str:
    """Return the type that autocast computes in; MemtraceError if it cannot."""
    name = parse_dtype(text)
    if name not in ("bfloat16", "float16"):
        raise MemtraceError(f"torch.autocast computes in bfloat16 or float16, not in {name}.")
    return name


def parse_implementation(text: str) -> Implementation | None:
    """Return how an optimizer updates; None for no text, MemtraceError if there is no such implementation."""
    if not text:
        return None
    for implementation in IMPLEMENTATIONS:
        if text == implementation:
            return implementation
    raise MemtraceError(f"{text!r} is not an implementation of optimizers. Choose {', '.join(IMPLEMENTATIONS)}.")


def parse_kind(text: str) -> Kind:
    """Return a kind of tensor parallelism; MemtraceError if there is none."""
    for kind in KINDS:
        if text.lower() == kind:
            return kind
    raise MemtraceError(f"{text!r} is not a kind of tensor parallelism. Choose {', '.join(KINDS)}.")


def _find(selection: BlockSelection, state: StepState) -> Array:
    mask = selection.find(state.trace, state.timeline)
    if not mask.any():
        raise MemtraceError(f"the step has no {selection.describe()}: nothing would change.")
    return mask
