"""What a plan can change in a training program. Every action is a value: JSON writes and reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memtrace.units import format_bytes, format_count, format_names


@dataclass(frozen=True)
class Recompute:
    """Discard what the forward calls of modules save for backward, and call them again in backward."""

    modules: tuple[str, ...]
    """Qualified names, as the trace has them."""
    kept_operators: tuple[str, ...] = ()
    """Operators whose outputs are kept instead of computed again (selective recomputation), such as ``aten::addmm``."""
    kind: Literal["recompute"] = "recompute"

    def describe(self) -> str:
        """Return the action as one line of text."""
        kept = f", except the outputs of {', '.join(self.kept_operators)}" if self.kept_operators else ""
        return f"Recompute {format_names(self.modules)} in backward{kept}."

    def module_names(self) -> tuple[str, ...]:
        """Return the names of the modules that the action changes."""
        return self.modules

    def split(self) -> tuple[Recompute, ...]:
        """Return an action for each module."""
        return tuple(replace(self, modules=(module,)) for module in self.modules)


@dataclass(frozen=True)
class OffloadedTensor:
    """A tensor that autograd saves in a forward call of a module, and that waits in host memory until backward."""

    module: str
    """Qualified name of the module whose forward call saves the tensor; empty: outside all modules."""
    index: int
    """Position among the storages of this size that this call saves first, parameters and buffers excluded, from 0."""
    bytes: int
    """Size of the tensor's storage."""
    wait_nodes: int | None = None
    """The copy out has ended when forward has created this many autograd nodes more: otherwise forward waits for it.
    None: forward does not wait."""
    prefetch_nodes: int = 0
    """The copy back begins this many autograd nodes before the one that reads the tensor."""


@dataclass(frozen=True)
class Offload:
    """Copy saved tensors to host memory in forward, and back before backward reads them."""

    tensors: tuple[OffloadedTensor, ...]
    device: str
    """Device of the tensors, such as ``cpu`` or ``cuda:0``."""
    kind: Literal["offload"] = "offload"

    def describe(self) -> str:
        """Return the action as one line of text."""
        size = sum(tensor.bytes for tensor in self.tensors)
        modules = tuple(dict.fromkeys(tensor.module or "(no module)" for tensor in self.tensors))
        return (
            f"Offload {format_count(len(self.tensors), 'saved tensor')} of {format_bytes(size)} "
            f"in {format_names(modules)}."
        )

    def module_names(self) -> tuple[str, ...]:
        """Return the names of the modules that the action changes."""
        return tuple(tensor.module for tensor in self.tensors)

    def split(self) -> tuple[Offload, ...]:
        """Return an action for each tensor."""
        return tuple(replace(self, tensors=(tensor,)) for tensor in self.tensors)


@dataclass(frozen=True)
class Spill:
    """Keep only the shard of the model that computes in device memory; the others wait in host memory."""

    shards: tuple[tuple[str, ...], ...]
    """Qualified names of the modules of each shard, in the order of their forward calls."""
    buffer_bytes: int
    """Device memory for shards on their way to or from host memory while another one computes; 0: no copy overlaps
    computation."""
    recompute: bool = True
    """Whether backward repeats the forward of every module from its input, which waits in host memory. Otherwise the
    tensors that autograd saves stay on the device."""
    kind: Literal["spill"] = "spill"

    def describe(self) -> str:
        """Return the action as one line of text."""
        buffering = f"with a buffer of {format_bytes(self.buffer_bytes)}" if self.buffer_bytes else "without a buffer"
        repeats = ", and recompute its modules in backward" if self.recompute else ""
        return f"Spill the model in {format_count(len(self.shards), 'shard')} {buffering}{repeats}."

    def module_names(self) -> tuple[str, ...]:
        """Return the names of the modules that the action changes."""
        return tuple(name for shard in self.shards for name in shard)

    def split(self) -> tuple[Spill, ...]:
        """Return the action itself: its shards depend on each other."""
        return (self,)
