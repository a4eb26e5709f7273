"""CSV tables of a trace: blocks, events, steps and allocation sites, for spreadsheets and databases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.analysis.blocks import blocks_table
from memtrace.analysis.steps import records_data_waits, steps_table
from memtrace.exporters.options import MEASURES
from memtrace.exporters.stack_samples import stack_samples
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


def write_csv_tables(trace: Trace, folder: Path) -> None:
    """Write the tables of a single-rank trace as CSV files (UTF-8, one header line, empty where a value is unknown)."""
    import pyarrow as pa
    from pyarrow import csv

    for name, make_table in CSV_TABLES.items():
        table = pa.Table.from_pandas(make_table(trace), preserve_index=False)
        csv.write_csv(table, folder / name)


def _blocks(trace: Trace) -> pd.DataFrame:
    frame: pd.DataFrame = blocks_table(trace).reset_index()
    if trace.block_ids is not None:
        frame["block_id"] = trace.block_ids
    # A stack is a number of the trace; the site is what it stands for.
    stacks, index = np.unique(frame["stack"].fillna(-1).to_numpy(np.int64), return_inverse=True)
    sites = [trace.code_owner.format_site(trace.frames(stack)) for stack in stacks.tolist()]
    frame["allocation_site"] = [sites[number] for number in index.tolist()]
    table: pd.DataFrame = frame.drop(columns="stack")
    return table


def _events(trace: Trace) -> pd.DataFrame:
    return trace.events


def _steps(trace: Trace) -> pd.DataFrame:
    frame = steps_table(trace)
    if not records_data_waits(trace):
        frame["data_wait_ns"] = None
    return frame


def allocation_sites_table(trace: Trace) -> pd.DataFrame:
    """Return one row per device and allocation site: blocks and bytes of each of MEASURES, most bytes at peak first."""
    import pandas as pd

    samples = stack_samples(trace)
    # Without a stack, the only frame is the reason for that.
    site_of_stack = [
        trace.code_owner.format_site(frames) if frames[0].file else frames[0].function for frames in samples.stacks
    ]
    sites = [site_of_stack[index] for index in samples.stack.tolist()]
    columns: dict[str, object] = {"device": samples.device, "allocation_site": sites}
    for measure in MEASURES:
        columns[f"{measure}_blocks"] = samples.num_blocks[measure]
        columns[f"{measure}_bytes"] = samples.num_bytes[measure]
    frame = pd.DataFrame(columns).groupby(["device", "allocation_site"], sort=False, dropna=False).sum().reset_index()
    table: pd.DataFrame = frame.sort_values(["peak_bytes", "allocations_bytes"], ascending=False, kind="stable")
    return table


CSV_TABLES: Final[dict[str, Callable[[Trace], pd.DataFrame]]] = {
    "blocks.csv": _blocks,
    "events.csv": _events,
    "steps.csv": _steps,
    "allocation_sites.csv": allocation_sites_table,
}
"""The files of a folder of CSV tables, and the functions that make them."""
