"""The simulator reproduces the formulas and numbers of the papers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, make_uniform_stages, partition_costs
from memtrace.pipeline.memory_rules import MemoryModel
from memtrace.pipeline.microbatch_costs import MicrobatchCosts
from memtrace.pipeline.paper_models import (
    BERT_48,
    GPT_2,
    Transformer,
    chimera_paper_layers,
    transformer_layers,
)
from memtrace.pipeline.partition import EQUAL
from memtrace.pipeline.plan import PlanSettings, predict_schedule
from memtrace.pipeline.schedules.registry import build_schedule, parse_schedule_choice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.schedules.weight_versions import version_used
from memtrace.pipeline.search import largest_microbatches, search_configurations
from memtrace.pipeline.simulation import closed_forms
from memtrace.pipeline.simulation.simulator import Simulation, simulate_schedule
from memtrace.pipeline.simulation.worker_memory import WorkerMemory, simulate_memory
from tests.pipeline.cases import schedules, uniform_layers

DEPTHS = (4, 8, 16, 32)
NINE_PAIRS = [(4, 1), (6, 1), (8, 1), (16, 1), (32, 1), (8, 2), (16, 2), (16, 4), (32, 2)]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def run(schedule: Schedule, backward: float = 1.0) -> tuple[Simulation, list[WorkerMemory]]:
    """Simulate equal stages with 1000 bytes of weights and of activations, so that half micro-batches are visible."""
    simulation = simulate_schedule(
        schedule,
        make_uniform_stages(
            schedule.num_stages,
            input_backward_s=backward / 2,
            weight_backward_s=backward / 2,
            parameter_bytes=1000,
            activation_bytes=1000,
        ),
    )
    return simulation, simulate_memory(simulation)


def min_max_in_stages(values: list[int]) -> tuple[float, float]:
    return min(values) / 1000, max(values) / 1000


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "gems", "pipedream", "pipedream-2bw"])
def test_schedules_match_the_table_of_the_chimera_paper(name: str) -> None:
    for depth in DEPTHS:
        check_chimera_table_row(name, depth)


def check_chimera_table_row(name: str, depth: int) -> None:
    count = 2 * depth
    row = closed_forms.chimera_table_row(name, depth, count)
    prediction = predict_schedule(uniform_layers(depth), depth, count, parse_schedule_choice(name))
    _, workers = run(prediction.schedule)
    assert min_max_in_stages([worker.weight_peak_bytes for worker in workers]) == row.weights
    assert min_max_in_stages([worker.activation_peak_bytes for worker in workers]) == row.activations
    if name == "gems":
        # The paper's ratio is the limit of many micro-batches: what two more of them cost.
        long, short = (run(build_schedule(name, depth, n), 2.0)[0] for n in (count + 2, count))
        more_work = (long.busy_s - short.busy_s).sum() / depth
        ratio = 1 - more_work / (long.makespan_s - short.makespan_s)
        assert ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)
    else:
        assert prediction.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)


@pytest.mark.parametrize("depth", DEPTHS)
def test_chimera_matches_its_own_table(depth: int) -> None:
    for f in divisors(depth // 2):
        check_row_of_chimera(depth, f)


def check_row_of_chimera(depth: int, f: int) -> None:
    row = closed_forms.chimera_table_row("chimera", depth, depth, f=f)
    simulation, workers = run(build_schedule("chimera", depth, depth, f=f))
    assert simulation.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)
    assert min_max_in_stages([worker.weight_peak_bytes for worker in workers]) == row.weights
    assert min_max_in_stages([worker.activation_peak_bytes for worker in workers]) == row.activations
    for units in (2, 4, 6):
        row = closed_forms.chimera_table_row("chimera", depth, units * depth, f=f)
        # With forward doubling the ratio holds for any backward, with direct units if backward equals forward.
        doubled = run(build_schedule("chimera", depth, units * depth, f=f, method="doubling"), 2.0)[0]
        direct = run(build_schedule("chimera", depth, units * depth, f=f))[0]
        assert doubled.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)
        assert direct.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)


@pytest.mark.parametrize(("depth", "f"), NINE_PAIRS)
def test_chimera_slots_peaks_and_bubbles_match_the_formulas(depth: int, f: int) -> None:
    schedule = build_schedule("chimera", depth, depth, f=f)
    assert schedule.num_slots - 2 * depth == 2 * (depth // (2 * f) - 1)
    _, workers = run(schedule)
    peaks = [worker.in_flight_peak for worker in workers]
    assert peaks == [closed_forms.chimera_in_flight(depth, worker, f=f) for worker in range(depth)]
    if f == 1:
        simulation, _ = run(schedule, 2.0)
        assert simulation.makespan_s == 5 * depth - 4 == closed_forms.chimera_step_s(1, 2, depth)
        ratio = Fraction(depth - 2) / (Fraction(3 * depth, 2) + depth - 2)
        assert simulation.bubble_ratio == pytest.approx(float(ratio), abs=1e-12)


def test_chimera_peaks_and_makespans_match_the_printed_numbers() -> None:
    def peaks(depth: int, f: int) -> list[int]:
        return [worker.in_flight_peak for worker in run(build_schedule("chimera", depth, depth, f=f))[1]]

    assert peaks(4, 1) == [3, 4, 4, 3]
    assert peaks(8, 1) == [5, 6, 7, 8, 8, 7, 6, 5]
    assert peaks(8, 2) == [7, 8, 8, 7, 7, 8, 8, 7]
    makespans = [run(build_schedule("chimera", depth, depth), 2.0)[0].makespan_s for depth in (4, 6, 8, 16, 32)]
    assert makespans == [16, 26, 36, 76, 156]


@pytest.mark.parametrize("depth", DEPTHS)
def test_chimera_doubling_and_halving_have_the_expected_idle_slots(depth: int) -> None:
    """Doubling needs up to twice the activations, halving no more than direct; both leave D/f - 2 idle slots."""
    for f in divisors(depth // 2):
        check_doubling_and_halving(depth, f)


def check_doubling_and_halving(depth: int, f: int) -> None:
    doubled, more = run(build_schedule("chimera", depth, 2 * depth, f=f, method="doubling"), 2.0)
    halved, same = run(build_schedule("chimera", depth, depth, f=f, method="halving"), 2.0)
    idle_slots = depth // f - 2
    # The bubble of a doubled forward slot shrinks to one forward (figure 7d): half of the slots wait 1, half wait 2.
    assert doubled.makespan_s == 3 * (2 * depth) + 1.5 * idle_slots
    assert halved.makespan_s == 3 * depth + idle_slots
    assert max(worker.activation_peak_bytes for worker in more) == 2 * depth * 1000
    assert max(worker.activation_peak_bytes for worker in same) == depth * 1000
    if (depth, f) == (4, 1):
        assert doubled.makespan_s == 27  # read off figure 7(d)


def test_direct_concatenation_of_chimera_takes_the_time_drawn_in_the_paper() -> None:
    simulation, _ = run(build_schedule("chimera", 4, 8), 2.0)
    assert simulation.makespan_s == 30  # read off figure 7(b)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_chimera_spreads_few_microbatches_over_both_directions(count: int) -> None:
    schedule = build_schedule("chimera", 4, count)
    pipelines = [action.pipeline for action in schedule.actions() if action.kind == "F" and action.stage == 0]
    assert sorted(pipelines) == {1: [0], 2: [0, 1], 3: [0, 0, 1]}[count]


@pytest.mark.parametrize("depth", [4, 6, 8])
def test_eager_all_reduce_overlaps_the_bubbles_of_edge_stages(depth: int) -> None:
    """Workers 0 and D - 1 all-reduce their last stage while they wait; the middle workers have no bubble."""
    network = Network(seconds_per_byte=1e-3)
    schedule = build_schedule("chimera", depth, depth)
    stages = make_uniform_stages(depth, input_backward_s=1, weight_backward_s=1, gradient_bytes=1000)

    def step(sync: str) -> Simulation:
        return simulate_schedule(schedule, stages, network=network, sync=sync)

    after, eager, chosen = step("after"), step("eager"), step("eager-opt")
    assert eager.step_time_s == chosen.step_time_s < after.step_time_s
    assert eager.makespan_s == after.makespan_s
    local_end = chosen.end_s[chosen.offsets[1:] - 1]
    start = {sync.stage: sync.start_s for sync in chosen.all_reduces}
    assert start[depth - 1] < local_end[0] == local_end[depth - 1]
    assert start[depth // 2] >= local_end[depth // 2 - 1] == local_end[depth // 2]
    once = network.all_reduce_s(1000, 2)
    assert once == pytest.approx(1.0)
    assert all(sync.end_s - sync.start_s == pytest.approx(once) for sync in eager.all_reduces)
    with pytest.raises(MemtraceError, match="eager-opt"):
        step("never")


def eager_over_opt(share: float, launch_s: float, bandwidth: float = 6e9, num_microbatches: int = 8) -> float:
    """Bert-48, D = 4, B = 8 on 64 nodes: the step time of eager-sync over that of eager-sync-opt."""
    network = Network(
        latency_s=5e-5, seconds_per_byte=1 / bandwidth, all_reduce_share=share, all_reduce_launch_s=launch_s
    )
    layers = chimera_paper_layers(BERT_48, 8, flops=5e12)
    times = [
        predict_schedule(
            layers, 4, num_microbatches, parse_schedule_choice("chimera"),
            settings=PlanSettings(network=network, data_parallel=16, sync=sync, objective=EQUAL),
        ).step_time_s
        for sync in ("eager", "eager-opt")
    ]  # fmt: skip
    return times[0] / times[1]


def test_all_reduces_of_middle_stages_beside_computation_are_slower_than_after_it() -> None:
    """The paper measures 1.09; free all-reduces would be faster beside computation."""
    assert eager_over_opt(0.0, 0.0) < 1
    assert 1.02 < eager_over_opt(0.5, 0.0) < 1.09
    assert eager_over_opt(0.0, 0.05) > eager_over_opt(0.0, 0.0)
    # With a mini-batch of 512, all-reduces are a larger part of the step.
    assert eager_over_opt(0.75, 0.0, num_microbatches=4) == pytest.approx(1.09, abs=0.01)


@given(
    st.data(),
    schedules(),
    st.floats(0, 0.9),
    st.sampled_from([0.0, 0.3]),
    st.integers(1, 3),
    st.sampled_from(["after", "eager", "eager-opt"]),
)
@settings(max_examples=60, deadline=None)
def test_actions_are_as_much_longer_as_the_all_reduces_beside_them(
    data: st.DataObject, schedule: Schedule, share: float, launch_s: float, data_parallel: int, sync: str
) -> None:
    stages = [
        make_uniform_stages(1, forward_s=data.draw(st.floats(0.5, 2)), gradient_bytes=data.draw(st.integers(0, 9)))[0]
        for _ in range(schedule.num_stages)
    ]
    network = Network(seconds_per_byte=0.5, all_reduce_share=share, all_reduce_launch_s=launch_s)
    free = simulate_schedule(
        schedule, stages, network=Network(seconds_per_byte=0.5), sync=sync, data_parallel=data_parallel
    )
    costly = simulate_schedule(schedule, stages, network=network, sync=sync, data_parallel=data_parallel)
    assert costly.makespan_s >= free.makespan_s * (1 - 1e-6)
    if sync == "after":
        assert costly.makespan_s == free.makespan_s
    if any(action.overlapped for action in schedule.actions()):
        return  # two overlapped actions share what each of them takes longer
    for worker in range(schedule.num_workers):
        beside = [each for each in costly.all_reduces if each.is_eager and worker in each.workers]
        for number in range(costly.offsets[worker], costly.offsets[worker + 1]):
            start, end = costly.start_s[number], costly.end_s[number]
            both = sum(max(0.0, min(end, each.end_s) - max(start, each.start_s)) for each in beside)
            longer = end - start - costly.duration_s[number]
            launches = (longer - share * both) / launch_s if launch_s else longer - share * both
            # Whole launches only, of at most one all-reduce of each stage of the worker.
            assert launches == pytest.approx(round(launches), abs=1e-4 * max(1.0, costly.makespan_s))
            assert -0.01 <= launches <= len(beside) + 0.01


def chosen_by_chimeras_rule(
    model: Transformer, workers: int, depths: tuple[int, ...], bandwidth: float, activations: float = 1.0
) -> list[tuple[int, int, int, bool]]:
    """(W, D, B, recomputation) for a mini-batch of 512 on GPUs of 16 GB, best first."""
    sizes = (1, 2) if model is GPT_2 else (1, 2, 4, 8, 16, 32)
    costs = MicrobatchCosts(
        sizes,
        tuple(
            [
                dataclasses.replace(layer, activation_bytes=round(layer.activation_bytes * activations))
                for layer in chimera_paper_layers(model, size, flops=5e12)
            ]
            for size in sizes
        ),
    )
    configurations = search_configurations(
        costs, workers, 512,
        choices=lambda depth, count: [parse_schedule_choice("chimera")] if depth in depths else [],
        microbatch_sizes=sizes, recompute=(False, True),
        settings=PlanSettings(network=Network(latency_s=5e-5, seconds_per_byte=1 / bandwidth),
                              capacity_bytes=15 * 2**30, sync="eager-opt", objective=EQUAL),
    )  # fmt: skip
    return [
        (row.data_parallel, row.pipeline_workers, row.microbatch_size, row.prediction.recompute)
        for row in largest_microbatches(configurations)
    ]


@pytest.mark.parametrize(
    "bandwidth", [4e9, pytest.param(3e9, marks=pytest.mark.slow), pytest.param(6e9, marks=pytest.mark.slow)]
)
def test_chimeras_rule_chooses_the_configuration_of_the_paper_for_bert_48(bandwidth: float) -> None:
    """Figure 13: the largest micro-batch of every depth, and W = 8, D = 4, B = 8 of all."""
    chosen = chosen_by_chimeras_rule(BERT_48, 32, (2, 4, 8, 16), bandwidth)
    assert chosen[0] == (8, 4, 8, False)
    assert set(chosen) == {(2, 16, 16, False), (4, 8, 16, False), (8, 4, 8, False), (16, 2, 4, False)}


def test_chimeras_rule_chooses_the_configuration_of_the_paper_for_gpt_2() -> None:
    """Figure 13 needs recomputation at D = 8 and 16, for which the paper's activations must be 1.4 times the count."""
    chosen = chosen_by_chimeras_rule(GPT_2, 512, (8, 16, 32, 64), 4e9, activations=1.4)
    assert chosen[0] == (16, 32, 1, False)
    assert set(chosen) == {(8, 64, 1, False), (16, 32, 1, False), (32, 16, 1, True), (64, 8, 1, True)}


