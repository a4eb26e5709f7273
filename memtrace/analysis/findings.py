"""Findings: memory that is there without need, by pattern and line, ranked by what mending it would save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.analysis import patterns
from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.attribution import PHASE, op_column, step_rows
from memtrace.analysis.block_accesses import most_bytes_of_an_operator, tells_accesses, uses
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.analysis.counterfactual import FOREVER, Absences, peak_without
from memtrace.analysis.growth import MIN_STEPS, WARM_UP_STEPS
from memtrace.analysis.peak import find_peak
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES, NO_BLOCKS
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

MAX_FINDINGS: Final = 25
"""Most findings of one pattern whose peak is replayed; those that hold most at the peak are."""
MIN_SHARE: Final = 0.001
"""Of the peak; what holds less at any time is not named."""

PATTERNS: Final = {
    "leak": "Free it: something keeps it (a list, a cache, a hook) after its last use.",
    "unused_allocation": "Do not make it: nothing reads it.",
    "late_deallocation": "Drop the last reference (del, or a smaller scope) once it is used.",
    "early_allocation": "Make it where it is first used.",
    "redundant_allocation": "Write in place, or free the other block of this size before: its place was free to take.",
    "temporary_idleness": "Recompute it (checkpoint) or move it to the host meanwhile; its content is needed again.",
    "dead_write": "Leave out the first write: it is overwritten unread (unless the second writes only a part).",
}
"""Each pattern with what mends it."""
NAMES: Final = {
    "gradients kept through forward": "Free them before forward: zero_grad(set_to_none=True) right after step().",
    "loss kept with its graph": "Keep loss.item() or loss.detach(), not the loss: it holds the whole graph.",
    "graph kept without backward": "Wrap it in torch.no_grad(): no backward follows, yet its activations stay.",
    "double copy": "Copy once: .to() and .contiguous() made a second copy while the first was still there.",
    "gradients kept through the optimizer's step": "Free each as it is used: step in backward "
    "(register_post_accumulate_grad_hook).",
}
"""Patterns in the clothes that users know, where the evidence is there."""
MECHANISMS: Final = ("temporary_idleness", "redundant_allocation", "gradients kept through the optimizer's step")
"""Patterns and names that take more to mend than moving a line; they are ranked behind the others."""
OF_ALL_LINES: Final = (
    "gradients kept through forward",
    "gradients kept through the optimizer's step",
    "loss kept with its graph",
)
"""Names of which one finding tells, whatever the lines."""
_SILENT_NODES: Final = 16
_COPIES: Final = ("aten::_to_copy", "aten::clone", "aten::contiguous", "aten::copy_", "aten::to.")


@dataclass(frozen=True)
class Finding:
    """One pattern at one line. Bytes and ns."""

    pattern: str
    name: str | None
    """One of NAMES, where the evidence is there."""
    site: str | None
    category: str
    num_blocks: int
    bytes: int
    """The most that is there without need at once."""
    idle_byte_seconds: float
    """Bytes times the time for which they are there without need."""
    covers_peak: bool
    peak_if_mended_bytes: int
    saved_bytes: int
    """Of the peak, by replaying the timeline without it."""
    advice: str
    absences: Absences

    @property
    def needs_mechanism(self) -> bool:
        """Whether mending it takes more than moving a line."""
        return self.name in MECHANISMS or (self.name is None and self.pattern in MECHANISMS)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values, without the blocks."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS: Final = ("pattern", "name", "site", "category", "num_blocks", "bytes", "idle_byte_seconds", "covers_peak",
                 "peak_if_mended_bytes", "saved_bytes", "advice")  # fmt: skip


@dataclass(frozen=True)
class DeviceFindings:
    """The findings of one device, those that save most first; patterns that need a mechanism behind the others, and
    behind all what saves nothing of the peak."""

    device: str
    peak_bytes: int
    lower_bound_bytes: int | None
    """The most bytes one operator touches: no schedule is below it. None: not told."""
    peak_if_all_mended_bytes: int | None
    """With every finding mended at once that saves something and needs no mechanism; None for a file of totals."""
    findings: tuple[Finding, ...]
    not_judged: tuple[str, ...]
    """Patterns that the trace cannot tell, each with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        told = {name: getattr(self, name) for name in ("device", "peak_bytes", "lower_bound_bytes")}
        return told | {
            "peak_if_all_mended_bytes": self.peak_if_all_mended_bytes,
            "findings": [finding.as_dict() for finding in self.findings],
            "not_judged": list(self.not_judged),
        }


