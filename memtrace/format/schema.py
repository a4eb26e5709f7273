"""The tables of a trace, format version 3: every column with its type, vocabulary, encoding, unit and meaning.

This module is the one home of these facts. The Arrow schema, the Parquet encodings, the batch that observers hand over,
the C++ structs of the native observer, the checks of the reader and ``docs/format.md`` are all derived from ``TABLES``.

Bytes are ``int``. Times are ``int`` nanoseconds since the recording began; ``t0_epoch_ns`` of the manifest ties them to
the wall clock. An unknown number is null, never 0. Addresses and streams of 2**63 and above are stored as their two's
complement. The order of the rows of ``events`` is the order of what happened; times follow it except for small
disorder between threads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION: Final = 3
MANIFEST_NAME: Final = "manifest.json"
MAX_BYTES: Final = 1 << 48
"""Largest size of memory in bytes: no device has more, and the sum of 32,000 of them fits into 64 bits. Only a request
that failed can be larger."""
MAX_NS: Final = 1 << 56
"""Largest time since the recording began and longest duration, ns: over two years."""
NO_BLOCKS: Final = "the file holds totals by category and no blocks"
"""Why blocks cannot be analyzed in a trace of a file of totals (``Coverage.has_blocks`` is False)."""

EVENT_KINDS: Final = (
    "alloc",  # a block is allocated; memory from outside the traced allocators (NumPy): first seen, op_id is null
    "free",  # the block's memory can be reused (CUDA: free_completed)
    "read",  # an operator reads the block
    "write",  # an operator writes the block
    "baseline",  # first sight of a block that is older than the recording or comes from an untraced allocator
    "free_requested",  # CUDA: the program released the block; streams may still use it
    "segment_alloc",  # CUDA: the allocator reserved a segment on the device
    "segment_free",  # CUDA: the allocator returned a segment to the device
    "segment_map",  # CUDA: an expandable segment grew
    "segment_unmap",  # CUDA: an expandable segment shrank
    "oom",  # an allocation failed; size = requested bytes
    "snapshot",  # CUDA: a snapshot was taken; size = allocated bytes
    "live",  # first rows of a window: a block allocated before the window; time_ns is the time of its allocation
)
PHASES: Final = ("forward", "backward", "optimizer", "other")
CATEGORIES: Final = (
    "parameter",  # parameters and buffers of modules
    "gradient",
    "optimizer_state",
    "activation",  # allocated in forward and read in backward
    "input",
    "temporary",  # freed in the phase and step that allocated it
    "workspace",  # allocated and freed within one operator call
    "unknown",
)
LABEL_PRIORITY: Final = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "temporary",
    "workspace",
    "unknown",
)
"""A block can have several labels (a parameter that is also an input): the first of these wins."""
SPAN_KINDS: Final = (
    "step",  # one training iteration; index = its number
    "phase",  # name = forward, backward or optimizer
    "module",  # one forward call of a module; name = its qualified name
    "data_wait",  # the training loop waits for its data
    "range",  # a user annotation (record_function) or one of torch's own
    # One action of a pipeline schedule; name = its kind (F forward, B backward, I input backward, W weight backward),
    # stage, micro-batch and, unless 0, pipeline: F0.3, B2.5@1. Halves of a micro-batch end in a or b: B2.5a.
    "action",
    "gap",  # nothing was observed: between the steps that a schedule records
)
COUNTERS: Final = (
    "allocated",  # bytes of the blocks in use, as the allocator counts them
    "reserved",  # bytes that the allocator reserved on the device
    "device_used",  # bytes in use on the device by any process, as the driver counts them
)
NAME_KINDS: Final = ("operator", "module", "tensor", "frame", "stack", "thread", "range")

DType = Literal["int64", "int32", "int16", "bool", "text", "string", "list<int32>"]
Encoding = Literal["delta", "dictionary", "plain", "byte_stream_split"]
Unit = Literal["ns", "bytes"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A column that a part may have in the place of another one, which ``memtrace.format.stored`` restores from it."""

    name: str
    dtype: DType
    encoding: Encoding
    meaning: str


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    dtype: DType
    """``text`` is a string of a small vocabulary, encoded by dictionary with int8 codes."""
    meaning: str
    null: str | None = None
    """What null says; None: the column is never null."""
    unit: Unit | None = None
    vocabulary: tuple[str, ...] | None = None
    """The values of a ``text`` column; None for ``device``, whose values differ between machines."""
    delta: bool = False
    """Whether the values grow by small steps, so that delta encoding suits them."""
    is_required: bool = False
    """Whether a part without this column is refused. Every other column may be absent and is null then."""
    is_searched: bool = False
    """Whether windows search parts by this column, so that Parquet statistics are written for it."""
    is_identity: bool = False
    """Whether the values number things densely from 0, so that they are kept as int32 where they fit."""
    is_split: bool = False
    """Whether the bytes of the values compress best by their place: small numbers without small steps."""
    stored: Stored | None = None
    """What a part has in the place of this column, where that is shorter."""

    @property
    def encoding(self) -> Encoding:
        """The Parquet encoding."""
        if self.delta or self.is_split:
            return "delta" if self.delta else "byte_stream_split"
        return "plain" if self.dtype in ("bool", "list<int32>") else "dictionary"


