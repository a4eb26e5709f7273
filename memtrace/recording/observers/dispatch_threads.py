"""What the threads of the program are doing, for the dispatch observer, and its mode on their stacks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memtrace.format.schema import PHASES

MAX_FORWARD_NODES: Final = 1 << 17
"""Number of autograd nodes whose module and stack are kept for their backward operators."""
_FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = (PHASES.index(name) for name in ("forward", "backward", "optimizer", "other"))


@dataclass
class ObservedThread:
    """What a thread is doing at the moment."""

    index: int
    window: int = 0  # number of the window, between two pauses of the recording, that the rest belongs to
    modules: list[tuple[int, int]] = field(default_factory=list)  # name id and start of each module call
    ranges: list[tuple[str, int]] = field(default_factory=list)  # name and start of each profiler range
    backward_calls: int = 0
    optimizer_ranges: int = 0
    wait_ranges: int = 0
    modules_outside: int = 0  # depth of module calls at which backward or the optimizer began
    forward: tuple[int, int] | None = None  # start, and end so far, of the current forward phase
    last_sequence: int = 0
    creates_nodes: bool = False  # whether it runs forward operators that autograd records
    has_own_mode: bool = False  # whether the mode was pushed for the module call or backward pass that is running


def phase_of(thread: ObservedThread) -> tuple[int, bool]:
    """Return the phase of the calling thread, and whether it is recomputing a forward pass."""
    deeper = len(thread.modules) > thread.modules_outside
    if thread.backward_calls > 0 or torch._C._current_autograd_node() is not None:
        return _BACKWARD, deeper
    if thread.optimizer_ranges > 0 and not deeper:
        return _OPTIMIZER, False
    return (_FORWARD if deeper else _OTHER), False


class ForwardNodes:
    """Module and stack of autograd nodes, for their backward operators.

    Every thread numbers the nodes that it creates by itself.
    """

    def __init__(self) -> None:
        self._nodes: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def keep(self, thread: ObservedThread, nodes: range, module: int, stack: int) -> None:
        """Note the module and the stack of new nodes."""
        thread.creates_nodes |= len(nodes) > 0
        for number in nodes:
            self._nodes[thread.index, number] = (module, stack)
            if len(self._nodes) > MAX_FORWARD_NODES:
                self._nodes.popitem(last=False)

    def find(
        self, thread: ObservedThread, threads: Sequence[ObservedThread], sequence_nr: int
    ) -> tuple[int, int] | None:
        """Return the module and the stack of a node that runs on ``thread``; None: unknown.

        A node runs on the thread that called backward, or on a thread of autograd's own, which creates no nodes.

        Args:
            thread: the thread that runs the node.
            threads: all threads.
            sequence_nr: the number of the node.
        """
        creators = [thread] if thread.creates_nodes else [other for other in threads if other.creates_nodes]
        return self._nodes.get((creators[0].index, sequence_nr)) if len(creators) == 1 else None


def needs_mode(mode: TorchDispatchMode, thread: ObservedThread) -> bool:
    """Return whether the calling thread is one that the program started, and lacks the mode."""
    if thread.index == 0 or thread.has_own_mode or mode in _get_current_dispatch_mode_stack():
        return False
    return torch._C._current_autograd_node() is None  # otherwise a thread of autograd's


def enter_mode(mode: TorchDispatchMode, thread: ObservedThread) -> None:
    """Push the mode for a module call or a backward pass, unless the program has a mode of its own on this thread.

    Above a mode of the program, ours would be taken for it when the program leaves its mode.
    """
    if not _get_current_dispatch_mode_stack():
        torch._C._push_on_torch_dispatch_stack(mode)
        thread.has_own_mode = True


def leave_mode(mode: TorchDispatchMode, thread: ObservedThread) -> None:
    """Pop the mode when the outermost module call and backward pass have ended."""
    if thread.has_own_mode and not thread.modules and thread.backward_calls == 0:
        thread.has_own_mode = False
        if (stack := _get_current_dispatch_mode_stack()) and stack[-1] is mode:
            torch._C._pop_torch_dispatch_stack(None)
