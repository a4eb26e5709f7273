"""What-ifs against a second, real run with the change."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from memtrace.cli import main

import memtrace
from memtrace.analysis.attribution import step_rows
from memtrace.errors import MemtraceError
from memtrace.planning import plan_whatif
from memtrace.planning.recorded_step import choose_step, step_peak
from memtrace.planning.timeline_selection import BlockSelection
from memtrace.planning.whatif_changes import (
    Accumulate,
    Autocast,
    Change,
    ChangeDtype,
    ChangeOptimizer,
    FuseOptimizer,
    Remove,
    RemoveOperators,
    Resize,
    ScaleBatch,
    Shard,
    TensorParallel,
)
from memtrace.planning.whatif_optimizer import IMPLEMENTATIONS, OPTIMIZERS, temporary_bytes
from memtrace.trace import Trace
from tests.cli.runner import run_memtrace
from tests.programs.changed import (
    MODELS,
    UNITS,
    Setup,
    make_optimizer,
    record_sharded,
    record_training,
    sharded_peaks,
    unused_baseline_bytes,
)

MODEL_NAMES = sorted(MODELS)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Unchanged runs by model, recorded once; the folder of each has its name."""
    folder = tmp_path_factory.mktemp("whatif")
    return {model: record_training(Setup(model), folder / model) for model in MODEL_NAMES}


def peak_error(trace: Trace, changes: list[Change], second: Trace) -> float:
    """How far the predicted peak is from that of a second run, as a share of it."""
    predicted = plan_whatif(trace, changes, device="cpu").predicted.peak_bytes - unused_baseline_bytes(trace)
    return predicted / (choose_step(second, "cpu").cost.peak_bytes - unused_baseline_bytes(second)) - 1


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_larger_batch_has_the_predicted_peak(model: str, traces: dict[str, Trace], tmp_path: Path) -> None:
    second = record_training(Setup(model, batch=32), tmp_path / "second")
    assert abs(peak_error(traces[model], [ScaleBatch(4)], second)) < 0.01


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_two_traces_give_the_exact_law_of_the_peak(model: str, traces: dict[str, Trace], tmp_path: Path) -> None:
    runs = {size: record_training(Setup(model, batch=size), tmp_path / str(size)) for size in (12, 32)}
    result = plan_whatif(traces[model], device="cpu", batch=8, others=runs, capacity_bytes=1 << 30)
    rows = {row.batch: row for row in result.batch_law.residuals}
    assert set(rows) == {8, 12, 32} and rows[8].is_fitted and rows[32].is_fitted and not rows[12].is_fitted
    assert all(abs(row.predicted_bytes / row.recorded_bytes - 1) < 0.01 for row in rows.values())
    assert result.largest_batch is not None and result.largest_batch.batch is not None
    assert result.batch_law.peak_bytes(result.largest_batch.batch) == pytest.approx(1 << 30, rel=0.01)


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_adamw_has_the_predicted_peak(model: str, traces: dict[str, Trace], tmp_path: Path) -> None:
    second = record_training(Setup(model, optimizer="adamw"), tmp_path / "second")
    assert abs(peak_error(traces[model], [ChangeOptimizer("adamw", "for-loop")], second)) < 0.01


def test_a_fused_optimizer_has_the_predicted_peak(tmp_path: Path) -> None:
    first = record_training(Setup("mlp", optimizer="adamw", implementation="foreach"), tmp_path / "first")
    second = record_training(Setup("mlp", optimizer="adamw", implementation="fused"), tmp_path / "second")
    assert abs(peak_error(first, [FuseOptimizer()], second)) < 0.01
    changed = [ChangeOptimizer("adamw", "foreach")]
    assert plan_whatif(second, changed).predicted.peak_bytes == pytest.approx(
        choose_step(first, "cpu").cost.peak_bytes, rel=0.01
    )


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_accumulated_gradients_have_the_predicted_peak(model: str, traces: dict[str, Trace], tmp_path: Path) -> None:
    second = record_training(Setup(model, num_microbatches=4), tmp_path / "second")
    assert abs(peak_error(traces[model], [Accumulate(4)], second)) < 0.05


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_autocast_has_about_the_predicted_peak(model: str, traces: dict[str, Trace], tmp_path: Path) -> None:
    second = record_training(Setup(model, autocast=True), tmp_path / "second")
    # Which workspaces a convolution needs in half precision depends on the processor.
    assert abs(peak_error(traces[model], [Autocast("bfloat16")], second)) < (0.15 if model == "cnn" else 0.01)