def test_all_reduce_takes_the_time_of_rabenseifners_algorithm() -> None:
    network = Network(latency_s=3.0, seconds_per_byte=0.5)
    assert network.all_reduce_s(64, 8) == 2 * 3 * 3.0 + 2 * 7 * 0.5 * 64 / 8
    assert network.all_reduce_s(64, 1) == 0
    assert network.message_s(10) == 8.0


@pytest.mark.parametrize(
    ("model", "total", "heaviest"),
    [
        (BERT_48, 669_790_012, {2: 334_092_288, 4: 182_937_600, 8: 107_360_256, 16: 69_571_584}),
        (GPT_2, 1_389_327_360, {8: 223_059_200, 16: 144_349_440, 32: 104_994_560, 64: 85_317_120}),
    ],
    ids=["bert-48", "gpt-2"],
)
def test_parameter_counts_match_the_chimera_paper(model: Transformer, total: int, heaviest: dict[int, int]) -> None:
    layers = transformer_layers(model, 1, flops=1e12, parameter_width=1)
    assert sum(layer.parameter_bytes for layer in layers) == total
    for depth, expected in heaviest.items():
        # The first stage has the embedding and its share of the blocks.
        blocks = model.num_blocks // depth
        first_layers = (0, *(1 + blocks * stage for stage in range(1, depth)))
        assert partition_costs(layers, first_layers)[0].parameter_bytes == expected


