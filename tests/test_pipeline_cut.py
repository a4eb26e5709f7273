"""The cut against brute force: every cut of small models, simulated."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import uniform_layers

from memtrace.errors import MemtraceError
from memtrace.planning.pipeline.costs import Layer, cut_costs
from memtrace.planning.pipeline.cut import MEMORY, OBJECTIVES, TIME, balanced_cut
from memtrace.planning.pipeline.memory import memory
from memtrace.planning.pipeline.plan import Setting, predict
from memtrace.planning.pipeline.registry import build, parse_choice
from memtrace.planning.pipeline.simulate import simulate
from memtrace.planning.pipeline.table import Schedule

layer_lists = st.lists(
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
    ),
    min_size=4,
    max_size=7,
)
# One stage a worker, then two mirrored ones.
exact = st.sampled_from(
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
    ]
)


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in itertools.combinations(range(1, num_layers), num_stages - 1)]


def slowest_stage(layers: list[Layer], cut: tuple[int, ...], recompute: bool) -> float:
    again = 2 if recompute else 1
    return max(again * stage.forward_s + stage.backward_s for stage in cut_costs(layers, cut))


def fullest_worker(layers: list[Layer], cut: tuple[int, ...], schedule: Schedule, recompute: bool) -> int:
    simulation = simulate(schedule, cut_costs(layers, cut), recompute=recompute)
    return max(worker.peak_bytes for worker in memory(simulation))


@given(layer_lists, exact, st.sampled_from(OBJECTIVES))
@settings(max_examples=120, deadline=None)
def test_cut_is_the_best_of_all(layers: list[Layer], family: tuple[str, int], objective: str) -> None:
    name, workers = family
    schedule = parse_choice(name).build(workers, 2 * workers)
    found = balanced_cut(layers, schedule, objective=objective)
    assert found is not None and found.exact

    def score(cut: tuple[int, ...]) -> tuple[float, float]:
        time, peak = slowest_stage(layers, cut, False), fullest_worker(layers, cut, schedule, False)
        return (time, peak) if objective == TIME else (peak, time)

    cuts = every_cut(len(layers), schedule.num_stages)
    assert found.first_layers in cuts
    assert score(found.first_layers) == min(map(score, cuts))


@given(layer_lists, exact, st.integers(100, 1500))
@settings(max_examples=120, deadline=None)
def test_fastest_cut_under_a_memory_limit(layers: list[Layer], family: tuple[str, int], limit: int) -> None:
    name, workers = family
    schedule = parse_choice(name).build(workers, 2 * workers)
    fitting = [
        slowest_stage(layers, cut, False)
        for cut in every_cut(len(layers), schedule.num_stages)
        if fullest_worker(layers, cut, schedule, False) <= limit
    ]
    found = balanced_cut(layers, schedule, capacity_bytes=limit)
    if found is None:
        assert not fitting
    else:
        assert fullest_worker(layers, found.first_layers, schedule, False) <= limit
        assert slowest_stage(layers, found.first_layers, False) == min(fitting)


@given(layer_lists, st.sampled_from(["dapple", "gpipe", "zb-h1"]), st.integers(100, 600))
@settings(max_examples=60, deadline=None)
def test_cut_with_recomputation(layers: list[Layer], name: str, limit: int) -> None:
    """What fits fits; that nothing faster does is certain only where the backward is not split."""
    schedule = build(name, 3, 5)
    cuts = every_cut(len(layers), 3)
    fitting = [cut for cut in cuts if fullest_worker(layers, cut, schedule, True) <= limit]
    found = balanced_cut(layers, schedule, recompute=True, capacity_bytes=limit)
    if found is not None:
        assert found.first_layers in fitting
    if name != "zb-h1":
        assert (found is None) == (not fitting)
        if found is not None:
            times = [slowest_stage(layers, cut, True) for cut in fitting]
            assert slowest_stage(layers, found.first_layers, True) == min(times)


@given(layer_lists, st.sampled_from(["interleaved", "chimera:f=2"]))
@settings(max_examples=40, deadline=None)
def test_several_stages_a_worker_keep_the_limit(layers: list[Layer], name: str) -> None:
    """Where the search is not exact it says so, and what it calls fitting fits."""
    workers = 4 if name.startswith("chimera") else 2
    schedule = parse_choice(name).build(workers, workers)
    free = balanced_cut(layers, schedule)
    assert free is not None and not free.exact
    assert slowest_stage(layers, free.first_layers, False) == min(
        slowest_stage(layers, cut, False) for cut in every_cut(len(layers), schedule.num_stages)
    )
    limit = fullest_worker(layers, free.first_layers, schedule, False) * 2
    limited = balanced_cut(layers, schedule, capacity_bytes=limit)
    if limited is not None:
        assert fullest_worker(layers, limited.first_layers, schedule, False) <= limit


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
        assert fullest_worker(layers, found.first_layers, schedule, False) < fullest_worker(
            layers, equal, schedule, False
        )


def test_no_cut() -> None:
    with pytest.raises(MemtraceError, match="3 layers cannot be cut into 4 stages"):
        balanced_cut(uniform_layers(3), build("dapple", 4, 4))
    with pytest.raises(MemtraceError, match="objective"):
        balanced_cut(uniform_layers(4), build("dapple", 4, 4), objective="beauty")
    assert balanced_cut(uniform_layers(4), build("dapple", 4, 4), capacity_bytes=10) is None
    shown = predict(uniform_layers(4), 4, 4, parse_choice("dapple"), setting=Setting(capacity_bytes=10))
    assert not shown.fits