def findings(trace: Trace, device: str, *, min_bytes: int | None = None) -> DeviceFindings:
    """What is there without need on a device of a single-rank trace; worked out once.

    ``min_bytes``: findings that hold less at any time are left out; by default a thousandth of the peak. Sources: the
    patterns of DrGPUM; early and late by msMemScope's condition, that another block was freed or made in between.
    """
    return trace.cached(_find, device, min_bytes)


def findings_table(trace: Trace) -> pd.DataFrame:
    """One row a finding of any device: the columns of ``Finding`` but its blocks, and ``device`` first."""
    import pandas as pd

    rows = [{"device": device} | one.as_dict() for device in trace.devices for one in findings(trace, device).findings]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=["device", *FIELDS])
    return frame


def _find(trace: Trace, device: str, min_bytes: int | None) -> DeviceFindings:
    found, top = blocks(trace), find_peak(trace, device)
    if not trace.has_blocks:
        reason = f"all patterns: {NO_BLOCKS}"
        return DeviceFindings(device, top.requested.bytes, None, None, (), (reason,))
    chosen = np.flatnonzero((found.device == trace.devices.index(device)) & (found.size > 0))
    least = int(MIN_SHARE * top.requested.bytes) if min_bytes is None else min_bytes
    listed: list[Finding] = []
    for pattern, name, absences in _all(trace, chosen):
        listed += _by_line(trace, device, pattern, name, absences, least)
    listed.sort(key=lambda one: (not one.saved_bytes, one.needs_mechanism, -one.saved_bytes, -one.idle_byte_seconds))
    mended = [one.absences for one in listed if one.saved_bytes > 0 and not one.needs_mechanism]
    return DeviceFindings(
        device=device,
        peak_bytes=top.requested.bytes,
        lower_bound_bytes=most_bytes_of_an_operator(trace, device),
        peak_if_all_mended_bytes=peak_without(trace, device, Absences.joined(mended)),
        findings=tuple(listed),
        not_judged=_not_judged(trace),
    )


def _not_judged(trace: Trace) -> tuple[str, ...]:
    reasons = []
    if not tells_accesses(trace):
        untold = [name for name in PATTERNS if name != "leak"]
        reasons.append(f"{', '.join(untold)}: the trace does not say what was read and written")
    if len(step_rows(trace).number) < WARM_UP_STEPS + MIN_STEPS:
        reasons.append(f"leak: it takes at least {WARM_UP_STEPS + MIN_STEPS} steps to tell")
    return tuple(reasons)


def _all(trace: Trace, chosen: Array) -> list[tuple[str, str | None, Absences]]:
    """Every pattern with its stretches; what has a name of its own is taken out of the pattern it belongs to."""
    leaks = patterns.kept_for_ever(trace, chosen)
    of_graphs = _recorded_by_autograd(trace, leaks.block) | _read_for_autograd(trace, leaks.block)
    parts: list[tuple[str, str | None, Absences]] = [
        ("leak", "loss kept with its graph", leaks.take(np.flatnonzero(of_graphs))),
        ("leak", None, leaks.take(np.flatnonzero(~of_graphs))),
    ]
    if not tells_accesses(trace):
        return parts
    gradients = patterns.idle_gradients(trace, chosen)
    rest = chosen[~patterns.among(trace, np.concatenate([gradients.block, leaks.block]))[chosen]]
    unused = patterns.unused_allocation(trace, rest)
    rest = rest[~patterns.among(trace, unused.block)[rest]]
    late = patterns.late_deallocation(trace, rest)
    graphs = _without_backward(trace, late.block)
    stepping = blocks(trace).category[late.block] == CATEGORY["gradient"]
    redundant, donors = patterns.redundant_allocation(trace, rest)
    copies = _copies_of(trace, redundant.block, donors)
    return [
        *parts,
        ("late_deallocation", "gradients kept through forward", gradients),
        ("unused_allocation", None, unused),
        ("late_deallocation", "graph kept without backward", late.take(np.flatnonzero(graphs & ~stepping))),
        ("late_deallocation", "gradients kept through the optimizer's step", late.take(np.flatnonzero(stepping))),
        ("late_deallocation", None, late.take(np.flatnonzero(~graphs & ~stepping))),
        ("early_allocation", None, patterns.early_allocation(trace, rest)),
        ("redundant_allocation", "double copy", redundant.take(np.flatnonzero(copies))),
        ("redundant_allocation", None, redundant.take(np.flatnonzero(~copies))),
        ("temporary_idleness", None, patterns.temporary_idleness(trace, rest)),
        ("dead_write", None, _of_dead_writes(trace, rest)),
    ]


