"""The figures of the papers, from the simulator: each row equal to the formula or the printed number."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, cut_costs, uniform_stages
from memtrace.pipeline.models import BERT_48, GPT_2, Transformer, transformer_layers
from memtrace.pipeline.plan import predict
from memtrace.pipeline.schedules.registry import build, parse_choice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation import closed_forms
from memtrace.pipeline.simulation.memory import MemoryModel, WorkerMemory, memory
from memtrace.pipeline.simulation.simulate import Simulation, simulate
from memtrace.pipeline.simulation.versions import version_used
from tests.pipeline.cases import uniform_layers

DEPTHS = (4, 8, 16, 32)
NINE_PAIRS = [(4, 1), (6, 1), (8, 1), (16, 1), (32, 1), (8, 2), (16, 2), (16, 4), (32, 2)]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def run(schedule: Schedule, backward: float = 1.0) -> tuple[Simulation, list[WorkerMemory]]:
    """Equal stages of weight 1 and activation 1 (in thousandths, so that shares of a micro-batch show)."""
    simulation = simulate(
        schedule,
        uniform_stages(
            schedule.num_stages,
            input_backward_s=backward / 2,
            weight_backward_s=backward / 2,
            parameter_bytes=1000,
            activation_bytes=1000,
        ),
    )
    return simulation, memory(simulation)


def interval(values: list[int]) -> tuple[float, float]:
    return min(values) / 1000, max(values) / 1000


@pytest.mark.parametrize("name", ["gpipe", "dapple", "gems", "pipedream", "pipedream-2bw"])
def test_table_of_schemes(name: str) -> None:
    for depth in DEPTHS:
        check_row_of_schemes(name, depth)


def check_row_of_schemes(name: str, depth: int) -> None:
    count = 2 * depth
    row = closed_forms.scheme(name, depth, count)
    found = predict(uniform_layers(depth), depth, count, parse_choice(name))
    _, workers = run(found.schedule)
    assert interval([worker.weight_peak_bytes for worker in workers]) == row.weights
    assert interval([worker.activation_peak_bytes for worker in workers]) == row.activations
    if name == "gems":
        # The paper's ratio is the limit of many micro-batches: what two more of them cost.
        long, short = (run(build(name, depth, n), 2.0)[0] for n in (count + 2, count))
        more_work = (long.busy_s - short.busy_s).sum() / depth
        ratio = 1 - more_work / (long.makespan_s - short.makespan_s)
        assert ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)
    else:
        assert found.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)


@pytest.mark.parametrize("depth", DEPTHS)
def test_table_of_schemes_chimera(depth: int) -> None:
    for f in divisors(depth // 2):
        check_row_of_chimera(depth, f)


def check_row_of_chimera(depth: int, f: int) -> None:
    row = closed_forms.scheme("chimera", depth, depth, f=f)
    simulation, workers = run(build("chimera", depth, depth, f=f))
    assert simulation.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)
    assert interval([worker.weight_peak_bytes for worker in workers]) == row.weights
    assert interval([worker.activation_peak_bytes for worker in workers]) == row.activations
    for units in (2, 4, 6):
        row = closed_forms.scheme("chimera", depth, units * depth, f=f)
        # With forward doubling the ratio holds whatever a backward takes, with direct units if it takes a
        # forward.
        doubled = run(build("chimera", depth, units * depth, f=f, method="doubling"), 2.0)[0]
        direct = run(build("chimera", depth, units * depth, f=f))[0]
        assert doubled.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)
        assert direct.bubble_ratio == pytest.approx(float(row.bubble_ratio), abs=1e-12)


@pytest.mark.parametrize(("depth", "f"), NINE_PAIRS)
def test_chimera_slots_peaks_and_bubbles(depth: int, f: int) -> None:
    schedule = build("chimera", depth, depth, f=f)
    assert schedule.num_slots - 2 * depth == 2 * (depth // (2 * f) - 1)
    _, workers = run(schedule)
    peaks = [worker.in_flight_peak for worker in workers]
    assert peaks == [closed_forms.chimera_in_flight(depth, worker, f=f) for worker in range(depth)]
    if f == 1:
        simulation, _ = run(schedule, 2.0)
        assert simulation.makespan_s == 5 * depth - 4 == closed_forms.chimera_step_s(1, 2, depth)
        ratio = Fraction(depth - 2) / (Fraction(3 * depth, 2) + depth - 2)
        assert simulation.bubble_ratio == pytest.approx(float(ratio), abs=1e-12)


def test_chimera_printed_peaks_and_makespans() -> None:
    def peaks(depth: int, f: int) -> list[int]:
        return [worker.in_flight_peak for worker in run(build("chimera", depth, depth, f=f))[1]]

    assert peaks(4, 1) == [3, 4, 4, 3]
    assert peaks(8, 1) == [5, 6, 7, 8, 8, 7, 6, 5]
    assert peaks(8, 2) == [7, 8, 8, 7, 7, 8, 8, 7]
    makespans = [run(build("chimera", depth, depth), 2.0)[0].makespan_s for depth in (4, 6, 8, 16, 32)]
    assert makespans == [16, 26, 36, 76, 156]


@pytest.mark.parametrize("depth", DEPTHS)
def test_chimera_doubling_and_halving(depth: int) -> None:
    """Doubling: up to twice the activations; halving: no more than direct. Both D/f - 2 idle slots in all."""
    for f in divisors(depth // 2):
        check_doubling_and_halving(depth, f)


def check_doubling_and_halving(depth: int, f: int) -> None:
    doubled, more = run(build("chimera", depth, 2 * depth, f=f, method="doubling"), 2.0)
    halved, same = run(build("chimera", depth, depth, f=f, method="halving"), 2.0)
    idle_slots = depth // f - 2
    # A doubled forward slot's bubble shrinks to one forward (figure 7d): half of the slots wait 1, half wait
    # 2.
    assert doubled.makespan_s == 3 * (2 * depth) + 1.5 * idle_slots
    assert halved.makespan_s == 3 * depth + idle_slots
    assert max(worker.activation_peak_bytes for worker in more) == 2 * depth * 1000
    assert max(worker.activation_peak_bytes for worker in same) == depth * 1000
    if (depth, f) == (4, 1):
        assert doubled.makespan_s == 27  # read off figure 7(d)


def test_chimera_direct_concatenation_as_drawn() -> None:
    simulation, _ = run(build("chimera", 4, 8), 2.0)
    assert simulation.makespan_s == 30  # read off figure 7(b)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_chimera_with_fewer_microbatches_than_stages(count: int) -> None:
    schedule = build("chimera", 4, count)
    pipelines = [action.pipeline for action in schedule.actions() if action.kind == "F" and action.stage == 0]
    assert sorted(pipelines) == {1: [0], 2: [0, 1], 3: [0, 0, 1]}[count]


@pytest.mark.parametrize("depth", [4, 6, 8])
def test_eager_synchronisation_hides_edge_stages(depth: int) -> None:
    """Workers 0 and D - 1 reduce their last stage while they wait; the middle ones have no bubble to use."""
    network = Network(seconds_per_byte=1e-3)
    schedule = build("chimera", depth, depth)
    stages = uniform_stages(depth, input_backward_s=1, weight_backward_s=1, gradient_bytes=1000)

    def step(sync: str) -> Simulation:
        return simulate(schedule, stages, network=network, sync=sync)

    after, eager, chosen = step("after"), step("eager"), step("eager-opt")
    assert eager.step_time_s == chosen.step_time_s < after.step_time_s
    assert eager.makespan_s == after.makespan_s
    local_end = chosen.end_s[chosen.offsets[1:] - 1]
    start = {sync.stage: sync.start_s for sync in chosen.synchronisations}
    assert start[depth - 1] < local_end[0] == local_end[depth - 1]
    assert start[depth // 2] >= local_end[depth // 2 - 1] == local_end[depth // 2]
    once = network.all_reduce_s(1000, 2)
    assert once == pytest.approx(1.0)
    assert all(sync.end_s - sync.start_s == pytest.approx(once) for sync in eager.synchronisations)
    with pytest.raises(MemtraceError, match="eager-opt"):
        step("never")


def test_all_reduce_is_rabenseifners() -> None:
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
def test_parameter_counts(model: Transformer, total: int, heaviest: dict[int, int]) -> None:
    layers = transformer_layers(model, 1, flops=1e12, parameter_width=1)
    assert sum(layer.parameter_bytes for layer in layers) == total
    for depth, expected in heaviest.items():
        # The embedding, and the head, with their share of the blocks.
        blocks = model.num_blocks // depth
        first_layers = (0, *(1 + blocks * stage for stage in range(1, depth)))
        assert cut_costs(layers, first_layers)[0].parameter_bytes == expected


def test_message_sizes() -> None:
    assert [BERT_48.message_elements(size) for size in (4, 8, 16)] == [524_800, 1_049_600, 2_099_200]
    assert GPT_2.message_elements(1) == 808_960
    assert transformer_layers(GPT_2, 1, flops=1.0)[3].output_bytes == 4 * 808_960


def test_activation_bytes_of_a_block() -> None:
    """s b h (34 + 5 a s / h), and a worker 0 of 1F1B that holds the whole model's worth of them."""
    block = GPT_2.block_activation_bytes(2)
    s, b, h, a = 632, 2, 1280, 20
    assert block == pytest.approx(s * b * h * (34 + 5 * a * s / h))
    layers = transformer_layers(GPT_2, 2, flops=1e12)[1:-1]
    found = predict(layers, 8, 16, parse_choice("dapple"))
    assert found.memories[0].activation_peak_bytes == 64 * block


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_interleaved_peaks_and_bubbles(workers: int) -> None:
    for chunks, rounds in itertools.product((1, 2, 4), (1, 2, 4)):
        count = rounds * workers
        simulation, memories = run(build("interleaved", workers, count, chunks=chunks), 2.0)
        peaks = [memory.in_flight_peak for memory in memories]
        expected = [closed_forms.interleaved_in_flight(workers, count, w, chunks) for w in range(workers)]
        assert peaks == expected
        if rounds > 1:
            # Share of the ideal time, and for the first worker the published factor 1 + (p - 1)/(p v).
            ideal = simulation.busy_s[0]
            ratio = (simulation.makespan_s - ideal) / ideal
            assert ratio == pytest.approx((workers - 1) / (chunks * count))
        if rounds > 2:
            factor = 1 + Fraction(workers - 1, workers * chunks)
            assert Fraction(peaks[0], chunks) == workers * factor


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["dapple", "zb-h1", "zb-h2"])
def test_zero_bubble_bubbles_and_peaks(name: str, workers: int) -> None:
    for split in [(1, 1, 1), (2, 3, 1), (3, 3, 2), (1, 2, 1)]:
        check_zero_bubble(name, workers, split)