# benchmarks/what_if.py compares every model on 2 and 4 ranks.
@pytest.mark.parametrize(("model", "num_ranks"), [("mlp", 2), pytest.param("gpt", 4, marks=pytest.mark.slow)])
def test_fsdp_has_the_predicted_peak(model: str, num_ranks: int, tmp_path: Path) -> None:
    first = record_training(Setup(model, optimizer="adamw"), tmp_path / "first")
    sharded = Setup(model, optimizer="adamw", num_ranks=num_ranks)
    second = record_sharded(sharded, tmp_path / "second", timeout_s=400)
    predicted = plan_whatif(first, [Shard("fsdp", num_ranks, UNITS[model])]).predicted.peak_bytes
    measured = min(sharded_peaks(second))
    assert abs(predicted / measured - 1) <= 0.05


def test_fsdp_wraps_only_modules_with_parameters_by_default(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with memtrace.record(tmp_path / "run.memtrace", model=model) as recording:
        for _ in recording.steps(range(3)):
            model(torch.randn(8, 64)).sum().backward()
    trace = memtrace.load(tmp_path / "run.memtrace")
    default, explicit = (plan_whatif(trace, [Shard("fsdp", 2, units)]) for units in ((), ("0", "2")))
    assert default.predicted == explicit.predicted


def test_optimizers_allocate_what_the_table_states(tmp_path: Path) -> None:
    sizes = [100_000, 700_000, 300_000, 500_000]
    combinations = [
        (name, implementation)
        for name, memory in OPTIMIZERS.items()
        for implementation in IMPLEMENTATIONS
        if implementation != "fused" or memory.has_fused
    ]
    gc.collect()
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        for name, implementation in combinations:
            memory = OPTIMIZERS[name]
            parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer = make_optimizer(name, implementation, parameters)
            optimizer.step()  # allocates the state
            rec.step()
            optimizer.step()
            rec.step()
            state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
            large = sum(value.nbytes for value in state if value.numel() > 1)
            assert large == 4 * sum(sizes) * memory.state, name
            assert sum(value.nbytes for value in state if value.numel() == 1) == len(sizes) * memory.scalar_bytes, name
    trace = memtrace.load(tmp_path / "run.memtrace")
    rows = step_rows(trace)
    for number, (name, implementation) in enumerate(combinations):
        first, end = int(rows.first_row[2 * number + 1]), int(rows.end_row[2 * number + 1])
        before = step_peak(trace, "cpu", first, first)
        allocated = step_peak(trace, "cpu", first, end) - before
        expected = temporary_bytes(OPTIMIZERS[name], implementation, 4 * np.array(sizes))
        assert abs(allocated - expected) < 4096, (name, implementation)


def test_changes_are_made_one_after_another_and_each_adds_its_row(traces: dict[str, Trace]) -> None:
    changes: list[Change] = [ScaleBatch(2), ChangeOptimizer("adamw"), Shard("optimizer_state", 8)]
    result = plan_whatif(traces["gpt"], changes)
    assert [row.change for row in result.rows] == ["batch x 2", "optimizer adamw", "optimizer_state over 8 ranks"]
    assert result.predicted == result.rows[-1].cost
    alone = plan_whatif(traces["gpt"], [ScaleBatch(2)])
    assert alone.predicted == result.rows[0].cost
    assert sum(result.rows[1].bytes_by_category.values()) == result.rows[1].cost.peak_bytes
    state = [row.bytes_by_category["optimizer_state"] for row in result.rows[1:]]
    assert state[1] == pytest.approx(state[0] / 8, rel=0.01)


def test_the_law_counts_samples_of_the_changed_batch(traces: dict[str, Trace]) -> None:
    recorded = plan_whatif(traces["gpt"], batch=8, capacity_bytes=1 << 30)
    scaled = plan_whatif(traces["gpt"], [ScaleBatch(4)], batch=8, capacity_bytes=1 << 30)
    assert scaled.batch_law.batch == 32
    for batch in (1, 8, 32, 100):
        assert scaled.batch_law.peak_bytes(batch) == pytest.approx(recorded.batch_law.peak_bytes(batch), rel=1e-3)
    assert recorded.largest_batch is not None and scaled.largest_batch is not None
    assert scaled.largest_batch.batch == recorded.largest_batch.batch


def test_no_change_predicts_the_recorded_step(traces: dict[str, Trace]) -> None:
    for trace in traces.values():
        result = plan_whatif(trace)
        same = plan_whatif(trace, [ScaleBatch(1), Shard("zero1", 1), TensorParallel("3d", 1), Accumulate(1)])
        assert result.rows == () and result.predicted == result.recorded
        assert same.predicted.peak_bytes == result.recorded.peak_bytes


def test_zero_stages_hold_less_and_less(traces: dict[str, Trace], tmp_path: Path) -> None:
    trace = record_training(Setup("gpt", optimizer="adamw"), tmp_path / "first")
    by_stage = [plan_whatif(trace, [Shard(stage, 4)]) for stage in ("zero1", "zero2", "zero3")]
    recorded = by_stage[0].recorded_bytes_by_category
    first, second, third = (stage.rows[0].bytes_by_category for stage in by_stage)
    assert first["optimizer_state"] == pytest.approx(recorded["optimizer_state"] / 4, rel=0.01)
    assert first["parameter"] == second["parameter"] == recorded["parameter"]
    assert third["parameter"] == pytest.approx(recorded["parameter"] / 4, rel=0.01)
    assert by_stage[1].predicted.peak_bytes <= by_stage[0].predicted.peak_bytes < by_stage[0].recorded.peak_bytes


def test_a_removed_activation_is_missing_at_the_peak(traces: dict[str, Trace]) -> None:
    recorded = plan_whatif(traces["gpt"])
    activation = BlockSelection(category="activation")
    without = plan_whatif(traces["gpt"], [Remove(activation)])
    assert "activation" in recorded.recorded_bytes_by_category
    assert "activation" not in without.rows[0].bytes_by_category
    assert without.predicted.step_ns is None
    quarter = plan_whatif(traces["gpt"], [Resize(activation, 0.25)]).rows[0].bytes_by_category
    assert quarter["activation"] == pytest.approx(recorded.recorded_bytes_by_category["activation"] / 4, rel=0.01)
    half = plan_whatif(traces["gpt"], [ChangeDtype("activation", "bfloat16")]).rows[0].bytes_by_category
    assert half["activation"] == pytest.approx(recorded.recorded_bytes_by_category["activation"] / 2, rel=0.01)


def test_removed_operators_take_no_time_and_no_memory(traces: dict[str, Trace]) -> None:
    result = plan_whatif(traces["gpt"], [RemoveOperators("aten::gelu")])
    assert result.predicted.peak_bytes < result.recorded.peak_bytes
    assert result.predicted.step_ns is not None and result.recorded.step_ns is not None
    assert result.predicted.step_ns < result.recorded.step_ns


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (ChangeOptimizer("lion"), "unknown"),
        (ChangeOptimizer("rmsprop", "fused"), "no fused rmsprop"),
        (Shard("weights", 4), "not a category"),
        (Shard("fsdp", 4, ("layers.*",)), "no module with parameters"),
        (TensorParallel("3d", 4), "8, 27, 64"),
        (Remove(BlockSelection(min_bytes=1 << 50)), "nothing would change"),
        (RemoveOperators("aten::no_such_operator"), "no operator"),
    ],
)
def test_what_a_trace_cannot_answer_is_refused_in_one_sentence(
    change: Change, message: str, traces: dict[str, Trace]
) -> None:
    with pytest.raises(MemtraceError, match=message):
        plan_whatif(traces["gpt"], [change])