_EVENTS: Final = (
    Column("time_ns", "int64", "time; of a read its operator's start, of a write its operator's end", unit="ns",
           delta=True, is_required=True,
           stored=Stored("elapsed_ns", "int64", "byte_stream_split", "time since the row before; in the first row "
                         "since 0")),
    Column("kind", "text", "what happened", vocabulary=EVENT_KINDS, is_required=True),
    Column("device", "text", "'cpu', 'cuda:0', ...", is_required=True),
    Column("block_id", "int64", "the block, numbered from 0 in order of first sight", "an event of a segment, an oom "
           "or a snapshot", delta=True, is_required=True, is_identity=True,
           stored=Stored("block_reference", "int32", "plain", "0: a new block, whose number follows the largest so "
                         "far; n > 0: the block whose number is n - 1 below the largest so far; n < 0: the block "
                         "-1 - n, which is older than the part")),
    Column("size", "int64", "requested bytes of the block (or of the failed allocation); bytes of the segment",
           "an access, or requested bytes are unknown", unit="bytes", is_required=True),
    Column("allocated_size", "int64", "bytes that the allocator counts for the block, rounding included",
           "unknown, or the event has no such size", unit="bytes"),
    Column("address", "int64", "start of the block or segment", "an access, an oom, or the address is unknown",
           delta=True,
           stored=Stored("first_address", "int64", "dictionary", "the address; null where a block is freed whose "
                         "address is known from its allocation, in the part or in its keyframe")),
    Column("op_id", "int64", "the operator call that the event belongs to (ops.op_id)", "no known operator call",
           delta=True, is_identity=True),
    Column("stream", "int64", "CUDA stream", "on the CPU, and for accesses"),
    Column("thread", "int16", "host thread, numbered from 0 in order of first sight", "unknown"),
    Column("pool", "int64", "CUDA memory pool: 0 is the default pool, 2k is torch's (0, k), 2k + 1 is torch's (k, 0), "
           "such as the pool of a CUDA graph", "unknown"),
    Column("device_free", "int64", "bytes that the driver had free on the device when an allocation failed",
           "not an oom", unit="bytes"),
)  # fmt: skip
_OPS: Final = (
    Column("op_id", "int64", "identity of the operator call; rows may be out of this order. In a trace of a CUDA "
           "snapshot a row stands for all calls from one stack", delta=True, is_required=True, is_identity=True,
           is_searched=True),
    Column("name", "int32", "operator (names.id)", "unknown (a CUDA snapshot)", is_required=True),
    Column("start_ns", "int64", "host time at which the call began", "unknown (a CUDA snapshot)", unit="ns", delta=True,
           is_required=True,
           stored=Stored("gap_ns", "int64", "byte_stream_split", "time since the end of the call in the row before; in "
                         "the first row since 0")),
    Column("duration_ns", "int64", "host time until the call returned", "unknown", unit="ns", is_split=True),
    Column("thread", "int16", "host thread, as in events", "unknown"),
    Column("module", "int32", "innermost module call (names.id); of a backward operator that of its forward operator",
           "outside any module, or unknown"),
    Column("phase", "text", "training phase of the call", "unknown", vocabulary=PHASES),
    Column("stack", "int32", "Python stack (names.id); of a backward operator that of its forward operator",
           "not recorded"),
    Column("sequence_nr", "int64", "autograd sequence number of the node that the call created (forward) or runs in "
           "(backward)", "none", delta=True),
    Column("recompute", "bool", "a forward operator that runs again inside backward (activation checkpointing)",
           "unknown"),
    Column("context", "int32", "what the program or the compiler said of the call (names.id of kind range): user "
           "metadata, compiled frame, FX node", "nothing"),
)  # fmt: skip
_SPANS: Final = (
    Column("kind", "text", "what the span is", vocabulary=SPAN_KINDS, is_required=True),
    Column("name", "int32", "module, phase, range or action (names.id)", "steps, gaps and data_wait"),
    Column("start_ns", "int64", "start", unit="ns", delta=True, is_required=True, is_searched=True),
    Column("duration_ns", "int64", "duration", unit="ns", is_split=True, is_required=True),
    Column("thread", "int16", "host thread, as in events", "unknown"),
    Column("index", "int64", "step number, counted from 0", "not a step", delta=True, is_searched=True),
)  # fmt: skip
_LABELS: Final = (
    Column("block_id", "int64", "the block (events.block_id)", delta=True, is_required=True, is_identity=True),
    Column("category", "text", "category that the program itself gives the block", "only the name is known",
           vocabulary=CATEGORIES),
    Column("name", "int32", "tensor name (names.id), such as blocks.0.attn.qkv.weight", "unnamed"),
)  # fmt: skip
_SEGMENTS: Final = (
    Column("device", "text", "as in events", is_required=True),
    Column("address", "int64", "start of the segment", delta=True, is_required=True),
    Column("size", "int64", "reserved bytes: of the segment, or the mapped bytes of an expandable segment",
           unit="bytes", is_required=True),
    Column("allocated_size", "int64", "bytes of the blocks in use, rounding included, as the allocator counts them",
           "unknown", unit="bytes"),
    Column("active_size", "int64", "the same with blocks that wait for a stream", "unknown", unit="bytes"),
    Column("requested_size", "int64", "requested bytes of the active blocks, as the allocator counts them", "unknown",
           unit="bytes"),
    Column("stream", "int64", "CUDA stream of the segment's blocks", "unknown"),
    Column("pool", "int64", "CUDA memory pool, as in events", "unknown"),
    Column("small", "bool", "the segment belongs to the pool for blocks of at most 1 MiB", "unknown"),
    Column("expandable", "bool", "the segment grows and shrinks by mapping pages", "unknown"),
    Column("stack", "int32", "Python stack that made the segment grow (names.id)", "not recorded"),
)  # fmt: skip
_COUNTERS: Final = (
    Column("time_ns", "int64", "time of the reading", unit="ns", delta=True, is_required=True),
    Column("device", "text", "as in events", is_required=True),
    Column("name", "text", "which total", vocabulary=COUNTERS, is_required=True),
    Column("value", "int64", "the total", unit="bytes", is_required=True),
)  # fmt: skip
_DEVICE_TIMES: Final = (
    Column("op_id", "int64", "the operator call (ops.op_id)", delta=True, is_required=True, is_identity=True),
    Column("device", "text", "as in events"),
    Column("start_ns", "int64", "start on the device, by its clock, which is set to the host's once per recording",
           unit="ns", delta=True, is_required=True),
    Column("duration_ns", "int64", "duration on the device", unit="ns", delta=True, is_required=True),
)  # fmt: skip
_NAMES: Final = (
    Column("id", "int32", "what the other tables refer to; unique within a rank", delta=True, is_required=True),
    Column("kind", "text", "what is named", vocabulary=NAME_KINDS, is_required=True),
    Column("text", "string", "the name; of a frame 'file<TAB>line<TAB>function'", "a stack", is_required=True),
    Column("frames", "list<int32>", "frames of a stack (names.id), innermost first", "not a stack"),
)  # fmt: skip