def test_message_sizes_match_the_chimera_paper() -> None:
    assert [BERT_48.message_elements(size) for size in (4, 8, 16)] == [524_800, 1_049_600, 2_099_200]
    assert GPT_2.message_elements(1) == 808_960
    assert transformer_layers(GPT_2, 1, flops=1.0)[3].output_bytes == 4 * 808_960


def test_activation_bytes_of_a_transformer_block_match_the_formula() -> None:
    """One block keeps s b h (34 + 5 a s / h) bytes; worker 0 of 1F1B keeps as much as the whole model."""
    block = GPT_2.block_activation_bytes(2)
    s, b, h, a = 632, 2, 1280, 20
    assert block == pytest.approx(s * b * h * (34 + 5 * a * s / h))
    layers = transformer_layers(GPT_2, 2, flops=1e12)[1:-1]
    prediction = predict_schedule(layers, 8, 16, parse_schedule_choice("1f1b"))
    assert prediction.memories[0].activation_peak_bytes == 64 * block


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_interleaved_peaks_and_bubbles_match_megatron(workers: int) -> None:
    for chunks, rounds in itertools.product((1, 2, 4), (1, 2, 4)):
        count = rounds * workers
        simulation, memories = run(build_schedule("interleaved", workers, count, chunks=chunks), 2.0)
        peaks = [memory.in_flight_peak for memory in memories]
        expected = [closed_forms.interleaved_in_flight(workers, count, w, chunks) for w in range(workers)]
        assert peaks == expected
        if rounds > 1:
            # The bubble as a share of the ideal time; the first worker has the published factor 1 + (p - 1)/(p v).
            ideal = simulation.busy_s[0]
            ratio = (simulation.makespan_s - ideal) / ideal
            assert ratio == pytest.approx((workers - 1) / (chunks * count))
        if rounds > 2:
            factor = 1 + Fraction(workers - 1, workers * chunks)
            assert Fraction(peaks[0], chunks) == workers * factor


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_zero_bubble_schedules_match_the_formulas_of_the_paper(name: str, workers: int) -> None:
    for split in [(1, 1, 1), (2, 3, 1), (3, 3, 2), (1, 2, 1)]:
        check_zero_bubble(name, workers, split)


