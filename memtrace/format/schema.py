"""The vocabulary of memtrace and the tables of a trace, format version 1.

Everything that records, reads, analyses or shows uses these words. Bytes are ``int``; times are ``int``
nanoseconds since the recording began (``t0_epoch_ns`` of the manifest ties them to the wall clock). What is not
known is null, never 0. Addresses and streams of 2**63 and above are stored as their two's complement. The order of the
rows of ``events`` is the order of what happened; times follow it except for small disorder between threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"
NO_BLOCKS: Final = "the file holds totals by category and no blocks"
"""Why nothing is told of the blocks of such a trace (``Trace.has_blocks``)."""

EVENT_KINDS: Final = (
    "alloc",  # a block begins; memory from outside the traced allocators (NumPy): it is first seen, op is null
    "free",  # its memory can be reused (CUDA: free_completed)
    "read",  # an operator reads the block
    "write",  # an operator writes the block
    "baseline",  # a block older than the recording, or not from a traced allocator, is seen for the first time
    "free_requested",  # CUDA: the program gave the block back; streams may still use it
    "segment_alloc",  # CUDA: the allocator took a segment from the device
    "segment_free",
    "segment_map",  # CUDA: expandable segments grew
    "segment_unmap",
    "oom",  # size = bytes asked for
    "snapshot",  # CUDA: a snapshot was taken; size = bytes allocated then
)
PHASES: Final = ("forward", "backward", "optimizer", "other")
CATEGORIES: Final = (
    "parameter",  # parameters and buffers of modules
    "gradient",
    "optimizer_state",
    "activation",  # made in forward and read in backward
    "input",
    "temporary",  # dies in the phase that made it
    "workspace",  # born and dead within one operator call
    "unknown",
)
SPAN_KINDS: Final = (
    "step",  # one training iteration; index = its number
    "phase",  # name = forward, backward or optimizer
    "module",  # one forward call of a module; name = its qualified name
    "data_wait",  # the training loop waits for its data
    "range",  # a user annotation (record_function) or one of torch's own
    # One action of a pipeline schedule; name = its kind (F forward, B backward, I its input's half, W its weights'),
    # stage, micro-batch and, unless 0, pipeline: F0.3, B2.5@1. Halves of a micro-batch end in a or b: B2.5a.
    "action",
)
COUNTERS: Final = (
    "allocated",  # bytes of the blocks in use, as the allocator counts
    "reserved",  # bytes the allocator holds from the device
    "device_used",  # bytes in use on the device by anyone, as the driver counts
)
NAME_KINDS: Final = ("operator", "module", "tensor", "frame", "stack", "thread", "range")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, its type (see ``arrow_type``), and its meaning with unit and what null says."""

    name: str
    type: str
    meaning: str