OP_PREFIX: Final = "op_"
"""Prefix in the table ``live`` of the columns of the operator call that allocated the block."""


def _live_columns() -> Iterable[Column]:
    """The columns of a keyframe: those of the allocation, of its operator call, and what is known of the block."""
    for column in _EVENTS:
        if column.name != "device_free":
            yield replace(column, is_searched=False, stored=None)
    for column in _OPS[1:]:
        yield replace(
            column,
            name=OP_PREFIX + column.name,
            meaning=f"ops.{column.name} of the operator call op_id",
            null="as in ops, or the call had not returned when the part began",
            is_required=False,
            is_searched=False,
            stored=None,
        )
    yield Column("order_ns", "int64", "largest time_ns of all events up to the allocation, which places it in a step",
                 unit="ns", delta=True, is_required=True)  # fmt: skip
    yield Column(
        "step", "int64", "number of the step of the allocation", "outside all steps, or its step has not ended"
    )
    yield Column("span_phase", "text", "phase of the allocation by the spans of kind phase", "none had ended",
                 vocabulary=PHASES)  # fmt: skip
    yield Column("category", "text", "strongest category among the block's labels", "unlabeled", vocabulary=CATEGORIES)
    yield Column("name", "int32", "tensor name in the strongest label that has a name (names.id)", "unnamed")
    yield Column("name_category", "text", "category of that label", "unnamed, or the label has no category",
                 vocabulary=CATEGORIES)  # fmt: skip
    yield Column("read_in_forward", "bool", "whether an operator of phase forward has read the block")
    yield Column("read_in_backward", "bool", "whether an operator of phase backward, recomputation excluded, has read "
                 "the block")  # fmt: skip