def check_zero_bubble(name: str, workers: int, split: tuple[int, int, int]) -> None:
    forward, by_input, by_weight = split
    schedule = build_schedule(name, workers, 3 * workers + 2)
    simulation = simulate_schedule(
        schedule,
        make_uniform_stages(
            workers,
            forward_s=forward,
            input_backward_s=by_input,
            weight_backward_s=by_weight,
            activation_bytes=10,
            weight_activation_bytes=3,
        ),
    )
    expected = closed_forms.zero_bubble_idle_s(name, workers, forward, by_input, by_weight)
    assert simulation.span_bubble_s == expected
    peaks = [worker.activation_peak_bytes for worker in simulate_memory(simulation)]
    per_worker = {
        "1f1b": lambda i: (workers - i + 1) * 10,
        "zb-h1": lambda i: (workers - i + 1) * 10 + (i - 1) * 3,
        "zb-h2": lambda i: (2 * workers - 2 * i + 1) * 10 + (2 * i - 2) * 3,
    }[name]
    assert peaks == [per_worker(i) for i in range(1, workers + 1)]


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_zb_v_has_no_bubbles_and_the_memory_of_1f1b(workers: int) -> None:
    schedule = build_schedule("zb-v", workers, 3 * workers)
    stages = make_uniform_stages(2 * workers, input_backward_s=1, weight_backward_s=1, activation_bytes=1)
    simulation = simulate_schedule(schedule, stages)
    assert simulation.span_bubble_s == 0
    # With two chunks per device, p M_B are 2p activations of one chunk.
    assert [worker.activation_peak_bytes for worker in simulate_memory(simulation)] == [2 * workers] * workers


