"""Call stacks, phases, categories and contexts of the allocations in a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrace.analysis import blocks_table
from memtrace.format.schema import PHASES
from memtrace.frames import Frame
from memtrace.readers.cuda_snapshot.phases import infer_backward, phase_spans
from memtrace.readers.tables import Names
from memtrace.trace import Trace
from tests.readers.snapshot_maker import SnapshotMaker, frame, read_in_process

TORCH = "/venv/lib/python3.11/site-packages/torch"
CALL = frame(f"{TORCH}/nn/modules/module.py", 1773, "_call_impl")
BACKWARD = frame(f"{TORCH}/autograd/graph.py", 829, "_engine_run_backward")
STEP = frame(f"{TORCH}/optim/adamw.py", 243, "step")
USER = frame("/home/me/train.py", 12, "train")


def trace_of(folder: Path, *stacks: list[dict[str, Any]], **more: Any) -> Trace:
    maker = SnapshotMaker()
    for stack in stacks:
        maker.alloc(1000, stack, **more)
    return read_in_process(folder / "snapshot.pickle", maker.snapshot())


def stack_of(trace: Trace, block: int) -> list[Frame]:
    return trace.frames(int(blocks_table(trace)["stack"].iloc[block]))


@pytest.mark.parametrize(
    ("stack", "phase", "recompute"),
    [
        ([CALL, USER], "forward", False),
        ([BACKWARD, USER], "backward", False),
        ([STEP, USER], "optimizer", False),
        ([USER], None, False),
        ([CALL, STEP, USER], "forward", False),  # the closure of an optimizer
        ([BACKWARD, STEP, USER], "backward", False),
        ([CALL, BACKWARD, USER], "backward", False),  # a module that the backward of a custom Function calls
        ([STEP, CALL, USER], "optimizer", False),
        ([CALL, frame(f"{TORCH}/utils/checkpoint.py", 1124, "unpack_hook")], "backward", True),
        (
            [USER, frame(f"{TORCH}/autograd/function.py", 307, "apply")],
            "backward",
            False,
        ),  # outermost: autograd's thread
        ([USER, frame(f"{TORCH}/autograd/function.py", 575, "apply"), CALL, USER], "forward", False),
        ([frame("engine.cpp", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr)")], "backward", False),
        ([frame(f"{TORCH}\\nn\\modules\\module.py", 1, "_call_impl")], "forward", False),
        ([frame(f"{TORCH}/optim/lr_scheduler.py", 1, "step"), USER], None, False),
    ],
)
def test_a_stack_reveals_its_phase(
    tmp_path: Path, stack: list[dict[str, Any]], phase: str | None, recompute: bool
) -> None:
    row = trace_of(tmp_path, stack).ops.iloc[0]
    assert (None if row["phase"] != row["phase"] else row["phase"]) == phase
    assert bool(row["recompute"]) == recompute


@pytest.mark.parametrize(
    ("stack", "category"),
    [
        ([frame("x.cpp", 0, "void torch::autograd::AccumulateGrad::accumulateGrad<f>(at::Tensor)")], "gradient"),
        ([frame(f"{TORCH}/optim/adam.py", 160, "_init_group"), STEP], "optimizer_state"),
        ([frame(f"{TORCH}/nn/modules/module.py", 1370, "convert"), USER], "parameter"),
        ([frame(f"{TORCH}/nn/modules/linear.py", 106, "__init__"), USER], "parameter"),
        ([frame(f"{TORCH}/nn/modules/linear.py", 117, "reset_parameters"), frame(f"{TORCH}/nn/modules/linear.py", 106, "__init__")], None),
        ([CALL, frame(f"{TORCH}/nn/modules/linear.py", 106, "__init__")], None),
        ([USER], None),
    ],
)  # fmt: skip
def test_a_stack_reveals_the_category(tmp_path: Path, stack: list[dict[str, Any]], category: str | None) -> None:
    labels = trace_of(tmp_path, stack).labels["category"].tolist()
    assert labels == ([category] if category else [])


def test_stack_machinery_is_removed_and_the_order_is_kept(tmp_path: Path) -> None:
    stack = [
        frame("??", 0, "torch::unwind::unwind()"), frame("??", 0, "torch::CapturedTraceback::gather(bool, bool, bool)"),
        frame("x.cpp", 0, "at::_ops::empty::call(long)"), frame("/src/Python/ceval.c", 3, "_PyEval_EvalFrameDefault"), CALL, USER,
    ]  # fmt: skip
    functions = [item.function for item in stack_of(trace_of(tmp_path, stack), 0)]
    assert functions == ["at::_ops::empty::call(long)", "_call_impl", "train"]


def test_forward_frames_become_the_stack_of_a_backward_allocation(tmp_path: Path) -> None:
    printed = [
        '  File "/home/me/train.py", line 9, in <module>\n    loss = model(x)\n',
        '  File "/home/me/model.py", line 4, in forward\n    y = a @ b\n',
    ]
    trace = trace_of(tmp_path, [], forward_frames=printed)
    assert stack_of(trace, 0) == [Frame("/home/me/model.py", 4, "forward"), Frame("/home/me/train.py", 9, "<module>")]
    assert trace.ops["phase"].tolist() == ["backward"]


def test_generated_frames_show_their_source_and_node(tmp_path: Path) -> None:
    generated = frame(
        "/tmp/fx_generated_x.py", 5, "forward", fx_node_op="call_function", fx_node_name="mm_1", fx_node_target="aten.mm.default",
        fx_original_trace='  File "/home/me/model.py", line 20, in forward\n    return self.a(x)\n  File "/home/me/layers.py", line 3, in forward\n    x @ w\n',
    )  # fmt: skip
    trace = trace_of(tmp_path, [generated, USER])
    assert stack_of(trace, 0)[:3] == [
        Frame("/home/me/layers.py", 3, "forward"), Frame("/home/me/model.py", 20, "forward"), Frame("/tmp/fx_generated_x.py", 5, "forward"),
    ]  # fmt: skip
    assert trace.name(int(trace.ops["context"].iloc[0])) == "call_function aten.mm.default mm_1"


def test_user_metadata_and_compile_context_become_the_context(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    for metadata, compiled in (("", "N/A"), ("layer 3", "N/A"), ("", "0/0"), ("layer 3", "0/1")):
        maker.alloc(10, [USER], user_metadata=metadata, compile_context=compiled)
    trace = read_in_process(tmp_path / "a", maker.snapshot())
    op = trace.events.loc[trace.events["kind"] == "alloc", "op_id"]
    context = trace.ops.set_index("op_id")["context"]
    texts = [None if context[number] is context.dtype.na_value else trace.name(int(context[number])) for number in op]
    assert texts == [None, "layer 3", "0/0", "layer 3; 0/1"]


def test_control_characters_are_replaced_in_names(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [frame("a\tb\x1b[31m.py", 3, "f\n\ud800")])
    assert stack_of(trace, 0) == [Frame("a\ufffdb\ufffd[31m.py", 3, "f\ufffd\ufffd")]


def test_long_names_are_truncated(tmp_path: Path) -> None:
    (only_frame,) = stack_of(trace_of(tmp_path, [frame("a.py", 3, "f" * 100_000)]), 0)
    assert len(only_frame.function) < 5000


@pytest.mark.parametrize("line", [None, -1, 2**70, "3", 1.5])
def test_an_invalid_line_number_becomes_zero(tmp_path: Path, line: Any) -> None:
    assert stack_of(trace_of(tmp_path, [frame("a.py", line, "f")]), 0) == [Frame("a.py", 0, "f")]


def _phases(*names: str | None) -> np.ndarray[Any, Any]:
    return np.array([-1 if name is None else PHASES.index(name) for name in names])


def test_allocations_without_a_stack_after_a_forward_pass_belong_to_the_backward_pass() -> None:
    phase = _phases(None, "forward", None, None, "optimizer", None, "forward", None)
    has_stack = np.array([False, True, False, True, True, False, True, False])
    assert infer_backward(phase, has_stack).tolist() == [False, False, True, False, False, False, False, True]


def test_phase_spans_last_until_the_next_phase() -> None:
    phase = _phases(
        None, "forward", None, "forward", "backward", None, "backward", None, "optimizer", None, "optimizer", "forward"
    )
    names = Names()
    spans = phase_spans(phase, np.arange(12) * 10, names)
    rows = [(names.value(span.name), span.start_ns, span.end_ns) for span in spans]
    assert rows == [
        ("forward", 10, 40), ("backward", 40, 61), ("optimizer", 80, 81), ("optimizer", 100, 110), ("forward", 110, 111),
    ]  # fmt: skip