TABLES: Final[dict[str, tuple[Column, ...]]] = {
    "events": (
        Column("time_ns", "int64", "when; a read has its operator's start, a write its end"),
        Column("kind", "text", "one of EVENT_KINDS"),
        Column("device", "text", "'cpu', 'cuda:0', ..."),
        Column("block_id", "int64", "which block: numbered from 0 in order of first sight; null for segments, oom"),
        Column(
            "size",
            "int64",
            "requested bytes (alloc, free, baseline, free_requested, oom), bytes of the segment; null for accesses",
        ),
        Column(
            "allocated_size",
            "int64",
            "bytes the allocator counts for the block, rounding included; null: unknown or no such number",
        ),
        Column("address", "int64", "start of the block or segment; null for accesses and oom"),
        Column("op_id", "int64", "the operator call it belongs to (ops.op_id); null: none known"),
        Column("stream", "int64", "CUDA stream; null on the CPU and for accesses"),
        Column("thread", "int16", "numbered from 0 in order of first sight; null: unknown"),
        Column(
            "pool",
            "int64",
            "CUDA memory pool: 0 the default, 2k torch's (0, k), 2k + 1 torch's (k, 0) as of a CUDA graph; null: not "
            "told",
        ),
        Column("device_free", "int64", "oom: bytes the driver had free on the device; else null"),
    ),
    "ops": (
        Column(
            "op_id",
            "int64",
            "identity of the operator call; rows may be out of this order. In a trace read from a CUDA snapshot a "
            "row stands for all calls from one stack",
        ),
        Column("name", "int32", "names.id of kind operator; null: not told (a CUDA snapshot)"),
        Column("start_ns", "int64", "host time at which the call began; null: not told (a CUDA snapshot)"),
        Column("duration_ns", "int64", "host time until it returned; null: unknown"),
        Column("thread", "int16", "as in events"),
        Column(
            "module",
            "int32",
            "names.id of kind module: the innermost call, of a backward operator that of its forward one; null: none",
        ),
        Column("phase", "text", "one of PHASES; null: unknown"),
        Column(
            "stack",
            "int32",
            "names.id of kind stack; for a backward operator that of its forward operator; null: not taken",
        ),
        Column(
            "sequence_nr",
            "int64",
            "autograd sequence number of the node it made (forward) or runs in (backward); null: none",
        ),
        Column("recompute", "bool", "a forward operator run again inside backward (activation checkpointing)"),
        Column(
            "context",
            "int32",
            "names.id of kind range: what the program or the compiler said of the call (user metadata, compiled "
            "frame, FX node); null: nothing",
        ),
    ),
    "spans": (
        Column("kind", "text", "one of SPAN_KINDS"),
        Column("name", "int32", "names.id (module or range); null for steps and data_wait"),
        Column("start_ns", "int64", "when it began"),
        Column("duration_ns", "int64", "how long it lasted"),
        Column("thread", "int16", "as in events"),
        Column("index", "int64", "step number for kind step, numbered from 0; else null"),
    ),
    "labels": (
        Column("block_id", "int64", "events.block_id"),
        Column("category", "text", "one of CATEGORIES, known from the program itself; null: only the name is known"),
        Column("name", "int32", "names.id of kind tensor, such as blocks.0.attn.qkv.weight; null: unnamed"),
    ),
    "segments": (  # CUDA: what the allocator held from the device at the end of the trace
        Column("device", "text", "as in events"),
        Column("address", "int64", "start of the segment"),
        Column("size", "int64", "bytes of the segment, mapped bytes of an expandable one: what is reserved"),
        Column(
            "allocated_size", "int64", "bytes of its blocks in use, rounding included, by the allocator's own count"
        ),
        Column("active_size", "int64", "the same with the blocks that wait for a stream"),
        Column(
            "requested_size",
            "int64",
            "bytes asked for by its active blocks, by the allocator's own count; null: not told",
        ),
        Column("stream", "int64", "CUDA stream its blocks are of"),
        Column("pool", "int64", "as in events"),
        Column("small", "bool", "of the pool for blocks of at most 1 MiB"),
        Column("expandable", "bool", "grows and shrinks by mapping pages; null: not told"),
        Column("stack", "int32", "names.id of kind stack: who made it grow; null: not taken"),
    ),
    "counters": (  # totals by somebody else's count, at the moments they were read
        Column("time_ns", "int64", "when"),
        Column("device", "text", "as in events"),
        Column("name", "text", "one of COUNTERS"),
        Column("value", "int64", "bytes"),
    ),
    "device_times": (  # an option of recordings: operators that touch large blocks, timed by the device itself
        Column("op_id", "int64", "ops.op_id"),
        Column("device", "text", "as in events"),
        Column("start_ns", "int64", "when the device began it; the device's clock, set to the host's once a recording"),
        Column("duration_ns", "int64", "how long the device took, by its clock"),
    ),
    "names": (
        Column("id", "int32", "what the other tables refer to; unique within a rank"),
        Column("kind", "text", "one of NAME_KINDS"),
        Column("text", "string", "the name; for a frame 'file<TAB>line<TAB>function'; null for a stack"),
        Column("frames", "list<int32>", "for a stack: names.id of its frames, innermost first; else null"),
    ),
}


def arrow_schema(table: str) -> pa.Schema:
    """The Arrow schema of one of TABLES. ``text`` columns are dictionary-encoded strings."""
    import pyarrow as pa

    types = {
        "int64": pa.int64(),
        "int32": pa.int32(),
        "int16": pa.int16(),
        "bool": pa.bool_(),
        "string": pa.string(),
        "text": pa.dictionary(pa.int8(), pa.string()),
        "list<int32>": pa.list_(pa.int32()),
    }
    return pa.schema([pa.field(column.name, types[column.type]) for column in TABLES[table]])