TABLES: Final[dict[str, tuple[Column, ...]]] = {
    "live": tuple(_live_columns()),
    "events": _EVENTS,
    "ops": _OPS,
    "spans": _SPANS,
    "labels": _LABELS,
    "segments": _SEGMENTS,
    "counters": _COUNTERS,
    "device_times": _DEVICE_TIMES,
    "names": _NAMES,
}
TABLE_MEANINGS: Final = {
    "live": "The live set at the start of a part: one row per block and per reserved segment (block_id is null).",
    "events": "One row per allocation, free, access and event of a segment, in the order of what happened.",
    "ops": "One row per operator call that touched a block.",
    "spans": "Steps, phases, module calls, waits for data, ranges, actions and gaps, in the order of their end.",
    "labels": "Categories and names that the program itself gives to blocks.",
    "segments": "CUDA: the segments that the allocator held at the end of the trace.",
    "counters": "Totals counted by the allocator or the driver, at the moments at which they were read.",
    "device_times": "Operator calls on large blocks, timed by the device (an option of recordings).",
    "names": "Interned names, stack frames and stacks.",
}
COPIES: Final = {("events", "allocated_size"): "size"}
"""Columns that are left out of a part where they equal another one in every row, as on the CPU."""
OBSERVED_TABLES: Final = ("events", "ops", "spans", "labels", "device_times")
"""The tables whose columns an observer hands over in a batch."""
RANK_TABLES: Final = ("names", "segments")
"""Tables that belong to the rank as a whole: windows read them whole, and a ring keeps all of their parts."""

_BATCH_DTYPES: Final = {"int64": "i8", "int32": "i4", "int16": "i2", "bool": "i1", "text": "i1"}


@functools.cache
def find_column(table: str, name: str) -> Column:
    """Return the column ``name`` of ``table``; KeyError where there is none."""
    for column in TABLES[table]:
        if column.name == name:
            return column
    raise KeyError(f"{table}.{name}")


def batch_dtypes(table: str) -> dict[str, str]:
    """Return the numpy dtypes of the columns that an observer may hand over for ``table``, by name."""
    return {column.name: _BATCH_DTYPES[column.dtype] for column in TABLES[table]}


@functools.cache
def arrow_schema(table: str) -> pa.Schema:
    """Return the Arrow schema of one of TABLES. ``text`` columns are dictionary-encoded strings."""
    import pyarrow as pa

    return pa.schema([pa.field(column.name, _arrow_type(column.dtype)) for column in TABLES[table]])


def batch_type(column: Column) -> pa.DataType:
    """Return the Arrow type of the numbers that an observer hands over for a column: codes for a ``text`` column."""
    import pyarrow as pa

    return pa.int8() if column.dtype == "text" else _arrow_type(column.dtype)


def stored_schema(table: str, names: Sequence[str], nullable: Sequence[str] | None = None) -> pa.Schema:
    """Return the Arrow schema of columns of a file of ``table``, which may be those that stand for others.

    Args:
        table: name of the table.
        names: names of the columns.
        nullable: those with nulls, None for all: Parquet stores nothing about nulls of the others.
    """
    import pyarrow as pa

    columns = stored_columns(table)
    return pa.schema(
        [pa.field(name, _arrow_type(columns[name].dtype), nullable is None or name in nullable) for name in names]
    )


@functools.cache
def stored_columns(table: str) -> dict[str, Column | Stored]:
    """Return the columns that a file of ``table`` may have, by name."""
    stored = {column.stored.name: column.stored for column in TABLES[table] if column.stored is not None}
    return {column.name: column for column in TABLES[table]} | stored


@functools.cache
def _arrow_type(dtype: DType) -> pa.DataType:
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
    return types[dtype]
