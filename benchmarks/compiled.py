"""Record examples/gpt.py eager and compiled: ``python benchmarks/compiled.py [--steps 3] [--observer native]``.

Prints the share of the accessed bytes whose reads and writes were recorded, the bytes of every category in both runs,
and the share of the bytes of the compiled run that have a line and module of the eager run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import memtrace
from memtrace.analysis.block_accesses import seen_access_share
from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import KIND
from memtrace.analysis.steps import step_columns
from memtrace.format.schema import CATEGORIES, PHASES
from memtrace.trace import Trace

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, synthetic_text, train_step

Site = tuple[str, str, str]


def record(path: Path, steps: int, observer: str, *, is_compiled: bool) -> tuple[Trace, list[float]]:
    """Return the trace and the losses of a few training steps."""
    torch.manual_seed(0)
    model = GPT()
    text = synthetic_text(8, 128)
    step_model = torch.compile(model) if is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters())
    if is_compiled:
        step_model(text[:, :-1]).sum().backward()  # compile before the recording
        optimizer.zero_grad()
    with memtrace.record(path, observer=observer):
        losses = [float(train_step(step_model, optimizer, text)) for _ in range(steps)]
    return memtrace.load(path), losses


def accessed_bytes(trace: Trace) -> Counter[Site]:
    """Return the bytes accessed in forward and backward by module, phase and line of the example."""
    size = blocks(trace).size
    events = trace.columns("events", "kind", "block_id", "op_id")
    ops = trace.columns("ops", "op_id", "module", "phase", "stack")
    row_of_op = {int(op): row for row, op in enumerate(ops["op_id"])}
    result: Counter[Site] = Counter()
    for event in np.flatnonzero((events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"])):
        op = row_of_op[int(events["op_id"][event])]
        phase = PHASES[ops["phase"][op]]
        if phase in ("forward", "backward"):
            frames = trace.frames(int(ops["stack"][op])) if ops["stack"][op] >= 0 else []
            line = next((str(frame.line) for frame in frames if frame.file.endswith("gpt.py")), "")
            module = (trace.name(int(ops["module"][op])) if ops["module"][op] >= 0 else None) or ""
            result[module.replace("GPT#2", "GPT"), phase, line] += int(size[int(events["block_id"][event])])
    return result


def category_bytes(trace: Trace) -> dict[str, int]:
    """Return the bytes of the blocks of each category."""
    table = blocks(trace)
    return {name: int(table.size[table.category == code].sum()) for code, name in enumerate(CATEGORIES)}


def main() -> None:
    """Record both runs and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--observer", default="native", choices=("native", "dispatch"))
    parser.add_argument("--folder", type=Path, help="where to keep the traces")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    eager, eager_losses = record(folder / "eager.memtrace", arguments.steps, arguments.observer, is_compiled=False)
    compiled, losses = record(folder / "compiled.memtrace", arguments.steps, arguments.observer, is_compiled=True)
    of_eager, of_compiled = accessed_bytes(eager), accessed_bytes(compiled)
    total = sum(of_compiled.values())
    shared = sum(num_bytes for site, num_bytes in of_compiled.items() if site in of_eager)
    on_line = {(phase, line) for _, phase, line in of_eager}
    shared_lines = sum(num_bytes for site, num_bytes in of_compiled.items() if site[1:] in on_line)
    result = {
        "torch": torch.__version__,
        "losses": {"eager": eager_losses, "compiled": losses},
        "seen_access_share": seen_access_share(compiled),
        "share_of_bytes_at_a_line_module_and_phase_of_the_eager_run": shared / total,
        "share_of_bytes_at_a_line_and_phase_of_the_eager_run": shared_lines / total,
        "steps": {"eager": len(step_columns(eager)), "compiled": len(step_columns(compiled))},
        "category_bytes": {"eager": category_bytes(eager), "compiled": category_bytes(compiled)},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
