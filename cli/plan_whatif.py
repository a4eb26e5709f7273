"""``memtrace plan whatif``: the peak memory and the time of a step with changes to the training program."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, escape, open_traces, plain_table, print_json
from memtrace.cli.quantities import BYTES

from memtrace.errors import MemtraceError
from memtrace.planning.whatif import WhatIf
from memtrace.units import format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.planning.batch_size_law import BatchLaw, LargestBatch
    from memtrace.planning.whatif_changes import Change
    from memtrace.trace import Trace

RESULT: Final = WhatIf
_COUNT: Final = click.IntRange(min=1)
_FACTOR: Final = click.FloatRange(min=0, min_open=True)


@click.command("whatif")
@selects_traces
@click.option("--device", help="Device whose peak is predicted.  [default: the one with the highest peak]")
@click.option("--scale-batch", type=_FACTOR, metavar="FACTOR", help="Multiply the batch size.")
@click.option("--accumulate", type=_COUNT, metavar="N", help="Split the batch into N micro-batches.")
@click.option("--remove", "removed", multiple=True, metavar="BLOCKS",
              help="Remove blocks (e.g. category=activation,module=blocks.*,min=1MiB); repeatable.")  # fmt: skip
@click.option("--resize", "resized", multiple=True, metavar="BLOCKS:FACTOR",
              help="Resize blocks (e.g. activation:0.25); repeatable.")  # fmt: skip
@click.option("--remove-operators", multiple=True, metavar="PATTERN",
              help="Remove operators and what they allocate (e.g. 'aten::native_dropout*'); repeatable.")  # fmt: skip
@click.option("--amp", metavar="TYPE", help="Run forward under torch.autocast: bf16 or fp16.")
@click.option("--dtype", "dtypes", multiple=True, metavar="CATEGORY=TYPE",
              help="Keep the blocks of a category in another type (e.g. activation=bf16); repeatable.")  # fmt: skip
@click.option("--optimizer", metavar="NAME[:IMPLEMENTATION]",
              help="Train with another optimizer (e.g. adamw, sgd-momentum, adamw:foreach, adamw:fused).")  # fmt: skip
@click.option("--fuse", type=click.Choice(["optimizer"]), help="Update all parameters with one kernel.")
@click.option("--tensor-parallel", metavar="KIND:RANKS", help="Split every layer over ranks: 1d:8, 2d:4, 3d:8.")
@click.option("--shard", "shards", multiple=True, metavar="WHAT=RANKS",
              help="Split over data-parallel ranks: zero1, zero2, zero3, fsdp or a category (e.g. fsdp=8, "
                   "optimizer_state=8); repeatable.")  # fmt: skip
@click.option("--unit", "units", multiple=True, metavar="PATTERN",
              help="Modules that fully_shard wraps, for --shard fsdp (e.g. 'blocks.*'); repeatable; default: the "
                   "repeated blocks.")  # fmt: skip
@click.option("--bandwidth", type=_FACTOR, metavar="FACTOR", help="Copy between devices and ranks faster by a factor.")
@click.option("--batch", type=_COUNT, metavar="N", help="Batch size of TRACE.")
@click.option("--batch-trace", "batch_traces", multiple=True, metavar="N=TRACE",
              help="Trace of the same program with batch size N, for an exact law; repeatable.")  # fmt: skip
@click.option("--capacity", type=BYTES, help="Find the largest batch that fits this memory (e.g. 16GiB).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
def command(
    selection: Selection,
    device: str | None,
    batch: int | None,
    batch_traces: tuple[str, ...],
    capacity: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict peak memory and time of a step of TRACE with changes.

    Changes are made in the order in which this help lists them, whatever the order of the options; the table shows the
    step after each of them. Nothing is changed on disk.

    \b
    Examples:
      memtrace plan whatif run.memtrace --scale-batch 2 --capacity 16GiB
      memtrace plan whatif run.memtrace --optimizer adamw --shard fsdp=8
    """
    from memtrace.planning.whatif import plan_whatif

    changes = _parse_changes(options)
    if batch_traces and batch is None:
        raise MemtraceError("--batch-trace needs --batch N, the batch size of TRACE.")
    trace = selection.open_rank()
    others = dict(_open_batch(text) for text in batch_traces)
    result = plan_whatif(trace, changes, device=device, batch=batch, others=others, capacity_bytes=capacity)
    if as_json:
        print_json(result)
    else:
        _print(console(), result)


def _parse_changes(options: dict[str, Any]) -> list[Change]:
    """Return the changes that options ask for, in the order of their effect: the program, then its distribution."""
    from memtrace.planning import whatif_changes as changes
    from memtrace.planning.timeline_selection import parse_selection

    found: list[Change] = [changes.Remove(parse_selection(text)) for text in options["removed"]]
    found += [changes.Resize(parse_selection(text), factor) for text, factor in map(_parse_resize, options["resized"])]
    found += [changes.RemoveOperators(pattern) for pattern in options["remove_operators"]]
    if options["scale_batch"] is not None:
        found.append(changes.ScaleBatch(options["scale_batch"]))
    if options["accumulate"] is not None:
        found.append(changes.Accumulate(options["accumulate"]))
    if options["amp"] is not None:
        found.append(changes.Autocast(changes.parse_half_precision(options["amp"])))
    for category, dtype in (_split(text, "=", "--dtype", "activation=bf16") for text in options["dtypes"]):
        found.append(changes.ChangeDtype(category, changes.parse_dtype(dtype)))
    if options["optimizer"] is not None:
        name, _, implementation = options["optimizer"].partition(":")
        found.append(changes.ChangeOptimizer(name, changes.parse_implementation(implementation)))
    if options["fuse"] is not None:
        found.append(changes.FuseOptimizer())
    if options["bandwidth"] is not None:
        found.append(changes.ScaleBandwidth(options["bandwidth"]))
    if options["tensor_parallel"] is not None:
        kind, ranks = _split(options["tensor_parallel"], ":", "--tensor-parallel", "3d:8")
        found.append(changes.TensorParallel(changes.parse_kind(kind), _parse_ranks(ranks, "--tensor-parallel")))
    for what, ranks in (_split(text, "=", "--shard", "fsdp=8") for text in options["shards"]):
        units = options["units"] if what == "fsdp" else ()
        found.append(changes.Shard(what, _parse_ranks(ranks, "--shard"), units))
    if options["units"] and not any(isinstance(change, changes.Shard) and change.what == "fsdp" for change in found):
        raise MemtraceError("--unit needs --shard fsdp=N.")
    return found