@pytest.mark.parametrize(("stages", "count"), [(4, 8), (8, 16), (8, 20), (16, 40)])
def test_dualpipe_bubbles_and_peaks_match_the_formulas(stages: int, count: int) -> None:
    for overlap in (1.0, 0.9, 0.75):
        check_dualpipe(stages, count, overlap)


def check_dualpipe(stages: int, count: int, overlap: float) -> None:
    expected = closed_forms.dualpipe_idle_s(stages, 3 * overlap, 2, 1)
    for name, workers in (("dualpipe", stages), ("dualpipe-v", stages // 2)):
        simulation = simulate_schedule(
            build_schedule(name, workers, count),
            make_uniform_stages(stages, input_backward_s=1, weight_backward_s=1, activation_bytes=1),
            overlap=overlap,
        )
        idle = simulation.makespan_s - simulation.busy_s
        assert max(idle) == pytest.approx(expected)
        assert [worker.activation_peak_bytes for worker in simulate_memory(simulation)] == [stages + 1] * workers
    if (stages, count, overlap) == (8, 20, 1.0):
        drawn = simulate_schedule(
            build_schedule("dualpipe", 8, 20), make_uniform_stages(8, input_backward_s=1, weight_backward_s=1)
        )
        assert drawn.makespan_s == 66 and (drawn.makespan_s - drawn.busy_s == 6).all()


def test_dualpipe_workers_hold_two_stages() -> None:
    for name, workers, pipelines in (("dualpipe", 4, 2), ("dualpipe-v", 4, 1)):
        schedule = build_schedule(name, workers, 8)
        assert len(schedule.placement) == pipelines
        assert all(worker.weight_peak_bytes == 2000 for worker in run(schedule)[1])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("depth", [2, 4, 8])
def test_2bw_memory_matches_the_formulas_of_the_paper(depth: int, recompute: bool) -> None:
    weights, activations, inputs, count = 100 * depth, 60 * depth, 7, 2 * depth
    layers = uniform_layers(
        depth, parameter_bytes=100, gradient_bytes=0, optimizer_bytes=0, activation_bytes=60, output_bytes=7
    )
    model = MemoryModel(boundaries=True)

    def fullest(name: str) -> int:
        choice = parse_schedule_choice(name)
        prediction = predict_schedule(layers, depth, count, choice, recompute=recompute)
        stages = make_uniform_stages(depth, parameter_bytes=100, activation_bytes=60, input_bytes=7)
        return simulate_memory(simulate_schedule(prediction.schedule, stages, recompute=recompute), model)[0].peak_bytes

    form = closed_forms.two_bw_bytes
    assert fullest("pipedream-2bw") == form(weights, activations, inputs, depth, recompute=recompute)
    flush = form(weights, activations, inputs, depth, recompute=recompute, versions=1)
    assert fullest("1f1b") == flush
    if recompute:
        expected = closed_forms.gpipe_recompute_bytes(weights, activations, inputs, depth, count)
        assert fullest("gpipe") == expected


@pytest.mark.parametrize("every", [4, 5, 8])
def test_2bw_uses_the_weight_versions_of_the_paper(every: int) -> None:
    for k in range(1, 6 * every):
        assert version_used(k - 1, every) == max(math.floor((k - 1) / every) - 1, 0)


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_pipedream_and_2bw_keep_the_published_number_of_weight_versions(depth: int) -> None:
    """In the steady state PipeDream keeps D - s versions on stage s, and 2BW keeps two on every stage."""
    stash = run(build_schedule("pipedream", depth, 4 * depth))[1]
    assert [worker.weight_peak_bytes // 1000 for worker in stash] == [depth - s for s in range(depth)]
    two = run(build_schedule("pipedream-2bw", depth, 4 * depth, update_every=depth))[1]
    assert [worker.weight_peak_bytes // 1000 for worker in two] == [2] * depth


def test_2bw_time_model_equals_the_simulated_steady_state() -> None:
    layers = uniform_layers(4, forward_s=1.0, backward_s=2.0)
    for recompute in (False, True):
        prediction = predict_schedule(layers, 4, 8, parse_schedule_choice("pipedream-2bw"), recompute=recompute)
        model = closed_forms.two_bw_microbatch_s([3.0] * 4, [0.0] * 4, [0.0] * 4, 8, recompute=recompute)
        assert prediction.step_time_s / 8 == pytest.approx(model)
        assert prediction.bubble_ratio == pytest.approx(0)
    waiting = closed_forms.two_bw_microbatch_s([3.0] * 4, [0.0] * 4, [80.0] * 4, 8, recompute=False)
    assert waiting == 10.0


def test_the_chimera_table_has_no_row_for_other_schedules() -> None:
    with pytest.raises(MemtraceError, match="zb-h1"):
        closed_forms.chimera_table_row("zb-h1", 4, 4)