def test_the_state_is_not_split_twice(traces: dict[str, Trace]) -> None:
    with pytest.raises(MemtraceError, match="at once"):
        plan_whatif(traces["gpt"], [Shard("zero1", 2), Shard("fsdp", 2)])


def test_traces_of_different_programs_are_refused(traces: dict[str, Trace]) -> None:
    with pytest.raises(MemtraceError, match="not seem to be of the same program"):
        plan_whatif(traces["mlp"], batch=8, others={16: traces["cnn"]})


def test_the_command_prints_one_row_per_change(traces: dict[str, Trace]) -> None:
    path = str(traces["gpt"].path)
    options = ["--scale-batch", "2", "--shard", "optimizer_state=8", "--dtype", "activation=bf16",
               "--tensor-parallel", "3d:8", "--fuse", "optimizer", "--capacity", "16GiB"]  # fmt: skip
    done = run_memtrace("plan", "whatif", path, *options)
    assert done.returncode == 0, done.stderr
    for text in ("Recorded", "batch x 2", "activation in bfloat16", "fused optimizer", "3d tensor parallelism over 8",
                 "optimizer_state over 8 ranks", "Largest batch that fits 16.0 GiB"):  # fmt: skip
        assert text in done.stdout
    result = json.loads(run_memtrace("plan", "whatif", path, *options, "--json").stdout)
    assert len(result["rows"]) == 5
    assert result["predicted"] == result["rows"][-1]["cost"]


@pytest.mark.parametrize(
    "options",
    [
        ["--shard", "fsdp"],
        ["--shard", "fsdp=0"],
        ["--tensor-parallel", "4d:16"],
        ["--dtype", "activation=int7"],
        ["--amp", "fp32"],
        ["--optimizer", "adamw:vectorized"],
        ["--unit", "blocks.*"],
        ["--resize", "activation"],
        ["--batch-trace", "16=run.memtrace"],
        ["--remove", "colour=red"],
        ["--device", "cuda:7"],
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(
    options: list[str], traces: dict[str, Trace], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", "whatif", str(traces["mlp"].path), *options])
    message = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert len(message.strip().splitlines()) == 1 and message.startswith("memtrace: ")