def _recorded_by_autograd(trace: Trace, chosen: Array) -> Array:
    """Whether an operator that autograd recorded made each block."""
    made = blocks(trace).alloc_event[chosen]
    op = np.where(made >= 0, trace.columns("events", "op_id")["op_id"][made], -1)
    recorded = op_column(trace, op, "sequence_nr") >= 0
    return np.asarray(recorded & (op_column(trace, op, "phase") != PHASE["backward"]))


def _read_for_autograd(trace: Trace, chosen: Array) -> Array:
    """Whether an operator that autograd recorded reads each block: its graph may hold it."""
    used = uses(trace)
    recorded = (op_column(trace, used.op, "sequence_nr") >= 0) & (
        op_column(trace, used.op, "phase") != PHASE["backward"]
    )
    read = np.zeros(len(blocks(trace)), bool)
    read[used.block[used.is_read & recorded]] = True
    return read[chosen]


def _without_backward(trace: Trace, chosen: Array) -> Array:
    """Whether autograd recorded the maker of each block, and no backward ran through its node.

    A node may run without an operator (that of a sum). It counts as run where close ones on both sides are run by one
    backward, which takes the later one first; of two backwards the later node's is the second.
    """
    made = blocks(trace).alloc_event[chosen]
    op = np.where(made >= 0, trace.columns("events", "op_id")["op_id"][made], -1)
    node = op_column(trace, op, "sequence_nr").astype(np.int64)
    ops = trace.columns("ops", "op_id", "phase", "sequence_nr")
    backward = np.flatnonzero((ops["phase"] == PHASE["backward"]) & (ops["sequence_nr"] >= 0))
    backward = backward[np.argsort(ops["op_id"][backward], kind="stable")]
    run, first = np.unique(ops["sequence_nr"][backward], return_index=True)
    nodes = np.concatenate([[-FOREVER], run, [FOREVER]])
    run_at = np.concatenate([[-1], ops["op_id"][backward[first]], [FOREVER]])
    after = np.searchsorted(nodes, node, side="right")
    silent = (run_at[after] < run_at[after - 1]) & (nodes[after] - nodes[after - 1] <= _SILENT_NODES)
    ran = (nodes[after - 1] == node) | silent
    return np.asarray(_recorded_by_autograd(trace, chosen) & ~ran)


def _copies_of(trace: Trace, taker: Array, donor: Array) -> Array:
    """Whether each block is a copy, made by an operator that reads its donor."""
    found, used = blocks(trace), uses(trace)
    names, place = np.unique(found.op_name[taker], return_inverse=True)
    copies = np.array([(trace.name(int(name)) or "").startswith(_COPIES) for name in names], bool)
    op = trace.columns("events", "op_id")["op_id"][found.alloc_event[taker]]
    return np.asarray(copies[place] & (used.op[used.first[donor + 1] - 1] == op))


def _of_dead_writes(trace: Trace, chosen: Array) -> Absences:
    """The blocks of dead writes, from one write to the next: they are needed, so nothing is saved at the peak."""
    used, rows = uses(trace), patterns.dead_writes(trace, chosen)
    return Absences(used.block[rows], used.row[rows + 1], used.row[rows + 1])


