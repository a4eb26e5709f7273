"""The cut against brute force: every cut of small models, simulated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import MemtraceError
from memtrace.pipeline import partition as cut_module
from memtrace.pipeline.costs import Layer, Shared, cut_costs
from memtrace.pipeline.partition import MEMORY, OBJECTIVES, TIME, balanced_cut
from memtrace.pipeline.plan import Setting, predict
from memtrace.pipeline.schedules.registry import build, parse_choice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.memory import PAPER, TORCH, MemoryModel, memory
from memtrace.pipeline.simulation.simulate import simulate
from tests.pipeline.cases import uniform_layers

even_bytes = st.integers(0, 20).map(lambda n: 2 * n)
plain_lists = st.lists(
    st.builds(
        Layer,
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
# One stage a worker, then two mirrored ones, then several that are no such pair: of so few cuts all are looked at.
families = st.sampled_from(
    [
        ("gpipe", 4),
        ("dapple", 3),
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


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in itertools.combinations(range(1, num_layers), num_stages - 1)]


def with_shared(layers: list[Layer], users: set[int]) -> list[Layer]:
    """The layers where those with these numbers use the same weights."""
    chosen = sorted(number for number in users if number < len(layers))
    return [
        replace(layer, shared=(Shared(0) if number == chosen[0] else Shared(0, 40, 40, 80, 6),))
        if number in chosen
        else layer
        for number, layer in enumerate(layers)
    ]


def slowest_stage(layers: list[Layer], cut: tuple[int, ...], recompute: bool) -> float:
    again = 2 if recompute else 1
    return max(again * stage.forward_s + stage.backward_s for stage in cut_costs(layers, cut))


def fullest_worker(
    layers: list[Layer], cut: tuple[int, ...], schedule: Schedule, recompute: bool = False, model: MemoryModel = PAPER
) -> int:
    simulation = simulate(schedule, cut_costs(layers, cut), recompute=recompute)
    return max(worker.peak_bytes for worker in memory(simulation, model))


def scores(
    layers: list[Layer], schedule: Schedule, recompute: bool, model: MemoryModel
) -> dict[tuple[int, ...], tuple[float, int]]:
    """The slowest stage and the fullest worker of every cut."""
    return {
        cut: (slowest_stage(layers, cut, recompute), fullest_worker(layers, cut, schedule, recompute, model))
        for cut in every_cut(len(layers), schedule.num_stages)
    }


models = st.sampled_from([PAPER, TORCH])


@given(layer_lists, families, st.sampled_from(OBJECTIVES), st.booleans(), models)
@settings(max_examples=250, deadline=None)
def test_cut_is_the_best_of_all(
    layers: list[Layer], family: tuple[str, int], objective: str, recompute: bool, model: MemoryModel
) -> None:
    name, workers = family
    schedule = parse_choice(name).build(workers, 2 * workers)
    found = balanced_cut(layers, schedule, objective=objective, recompute=recompute, model=model)
    assert found is not None and found.exact
    known = scores(layers, schedule, recompute, model)
    order = slice(None, None, 1 if objective == TIME else -1)
    assert known[found.first_layers][order] == min(score[order] for score in known.values())


@given(st.data(), layer_lists, families, st.booleans(), models)
@settings(max_examples=250, deadline=None)
def test_fastest_cut_under_a_memory_limit(
    data: st.DataObject, layers: list[Layer], family: tuple[str, int], recompute: bool, model: MemoryModel
) -> None:
    """Also at the tightest limits: where the emptiest cut just fits, and where it just does not."""
    name, workers = family
    schedule = parse_choice(name).build(workers, 2 * workers)
    known = scores(layers, schedule, recompute, model)
    limit = data.draw(st.sampled_from(sorted(peak for _, peak in known.values()))) - data.draw(st.sampled_from([0, 1]))
    found = balanced_cut(layers, schedule, capacity_bytes=limit, recompute=recompute, model=model)
    fitting = [score for score in known.values() if score[1] <= limit]
    assert (None if found is None else known[found.first_layers]) == min(fitting, default=None)


@given(st.data(), layer_lists, st.sampled_from(["interleaved", "gems", "chimera:f=2"]), st.sampled_from(OBJECTIVES))
@settings(max_examples=80, deadline=None)
def test_of_many_cuts_a_good_one_is_found_and_not_said_to_be_the_best(
    data: st.DataObject, layers: list[Layer], name: str, objective: str
) -> None:
    workers = {"interleaved": 2, "gems": 3, "chimera:f=2": 4}[name]
    schedule = parse_choice(name).build(workers, workers)
    known = scores(layers, schedule, False, PAPER)
    limit = data.draw(st.none() | st.sampled_from(sorted(peak for _, peak in known.values())))
    with mock.patch.object(cut_module, "MAX_CUTS", 0):
        found = balanced_cut(layers, schedule, objective=objective, capacity_bytes=limit)
    if found is not None:
        assert not found.exact and (limit is None or known[found.first_layers][1] <= limit)
        place = OBJECTIVES.index(objective)
        best = min(score[place] for score in known.values() if limit is None or score[1] <= limit)
        assert best <= known[found.first_layers][place] <= 1.5 * best
    else:
        assert limit is not None


def test_unbalanced_model_gets_a_better_cut() -> None:
    """A heavy embedding first: the cut by equal numbers of layers is slower and fuller than the one found."""
    layers = [
        *uniform_layers(1, forward_s=6.0, backward_s=12.0, parameter_bytes=900, activation_bytes=400),
        *uniform_layers(11),
    ]
    equal = (0, 3, 6, 9)
    schedule = build("dapple", 4, 8)
    for objective in (TIME, MEMORY):
        found = balanced_cut(layers, schedule, objective=objective)
        assert found is not None
        assert slowest_stage(layers, found.first_layers, False) < slowest_stage(layers, equal, False)
        assert fullest_worker(layers, found.first_layers, schedule) < fullest_worker(layers, equal, schedule)


def test_no_cut() -> None:
    with pytest.raises(MemtraceError, match="3 layers cannot be cut into 4 stages"):
        balanced_cut(uniform_layers(3), build("dapple", 4, 4))
    with pytest.raises(MemtraceError, match="objective"):
        balanced_cut(uniform_layers(4), build("dapple", 4, 4), objective="beauty")
    assert balanced_cut(uniform_layers(4), build("dapple", 4, 4), capacity_bytes=10) is None
    shown = predict(uniform_layers(4), 4, 4, parse_choice("dapple"), setting=Setting(capacity_bytes=10))
    assert not shown.fits
