"""The patterns of wasted memory that memtrace looks for, and how to fix each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class WastePattern:
    """A way in which a program holds memory that it does not need."""

    name: str
    """The name that users see."""
    pattern_class: str
    """The object-level pattern of DrGPUM (ASPLOS 2023) that this is, or is a special case of."""
    advice: str
    """What to change in the program."""
    is_single_line_fix: bool = True
    """Whether moving, changing or deleting a line is enough; otherwise the fix needs recomputation, offloading or
    in-place operators."""
    is_upper_bound: bool = False
    """Whether the predicted saving is the most that the fix can save."""
    is_reported_by_line: bool = False
    """Whether one fix serves all blocks that a line allocates, whatever their categories."""
    is_reported_once: bool = False
    """Whether all blocks make one finding, however many lines allocate them."""


LEAK: Final = WastePattern(
    "leak", "leak", "Remove the reference (a list, a cache, a hook) that keeps it alive after its last use."
)
RETAINED_GRAPH: Final = WastePattern(
    "retained graph",
    "leak",
    "Store loss.item() or loss.detach() instead of the loss, which keeps its whole autograd graph alive.",
    is_reported_once=True,
)
GRAPH_ACROSS_STEPS: Final = WastePattern(
    "graph kept across steps",
    "leak",
    "Detach what a step passes to the next (hidden.detach()): backward runs through the graphs of all earlier steps.",
    is_reported_once=True,
)
ACCUMULATED_RESULTS: Final = WastePattern(
    "accumulated results",
    "temporary idleness",
    "Keep less of each step's result until the end (argmax, item(), a running sum), or move it to the host.",
    is_single_line_fix=False,
    is_upper_bound=True,
    is_reported_by_line=True,
)
UNUSED_ALLOCATION: Final = WastePattern(
    "unused allocation",
    "unused allocation",
    "Remove the allocation: no operator uses it after it is filled.",
)
LATE_DEALLOCATION: Final = WastePattern(
    "late deallocation",
    "late deallocation",
    "Drop the last reference right after the last use (del, or a smaller scope).",
    is_reported_by_line=True,
)
GRADIENTS_THROUGH_FORWARD: Final = WastePattern(
    "gradients kept through forward",
    "late deallocation",
    "Free the gradients before forward: call zero_grad(set_to_none=True) right after step().",
    is_reported_once=True,
)
FORWARD_WITHOUT_BACKWARD: Final = WastePattern(
    "forward without backward",
    "late deallocation",
    "Run it under torch.no_grad(): no backward follows, but the activations saved for it stay allocated.",
    is_reported_by_line=True,
)
GRAPH_AFTER_BACKWARD: Final = WastePattern(
    "graph kept after backward",
    "late deallocation",
    "Call the last backward through the graph without retain_graph=True, or delete the loss before the next forward.",
    is_reported_once=True,
)
REPLACED_STATE: Final = WastePattern(
    "state of a replaced optimizer",
    "late deallocation",
    "Delete the first optimizer (and what refers to it) before creating the one that updates the same parameters.",
    is_reported_once=True,
)
UNUSED_GRADIENTS: Final = WastePattern(
    "unused gradients",
    "unused allocation",
    "Freeze the parameters (requires_grad_(False)) while it runs, or run it under torch.no_grad() if no gradient must "
    "pass through it: no optimizer uses the gradients that backward computes.",
    is_reported_by_line=True,
)
GRADIENTS_THROUGH_STEP: Final = WastePattern(
    "gradients kept through optimizer step",
    "late deallocation",
    "Free each gradient as soon as it is applied: run the optimizer in backward (register_post_accumulate_grad_hook).",
    is_single_line_fix=False,
    is_reported_once=True,
)
EARLY_ALLOCATION: Final = WastePattern(
    "early allocation", "early allocation", "Allocate it right before its first use."
)
REDUNDANT_ALLOCATION: Final = WastePattern(
    "redundant allocation",
    "redundant allocation",
    "Write the result in place (relu_, add_, inplace=True): its input has the same size and is not used again.",
    is_single_line_fix=False,
)
DOUBLE_COPY: Final = WastePattern(
    "double copy",
    "redundant allocation",
    "Copy once: .to() followed by .contiguous() makes a second copy while the first is still allocated.",
)
TEMPORARY_IDLENESS: Final = WastePattern(
    "temporary idleness",
    "temporary idleness",
    "Offload it to the host while it is idle, or, if forward made it, recompute it (torch.utils.checkpoint): its "
    "content is needed again.",
    is_single_line_fix=False,
    is_upper_bound=True,
)
DEAD_WRITE: Final = WastePattern(
    "dead write",
    "dead write",
    "Remove the first write: the data is overwritten before it is read (unless the second write covers only a part).",
)

ALL_PATTERNS: Final = (
    LEAK,
    RETAINED_GRAPH,
    GRAPH_ACROSS_STEPS,
    UNUSED_ALLOCATION,
    LATE_DEALLOCATION,
    GRADIENTS_THROUGH_FORWARD,
    FORWARD_WITHOUT_BACKWARD,
    GRAPH_AFTER_BACKWARD,
    REPLACED_STATE,
    UNUSED_GRADIENTS,
    GRADIENTS_THROUGH_STEP,
    EARLY_ALLOCATION,
    REDUNDANT_ALLOCATION,
    DOUBLE_COPY,
    TEMPORARY_IDLENESS,
    ACCUMULATED_RESULTS,
    DEAD_WRITE,
)
