"""Configurations that Chimera's rule chooses for the models of its paper, and what eager synchronization costs.

    python benchmarks/pipeline_chimera.py

The rule: for every data-parallel degree W and depth D the largest micro-batch B that fits, then the best step time.
Workers are P100 GPUs of 16 GB, of which 15 GiB are left for the model, with 5 TFLOPS. The paper does not give the
bandwidth of its all-reduces (Gloo over Cray Aries), so several are shown.

Measured in the paper (figure 13): Bert-48 on 32 workers (2, 16, 16), (4, 8, 16), (8, 4, 8), (16, 2, 4), of which (8, 4,
8) is chosen and fastest. GPT-2 on 512 workers (8, 64, 1), (16, 32, 1), (32, 16, 1) and (64, 8, 1), the last two with
recomputation; (16, 32, 1) is chosen. The activations counted here for GPT-2 need no recomputation; 1.4 times as many,
as the paper's need for it implies, give its choice. Figure 12: eager-sync-opt is 1.09 times as fast as eager-sync on
64 nodes.
"""

from __future__ import annotations

import argparse
import dataclasses

from memtrace.pipeline.costs import LayerCosts, Network
from memtrace.pipeline.microbatch_costs import MicrobatchCosts
from memtrace.pipeline.paper_models import BERT_48, GPT_2, Transformer, chimera_paper_layers
from memtrace.pipeline.partition import EQUAL
from memtrace.pipeline.plan import PlanSettings, predict_schedule
from memtrace.pipeline.schedules.registry import ScheduleChoice, parse_schedule_choice
from memtrace.pipeline.search import largest_microbatches, search_configurations

FLOPS = 5e12
CAPACITY_BYTES = 15 * 2**30
LATENCY_S = 50e-6


def paper_costs(model: Transformer, sizes: tuple[int, ...], activations: float = 1.0) -> MicrobatchCosts:
    """The layers of a model for several micro-batch sizes, with a multiple of the counted activations."""

    def scaled(layer: LayerCosts) -> LayerCosts:
        return dataclasses.replace(layer, activation_bytes=round(layer.activation_bytes * activations))

    return MicrobatchCosts(
        sizes, tuple([scaled(layer) for layer in chimera_paper_layers(model, size, flops=FLOPS)] for size in sizes)
    )


def print_choices(
    name: str, costs: MicrobatchCosts, workers: int, depths: tuple[int, ...], bandwidths: tuple[float, ...]
) -> None:
    """Print the configurations that the rule keeps for a mini-batch of 512, best first."""

    def choices(depth: int, count: int) -> list[ScheduleChoice]:
        del count
        return [parse_schedule_choice("chimera")] if depth in depths else []

    print(f"\n{name}, {workers} workers, mini-batch 512: (W, D, B) and seconds per step, best first; R: recomputation")
    for bandwidth in bandwidths:
        settings = PlanSettings(
            network=Network(latency_s=LATENCY_S, seconds_per_byte=1 / bandwidth),
            capacity_bytes=CAPACITY_BYTES, sync="eager-opt", objective=EQUAL,
        )  # fmt: skip
        configurations = search_configurations(
            costs, workers, 512, choices=choices, microbatch_sizes=costs.sizes, recompute=(False, True),
            settings=settings,
        )  # fmt: skip
        texts = [
            f"({each.data_parallel}, {each.pipeline_workers}, {each.microbatch_size}"
            f"{', R' if each.prediction.recompute else ''}) {each.prediction.step_time_s:.2f}"
            for each in largest_microbatches(configurations)
        ]
        print(f"{bandwidth / 1e9:5.1f} GB/s  {'   '.join(texts)}")


def print_synchronization(minibatch: int) -> None:
    """Print the step time of eager-sync over that of eager-sync-opt for Bert-48 on 64 nodes, W = 16, D = 4, B = 8."""
    layers = chimera_paper_layers(BERT_48, 8, flops=FLOPS)
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    print(f"\nBert-48, D = 4, B = 8, 64 nodes, mini-batch {minibatch}: eager-sync / eager-sync-opt")
    print("by bandwidth and all-reduce share" + "".join(f"{share:8.2f}" for share in shares))
    for bandwidth in (3e9, 4e9, 6e9, 9e9):
        ratios = []
        for share in shares:
            network = Network(latency_s=LATENCY_S, seconds_per_byte=1 / bandwidth, all_reduce_share=share)
            steps = [
                predict_schedule(layers, 4, minibatch // (16 * 8), parse_schedule_choice("chimera"),
                settings=PlanSettings(network=network, data_parallel=16, sync=sync, objective=EQUAL)).step_time_s
                for sync in ("eager", "eager-opt")
            ]  # fmt: skip
            ratios.append(steps[0] / steps[1])
        print(f"{bandwidth / 1e9:28.1f} GB/s " + "".join(f"{ratio:8.3f}" for ratio in ratios))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt-activations", type=float, default=1.4, help="multiple of the counted activations")
    arguments = parser.parse_args()
    print_choices("Bert-48", paper_costs(BERT_48, (1, 2, 4, 8, 16, 32)), 32, (2, 4, 8, 16), (2.5e9, 3e9, 4e9, 6e9))
    for activations in (1.0, arguments.gpt_activations):
        costs = paper_costs(GPT_2, (1, 2), activations)
        print_choices(f"GPT-2, {activations:g} x activations", costs, 512, (8, 16, 32, 64), (2e9, 4e9))
    for minibatch in (512, 1024):
        print_synchronization(minibatch)


if __name__ == "__main__":
    main()