def check_zero_bubble(name: str, workers: int, split: tuple[int, int, int]) -> None:
    forward, by_input, by_weight = split
    schedule = build(name, workers, 3 * workers + 2)
    simulation = simulate(
        schedule,
        uniform_stages(
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
    peaks = [worker.activation_peak_bytes for worker in memory(simulation)]
    per_worker = {
        "dapple": lambda i: (workers - i + 1) * 10,
        "zb-h1": lambda i: (workers - i + 1) * 10 + (i - 1) * 3,
        "zb-h2": lambda i: (2 * workers - 2 * i + 1) * 10 + (2 * i - 2) * 3,
    }[name]
    assert peaks == [per_worker(i) for i in range(1, workers + 1)]


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_zb_v_has_no_bubbles_and_the_memory_of_1f1b(workers: int) -> None:
    schedule = build("zb-v", workers, 3 * workers)
    stages = uniform_stages(2 * workers, input_backward_s=1, weight_backward_s=1, activation_bytes=1)
    simulation = simulate(schedule, stages)
    assert simulation.span_bubble_s == 0
    # Two chunks a device: p M_B are 2p activations of one chunk.
    assert [worker.activation_peak_bytes for worker in memory(simulation)] == [2 * workers] * workers


@pytest.mark.parametrize(("stages", "count"), [(4, 8), (8, 16), (8, 20), (16, 40)])
def test_dualpipe_bubbles_and_peaks(stages: int, count: int) -> None:
    for overlap in (1.0, 0.9, 0.75):
        check_dualpipe(stages, count, overlap)


def check_dualpipe(stages: int, count: int, overlap: float) -> None:
    expected = closed_forms.dualpipe_idle_s(stages, 3 * overlap, 2, 1)
    for name, workers in (("dualpipe", stages), ("dualpipe-v", stages // 2)):
        simulation = simulate(
            build(name, workers, count),
            uniform_stages(stages, input_backward_s=1, weight_backward_s=1, activation_bytes=1),
            overlap=overlap,
        )
        idle = simulation.makespan_s - simulation.busy_s
        assert max(idle) == pytest.approx(expected)
        assert [worker.activation_peak_bytes for worker in memory(simulation)] == [stages + 1] * workers
    if (stages, count, overlap) == (8, 20, 1.0):
        drawn = simulate(build("dualpipe", 8, 20), uniform_stages(8, input_backward_s=1, weight_backward_s=1))
        assert drawn.makespan_s == 66 and (drawn.makespan_s - drawn.busy_s == 6).all()


def test_dualpipe_holds_two_copies() -> None:
    for name, workers, pipelines in (("dualpipe", 4, 2), ("dualpipe-v", 4, 1)):
        schedule = build(name, workers, 8)
        assert len(schedule.placement) == pipelines
        assert all(worker.weight_peak_bytes == 2000 for worker in run(schedule)[1])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("depth", [2, 4, 8])
def test_2bw_memory_forms(depth: int, recompute: bool) -> None:
    weights, activations, inputs, count = 100 * depth, 60 * depth, 7, 2 * depth
    layers = uniform_layers(
        depth, parameter_bytes=100, gradient_bytes=0, optimizer_bytes=0, activation_bytes=60, output_bytes=7
    )
    model = MemoryModel(boundaries=True)

    def fullest(name: str) -> int:
        choice = parse_choice(name)
        found = predict(layers, depth, count, choice, recompute=recompute)
        stages = uniform_stages(depth, parameter_bytes=100, activation_bytes=60, input_bytes=7)
        return memory(simulate(found.schedule, stages, recompute=recompute), model)[0].peak_bytes

    form = closed_forms.two_bw_bytes
    assert fullest("pipedream-2bw") == form(weights, activations, inputs, depth, recompute=recompute)
    flush = form(weights, activations, inputs, depth, recompute=recompute, versions=1)
    assert fullest("dapple") == flush
    if recompute:
        expected = closed_forms.gpipe_recompute_bytes(weights, activations, inputs, depth, count)
        assert fullest("gpipe") == expected


@pytest.mark.parametrize("every", [4, 5, 8])
def test_2bw_version_rule(every: int) -> None:
    for k in range(1, 6 * every):
        assert version_used(k - 1, every) == max(math.floor((k - 1) / every) - 1, 0)


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_weight_versions(depth: int) -> None:
    """PipeDream keeps D - s versions on stage s, 2BW two anywhere, once the pipeline is full."""
    stash = run(build("pipedream", depth, 4 * depth))[1]
    assert [worker.weight_peak_bytes // 1000 for worker in stash] == [depth - s for s in range(depth)]
    two = run(build("pipedream-2bw", depth, 4 * depth, update_every=depth))[1]
    assert [worker.weight_peak_bytes // 1000 for worker in two] == [2] * depth


def test_2bw_time_model_is_the_simulated_steady_state() -> None:
    layers = uniform_layers(4, forward_s=1.0, backward_s=2.0)
    for recompute in (False, True):
        found = predict(layers, 4, 8, parse_choice("pipedream-2bw"), recompute=recompute)
        model = closed_forms.two_bw_microbatch_s([3.0] * 4, [0.0] * 4, [0.0] * 4, 8, recompute=recompute)
        assert found.step_time_s / 8 == pytest.approx(model)
        assert found.bubble_ratio == pytest.approx(0)
    waiting = closed_forms.two_bw_microbatch_s([3.0] * 4, [0.0] * 4, [80.0] * 4, 8, recompute=False)
    assert waiting == 10.0


def test_table_of_schemes_refuses_other_names() -> None:
    with pytest.raises(MemtraceError, match="zb-h1"):
        closed_forms.scheme("zb-h1", 4, 4)