def _split(text: str, separator: str, option: str, example: str) -> tuple[str, str]:
    left, found, right = text.partition(separator)
    if not found or not left or not right:
        raise MemtraceError(f"{option} {text} is incomplete: write for example {option} {example}.")
    return left.strip(), right.strip()


def _parse_ranks(text: str, option: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise MemtraceError(f"{option}: {text!r} is not a number of ranks.")
    return int(text)


def _parse_resize(text: str) -> tuple[str, float]:
    blocks, _, factor = text.rpartition(":")
    try:
        value = float(factor)
    except ValueError:
        value = -1.0
    if not blocks or not 0 <= value < 1e6:
        raise MemtraceError(f"--resize {text} is incomplete: write for example --resize activation:0.25.")
    return blocks, value


def _open_batch(text: str) -> tuple[int, Trace]:
    batch, path = _split(text, "=", "--batch-trace", "16=run16.memtrace")
    if not re.fullmatch(r"[1-9]\d{0,11}", batch):
        raise MemtraceError(f"--batch-trace {text}: {batch!r} is not a batch size.")
    trace = open_traces((path,))
    return int(batch), trace.rank(trace.ranks[0])


# -- output -----------------------------------------------------------------------------------------------------


def _print(out: Console, result: WhatIf) -> None:
    out.print(f"[bold]Step {result.step} on {escape(result.device)}[/]")
    table = plain_table("", "Peak", "Change", "Step time", "Most bytes at the peak")
    table.add_row("Recorded", format_bytes(result.recorded.peak_bytes), "", format_duration(result.recorded.step_ns),
                  _categories(result.recorded_bytes_by_category))  # fmt: skip
    previous = result.recorded.peak_bytes
    for row in result.rows:
        table.add_row(
            escape(row.change),
            format_bytes(row.cost.peak_bytes),
            _signed(row.cost.peak_bytes - previous),
            format_duration(row.cost.step_ns),
            _categories(row.bytes_by_category),
        )
        previous = row.cost.peak_bytes
    out.print(table)
    if len(result.rows) > 1:
        change = result.predicted.peak_bytes - result.recorded.peak_bytes
        out.print(
            f"With all changes: {format_bytes(result.predicted.peak_bytes)}, {_signed(change)} "
            f"({format_share(result.predicted.peak_bytes, result.recorded.peak_bytes)} of the recorded peak)."
        )
    out.print()
    _print_law(out, result.batch_law)
    if result.largest_batch is not None:
        _print_largest(out, result.largest_batch, result.batch_law.recorded_batch)
    for sentence in result.assumptions:
        out.print(escape(f"Note: {sentence}"), style="dim")


def _categories(sizes: dict[str, int]) -> str:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)


def _signed(num_bytes: int) -> str:
    return ("+" if num_bytes > 0 else "-" if num_bytes < 0 else "") + format_bytes(abs(num_bytes))


def _print_law(out: Console, law: BatchLaw) -> None:
    unit = "sample" if law.recorded_batch is not None else "recorded batch"
    piece = [piece for piece in law.pieces if piece.from_batch <= law.batch][-1]
    out.print(
        f"The peak grows by {format_bytes(piece.bytes_per_batch)} per {unit}: "
        f"{format_bytes(piece.constant_bytes)} + {format_bytes(piece.bytes_per_batch)} x batch."
    )
    later = [piece for piece in law.pieces if piece.from_batch > law.batch]
    if later:
        out.print(
            f"From {_batch(later[0].from_batch, law.recorded_batch)} on, another moment has the peak: "
            f"{format_bytes(later[0].constant_bytes)} + {format_bytes(later[0].bytes_per_batch)} x batch."
        )
    if law.residuals:
        table = plain_table("Batch", "Recorded", "By the law", "Error")
        for row in law.residuals:
            error = row.predicted_bytes / max(row.recorded_bytes, 1) - 1
            table.add_row(str(row.batch), format_bytes(row.recorded_bytes), format_bytes(row.predicted_bytes),
                          f"{100 * error:+.1f} %" + (" (used for the law)" if row.is_fitted else ""))  # fmt: skip
        out.print(table)


def _print_largest(out: Console, largest: LargestBatch, recorded: int | None) -> None:
    capacity = format_bytes(largest.capacity_bytes)
    if largest.batch is None:
        out.print(f"Any batch fits {capacity}: the peak does not grow with it.")
    elif largest.batch == 0:
        out.print(f"No batch fits {capacity}: {format_bytes(largest.peak_bytes)} do not depend on it.")
    else:
        out.print(
            f"Largest batch that fits {capacity}: {_batch(largest.batch, recorded)}, with a peak of "
            f"{format_bytes(largest.peak_bytes)} of requested memory."
        )


def _batch(batch: float, recorded: int | None) -> str:
    if recorded is not None:
        return format_count(math.ceil(batch), "sample")
    return f"{batch:.2f} times the recorded batch"
