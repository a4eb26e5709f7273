"""Partitions against brute force: every partition of small models, simulated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import MemtraceError
from memtrace.pipeline import partition as partition_module
from memtrace.pipeline.costs import LayerCosts, SharedWeights, partition_costs
from memtrace.pipeline.memory_rules import PAPER, TORCH, MemoryModel
from memtrace.pipeline.partition import MEMORY, OBJECTIVES, TIME, balance_partition
from memtrace.pipeline.plan import PlanSettings, predict_schedule
from memtrace.pipeline.schedules.registry import build_schedule, parse_schedule_choice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.simulator import simulate_schedule
from memtrace.pipeline.simulation.worker_memory import simulate_memory
from tests.pipeline.cases import uniform_layers

even_bytes = st.integers(0, 20).map(lambda n: 2 * n)
plain_lists = st.lists(
    st.builds(
        LayerCosts,
        name=st.just("layer"),
        forward_s=st.integers(1, 9).map(float),
        backward_s=st.integers(1, 18).map(float),
        parameter_bytes=st.integers(0, 50),
        gradient_bytes=st.integers(0, 50),
        optimizer_bytes=st.integers(0, 50),
        activation_bytes=st.integers(1, 20).map(lambda n: 2 * n),
        output_bytes=st.integers(0, 5).map(lambda n: 2 * n),
        weight_activation_bytes=st.none() | st.just(2),
        forward_temporary_bytes=even_bytes,
        backward_temporary_bytes=even_bytes,
        input_backward_temporary_bytes=st.none() | even_bytes,
        first_backward_temporary_bytes=st.none() | even_bytes,
        largest_gradient_bytes=even_bytes,
        unsaved_output_bytes=even_bytes,
        optimizer_temporary_bytes=even_bytes,
        largest_optimizer_temporary_bytes=even_bytes,
    ),
    min_size=4,
    max_size=7,
)
layer_lists = st.builds(
    lambda layers, users: with_shared(layers, users), plain_lists, st.sets(st.integers(0, 6), max_size=3)
)
# One stage per worker, then two mirrored stages, then several that are no such pair (few partitions: all are tried).
families = st.sampled_from(
    [
        ("gpipe", 4),
        ("1f1b", 3),
        ("pipedream", 3),
        ("pipedream-2bw", 2),
        ("zb-h1", 4),
        ("zb-h2", 3),
        ("chimera", 4),
        ("chimera:method=halving", 4),
        ("gems", 4),
        ("dualpipe", 4),
        ("zb-v", 2),
        ("dualpipe-v", 2),
        ("interleaved", 2),
        ("gems", 3),
        ("chimera:f=2", 4),
    ]
)


def every_partition(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in itertools.combinations(range(1, num_layers), num_stages - 1)]


def with_shared(layers: list[LayerCosts], users: set[int]) -> list[LayerCosts]:
    """``layers`` of which those with the numbers ``users`` share the same weights."""
    chosen = sorted(number for number in users if number < len(layers))
    return [
        replace(layer, shared=(SharedWeights(0) if number == chosen[0] else SharedWeights(0, 40, 40, 80, 6),))
        if number in chosen
        else layer
        for number, layer in enumerate(layers)
    ]


def slowest_stage(layers: list[LayerCosts], first_layers: tuple[int, ...], recompute: bool) -> float:
    again = 2 if recompute else 1
    return max(again * stage.forward_s + stage.backward_s for stage in partition_costs(layers, first_layers))


def fullest_worker(
    layers: list[LayerCosts],
    first_layers: tuple[int, ...],
    schedule: Schedule,
    recompute: bool = False,
    model: MemoryModel = PAPER,
) -> int:
    simulation = simulate_schedule(schedule, partition_costs(layers, first_layers), recompute=recompute)
    return max(worker.peak_bytes for worker in simulate_memory(simulation, model))


def scores(
    layers: list[LayerCosts], schedule: Schedule, recompute: bool, model: MemoryModel
) -> dict[tuple[int, ...], tuple[float, int]]:
    """Seconds of the slowest stage and bytes of the fullest worker, for every partition."""
    return {
        first_layers: (
            slowest_stage(layers, first_layers, recompute),
            fullest_worker(layers, first_layers, schedule, recompute, model),
        )
        for first_layers in every_partition(len(layers), schedule.num_stages)
    }


models = st.sampled_from([PAPER, TORCH])


@given(layer_lists, families, st.sampled_from([TIME, MEMORY]), st.booleans(), models)
@settings(max_examples=100, deadline=None)
def test_the_partition_is_the_best_of_all(
    layers: list[LayerCosts], family: tuple[str, int], objective: str, recompute: bool, model: MemoryModel
) -> None:
    name, workers = family
    schedule = parse_schedule_choice(name).build(workers, 2 * workers)
    result = balance_partition(layers, schedule, objective=objective, recompute=recompute, model=model)
    assert result is not None and result.exact
    known = scores(layers, schedule, recompute, model)
    order = slice(None, None, 1 if objective == TIME else -1)
    assert known[result.first_layers][order] == min(score[order] for score in known.values())


@given(st.data(), layer_lists, families, st.booleans(), models)
@settings(max_examples=100, deadline=None)
def test_the_partition_is_the_fastest_within_a_capacity(
    data: st.DataObject, layers: list[LayerCosts], family: tuple[str, int], recompute: bool, model: MemoryModel
) -> None:
    """Includes the tightest capacities: the partition with the lowest peak just fits, or just does not."""
    name, workers = family
    schedule = parse_schedule_choice(name).build(workers, 2 * workers)
    known = scores(layers, schedule, recompute, model)
    limit = data.draw(st.sampled_from(sorted(peak for _, peak in known.values()))) - data.draw(st.sampled_from([0, 1]))
    result = balance_partition(layers, schedule, capacity_bytes=limit, recompute=recompute, model=model)
    fitting = [score for score in known.values() if score[1] <= limit]
    assert (None if result is None else known[result.first_layers]) == min(fitting, default=None)


@given(st.data(), layer_lists, st.sampled_from(["interleaved", "gems", "chimera:f=2"]), st.sampled_from([TIME, MEMORY]))
@settings(max_examples=40, deadline=None)
def test_with_too_many_partitions_the_result_is_good_and_not_exact(
    data: st.DataObject, layers: list[LayerCosts], name: str, objective: str
) -> None:
    workers = {"interleaved": 2, "gems": 3, "chimera:f=2": 4}[name]
    schedule = parse_schedule_choice(name).build(workers, workers)
    known = scores(layers, schedule, False, PAPER)
    limit = data.draw(st.none() | st.sampled_from(sorted(peak for _, peak in known.values())))
    with mock.patch.object(partition_module, "MAX_PARTITIONS", 0):
        result = balance_partition(layers, schedule, objective=objective, capacity_bytes=limit)
    if result is not None:
        assert not result.exact and (limit is None or known[result.first_layers][1] <= limit)
        place = OBJECTIVES.index(objective)
        best = min(score[place] for score in known.values() if limit is None or score[1] <= limit)
        assert best <= known[result.first_layers][place] <= 1.5 * best
    else:
        assert limit is not None


def test_an_unbalanced_model_gets_a_better_partition_than_equal_layer_counts() -> None:
    """The first layer is a heavy embedding: equal numbers of layers are slower and need more memory."""
    layers = [
        *uniform_layers(1, forward_s=6.0, backward_s=12.0, parameter_bytes=900, activation_bytes=400),
        *uniform_layers(11),
    ]
    equal = (0, 3, 6, 9)
    schedule = build_schedule("1f1b", 4, 8)
    for objective in (TIME, MEMORY):
        result = balance_partition(layers, schedule, objective=objective)
        assert result is not None
        assert slowest_stage(layers, result.first_layers, False) < slowest_stage(layers, equal, False)
        assert fullest_worker(layers, result.first_layers, schedule) < fullest_worker(layers, equal, schedule)


def test_without_a_partition_that_fits_the_prediction_does_not_fit() -> None:
    with pytest.raises(MemtraceError, match="3 layers cannot be split into 4 stages"):
        balance_partition(uniform_layers(3), build_schedule("1f1b", 4, 4))
    with pytest.raises(MemtraceError, match="objective"):
        balance_partition(uniform_layers(4), build_schedule("1f1b", 4, 4), objective="beauty")
    assert balance_partition(uniform_layers(4), build_schedule("1f1b", 4, 4), capacity_bytes=10) is None
    shown = predict_schedule(
        uniform_layers(4), 4, 4, parse_schedule_choice("1f1b"), settings=PlanSettings(capacity_bytes=10)
    )
    assert not shown.fits
