"""Tensor parallelism: local shapes against those of the papers and of ColossalAI, and their sums."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import MemtraceError
from memtrace.planning import plan_whatif
from memtrace.planning.tensor_parallel import Kind, local_shapes
from memtrace.planning.whatif_changes import TensorParallel
from memtrace.trace import Trace
from tests.programs.changed import Setup, record_training, unused_baseline_bytes


def test_3d_shapes_are_those_of_the_documentation_of_colossalai() -> None:
    # Linear 256 -> 1024 and 1024 -> 256 on 2 x 2 x 2 devices, batch 16.
    first, second = local_shapes("3d", 8, 16, 256, 1024), local_shapes("3d", 8, 16, 1024, 256)
    assert first.weight == (128, 256) and second.weight == (512, 64)
    assert first.input == (4, 128) and first.output == second.input == (4, 512) and second.output == (4, 128)


def test_3d_transients_are_a_factor_q_larger_than_what_is_stored() -> None:
    shapes = local_shapes("3d", 8, 16, 256, 1024)
    gathered_input, gathered_weight, partial_output = shapes.transients
    assert gathered_input == (8, 128) and gathered_weight == (128, 512) and partial_output == (8, 512)


def test_1d_shapes_are_those_of_megatron() -> None:
    first = local_shapes("1d", 4, 16, 256, 1024)
    second = local_shapes("1d", 4, 16, 1024, 256, splits_rows=True)
    assert first.weight == (256, 256) and first.input == (16, 256) and first.output == (16, 256)
    assert second.weight == (256, 256) and second.input == (16, 256) and second.output == (16, 256)


def test_2d_shapes_are_those_of_summa() -> None:
    shapes = local_shapes("2d", 4, 16, 256, 1024)
    assert shapes.weight == (128, 512) and shapes.input == (8, 128) and shapes.output == (8, 512)
    assert shapes.transients == (shapes.input, shapes.weight)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.sampled_from(["2d", "3d"]))
def test_the_parts_of_all_ranks_are_the_whole(q: int, rows: int, inputs: int, outputs: int, kind: Kind) -> None:
    batch, num_inputs, num_outputs = rows * q * q, inputs * q * q, outputs * q * q
    num_ranks = q**2 if kind == "2d" else q**3
    shapes = local_shapes(kind, num_ranks, batch, num_inputs, num_outputs)
    assert prod(shapes.weight) * num_ranks == num_inputs * num_outputs
    assert prod(shapes.input) * num_ranks == batch * num_inputs
    assert prod(shapes.output) * num_ranks == batch * num_outputs
    wholes = (batch * num_inputs, num_inputs * num_outputs, batch * num_outputs)
    assert all(prod(shape) * q * q == whole for shape, whole in zip(shapes.transients, wholes, strict=False))


@pytest.mark.parametrize(("kind", "num_ranks"), [("2d", 8), ("3d", 9), ("3d", 0), ("1d", 0)])
def test_ranks_that_form_no_grid_are_refused(kind: Kind, num_ranks: int) -> None:
    with pytest.raises(MemtraceError, match="tensor parallelism needs"):
        local_shapes(kind, num_ranks, 64, 64, 64)


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(MemtraceError, match="cannot be split evenly"):
        local_shapes("3d", 8, 16, 255, 1024)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record_training(Setup("mlp", batch=1024), tmp_path_factory.mktemp("tp") / "run.memtrace")


def test_3d_holds_an_eighth_and_gathers_a_quarter(trace: Trace) -> None:
    result = plan_whatif(trace, [TensorParallel("3d", 8)])
    recorded, split = result.recorded_bytes_by_category, result.rows[0].bytes_by_category
    assert split["parameter"] == pytest.approx(recorded["parameter"] / 8, rel=0.01)
    # Layers 256 -> 512 -> 512 -> 12 with 1,024 rows of float32: input, weight and output of each, a quarter of them.
    layers = [(256, 512), (512, 512), (512, 12)]
    gathered = [4 * (1024 * inputs + inputs * outputs + 1024 * outputs) / 4 for inputs, outputs in layers]
    unused = unused_baseline_bytes(trace)  # stays whole
    more = result.predicted.peak_bytes - unused - (result.recorded.peak_bytes - unused) / 8
    assert min(gathered) * 0.99 <= more <= max(gathered) * 1.01


def test_1d_splits_the_layers_and_what_lies_between_them(trace: Trace) -> None:
    result = plan_whatif(trace, [TensorParallel("1d", 4)])
    recorded, split = result.recorded_bytes_by_category, result.rows[0].bytes_by_category
    assert split["parameter"] == pytest.approx(recorded["parameter"] / 4, rel=0.05)
    # The output of the first layer is split, that of the second is whole.
    assert recorded["activation"] / 4 < split["activation"] < recorded["activation"]


def test_the_time_of_communication_is_unknown(trace: Trace, tmp_path: Path) -> None:
    assert plan_whatif(trace, [TensorParallel("2d", 4)]).predicted.step_ns is None