def _by_line(
    trace: Trace, device: str, pattern: str, name: str | None, absences: Absences, least: int
) -> list[Finding]:
    """One finding for each line and category (for a named one, in all), those that hold most at the peak."""
    if not len(absences):
        return []
    found = blocks(trace)
    top = find_peak(trace, device).requested.event
    covers = (absences.begin <= top) & (absences.end > top)
    size = found.size[absences.block]
    groups: dict[tuple[str | None, int], list[Array]] = {}
    if name in OF_ALL_LINES:
        groups[_site_of_all(trace, found, absences, name), -1] = [np.arange(len(absences))]
    else:
        _split(trace, found, absences, groups)
    rows = [(where, np.concatenate(parts)) for where, parts in groups.items()]
    rows.sort(key=lambda item: -int((size[item[1]] * covers[item[1]]).sum()))
    made = (
        _finding(trace, device, pattern, name, where[0], absences.take(members), replay=place < MAX_FINDINGS)
        for place, (where, members) in enumerate(rows)
    )
    return [one for one in made if one.bytes >= least]


def _split(trace: Trace, found: Blocks, absences: Absences, groups: dict[tuple[str | None, int], list[Array]]) -> None:
    keys = found.stack[absences.block].astype(np.int64) * len(CATEGORIES) + found.category[absences.block]
    order = np.argsort(keys, kind="stable")
    values, first = np.unique(keys[order], return_index=True)
    for key, members in zip(values.tolist(), np.split(order, first[1:]), strict=True):
        # Several stacks may lead to one line.
        where = allocation_site(trace, key // len(CATEGORIES)), key % len(CATEGORIES)
        groups.setdefault(where, []).append(members)


def _site_of_all(trace: Trace, found: Blocks, absences: Absences, name: str) -> str | None:
    """The line to name for many: of a kept graph that of its last block, the loss; else of the most bytes."""
    if name == "loss kept with its graph":
        return allocation_site(trace, int(found.stack[absences.block[np.argmax(found.alloc_event[absences.block])]]))
    stacks, place = np.unique(found.stack[absences.block], return_inverse=True)
    return allocation_site(trace, int(stacks[np.argmax(np.bincount(place, weights=found.size[absences.block]))]))


def _finding(
    trace: Trace, device: str, pattern: str, name: str | None, where: str | None, mine: Absences, *, replay: bool
) -> Finding:
    found, top = blocks(trace), find_peak(trace, device).requested
    time = trace.columns("events", "time_ns")["time_ns"]
    last = max(len(time) - 1, 0)
    size = found.size[mine.block]
    begin, end = np.maximum(mine.begin, 0), np.minimum(mine.end, last)
    idle = np.maximum(time[end] - time[begin], 0).astype(float) if len(time) else np.zeros(len(mine))
    covers = bool(((mine.begin <= top.event) & (mine.end > top.event)).any())
    without = peak_without(trace, device, mine) if covers and replay else top.bytes
    held = np.bincount(found.category[mine.block], weights=size, minlength=len(CATEGORIES))
    return Finding(
        pattern=pattern,
        name=name,
        site=where,
        category=CATEGORIES[int(held.argmax())],
        num_blocks=len(np.unique(mine.block)),
        bytes=most_at_once(mine, size) if pattern != "dead_write" else int(size.max()),
        idle_byte_seconds=float((size * idle).sum()) / 1e9,
        covers_peak=covers,
        peak_if_mended_bytes=without,
        saved_bytes=top.bytes - without,
        advice=NAMES[name] if name else PATTERNS[pattern],
        absences=mine,
    )


def most_at_once(absences: Absences, size: Array) -> int:
    """The most bytes absent at one moment."""
    moment = np.concatenate([absences.begin, absences.end])
    change = np.concatenate([size, -size])
    # Where one ends as another begins, the end comes first.
    order = np.lexsort((change, moment))
    return int(np.cumsum(change[order]).max(initial=0))
