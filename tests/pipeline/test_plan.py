"""Plans: ranking within a capacity, search against enumeration, and ``memtrace plan pipeline``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memtrace.cli import cli

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, combine_layers, partition_costs, read_layers, scale_microbatch
from memtrace.pipeline.microbatch_costs import MicrobatchCosts
from memtrace.pipeline.plan import PlanSettings, plan_pipeline, predict_schedule
from memtrace.pipeline.schedules.registry import all_schedule_choices, parse_schedule_choice
from memtrace.pipeline.schedules.schedule import parse_schedule
from memtrace.pipeline.search import largest_microbatches, search_configurations
from tests.pipeline.cases import uniform_layers


def test_schedules_that_fit_come_first_and_are_ranked_by_time() -> None:
    layers = uniform_layers(16)
    result = plan_pipeline(layers, 4, 8, choices=all_schedule_choices(4, 8), settings=PlanSettings(capacity_bytes=3000))
    assert not result.skipped
    fitting = [row for row in result.predictions if row.fits]
    assert fitting and result.predictions[: len(fitting)] == fitting
    times = [row.step_time_s for row in fitting]
    assert times == sorted(times)
    for row in result.predictions:
        assert row.fits == all(worker.peak_bytes <= 3000 for worker in row.memories)
    free = plan_pipeline(layers, 4, 8, choices=all_schedule_choices(4, 8))
    assert all(row.fits for row in free.predictions)


def test_schedules_that_cannot_be_built_are_skipped_with_a_reason() -> None:
    result = plan_pipeline(uniform_layers(5), 3, 7, choices=all_schedule_choices(3, 7))
    skipped = {entry.schedule.partition(":")[0]: entry.reason for entry in result.skipped}
    assert "even number of stages" in skipped["chimera"]
    assert "even number of workers" in skipped["dualpipe"]
    assert "5 layers cannot be split into 6 stages" in skipped["zb-v"]
    assert {row.choice.family.name for row in result.predictions} == {
        "gpipe", "1f1b", "pipedream", "pipedream-2bw", "gems", "zb-h1", "zb-h2",
    }  # fmt: skip


def test_recomputation_trades_time_for_memory() -> None:
    layers = uniform_layers(8, activation_bytes=1000, output_bytes=10)
    both = plan_pipeline(layers, 4, 8, choices=[parse_schedule_choice("1f1b")], recompute=(False, True)).predictions
    plain, again = sorted(both, key=lambda row: row.recompute)
    assert again.step_time_s == pytest.approx(plain.step_time_s * 4 / 3)
    # Stage 0 keeps nothing but its own running activations, the others four inputs at most.
    assert [worker.activation_peak_bytes for worker in again.memories] == [2000, 2030, 2020, 2010]
    assert [worker.activation_peak_bytes for worker in plain.memories] == [8000, 6000, 4000, 2000]


def test_messages_and_all_reduces_lengthen_the_step() -> None:
    layers = uniform_layers(4)
    free = predict_schedule(layers, 4, 8, parse_schedule_choice("1f1b"))
    slow = predict_schedule(
        layers, 4, 8, parse_schedule_choice("1f1b"), settings=PlanSettings(network=Network(latency_s=0.5))
    )
    assert slow.step_time_s > free.step_time_s
    wide = PlanSettings(network=Network(seconds_per_byte=0.1), data_parallel=2)
    reduced = predict_schedule(uniform_layers(4, output_bytes=0), 4, 8, parse_schedule_choice("1f1b"), settings=wide)
    # The gradient of the first stage completes last: its 100 bytes are all-reduced over two workers.
    assert reduced.step_time_s == pytest.approx(free.step_time_s + 2 * 1 * 0.1 * 100 / 2)
    steady = predict_schedule(
        uniform_layers(4, output_bytes=0), 4, 8, parse_schedule_choice("pipedream"), settings=wide
    )
    assert steady.step_time_s == pytest.approx(max(24.0, 8 * 10.0))


def test_search_equals_enumeration() -> None:
    layers = uniform_layers(8, forward_s=0.01, backward_s=0.02)
    setting = PlanSettings(network=Network(latency_s=0.001, seconds_per_byte=1e-5), capacity_bytes=4000)
    names = ("1f1b", "chimera")

    def choices(depth: int, count: int) -> list[Any]:
        del count
        return [parse_schedule_choice(name) for name in names if depth % 2 == 0 or name == "1f1b"]

    result = search_configurations(
        MicrobatchCosts((1,), (layers,)), 8, 32, choices=choices, microbatch_sizes=(1, 2, 4), settings=setting
    )
    expected = []
    for degree in (1, 2, 4, 8):
        for size in (1, 2, 4):
            depth, count = 8 // degree, 32 // (degree * size)
            for choice in choices(depth, count):
                prediction = predict_schedule(
                    scale_microbatch(layers, size),
                    depth,
                    count,
                    choice,
                    settings=dataclasses.replace(setting, data_parallel=degree),
                )
                expected.append((not prediction.fits, prediction.step_time_s))
    assert [(not row.prediction.fits, row.prediction.step_time_s) for row in result] == sorted(expected)
    best = result[0]
    assert best.prediction.fits and best.data_parallel * best.pipeline_workers == 8
    rule = largest_microbatches(result)
    for row in rule:
        larger = [
            other
            for other in result
            if other.prediction.fits
            and (other.data_parallel, other.pipeline_workers) == (row.data_parallel, row.pipeline_workers)
            and str(other.prediction.choice) == str(row.prediction.choice)
            and other.microbatch_size > row.microbatch_size
            and other.num_microbatches >= other.pipeline_workers
        ]
        assert not larger


def test_a_search_without_a_result_gives_the_reason() -> None:
    with pytest.raises(MemtraceError, match="a batch of 7 does not divide"):
        search_configurations(
            MicrobatchCosts((1,), (uniform_layers(4),)),
            4,
            7,
            choices=lambda d, n: [parse_schedule_choice("1f1b")],
            microbatch_sizes=(2,),
        )
    with pytest.raises(MemtraceError, match="cannot be split"):
        search_configurations(
            MicrobatchCosts((1,), (uniform_layers(1),)),
            2,
            4,
            choices=lambda d, n: [parse_schedule_choice("zb-v")],
            microbatch_sizes=(1,),
        )


def test_stage_costs_sum_layers_and_have_their_peaks() -> None:
    layers = uniform_layers(3, forward_temporary_bytes=7, backward_temporary_bytes=5, largest_gradient_bytes=20)
    stage = combine_layers(layers, input_bytes=10)
    assert (stage.forward_s, stage.backward_s, stage.input_backward_s) == (3.0, 6.0, 3.0)
    assert (stage.parameter_bytes, stage.activation_bytes, stage.output_bytes) == (300, 150, 10)
    # The forward peaks in the last layer, on top of all activations; so does the backward, which begins there.
    assert stage.forward_temporary_bytes == 7
    assert stage.backward_temporary_bytes == 25
    # Every layer allocates 100 bytes of gradients and frees 50 of activations, so the first layer peaks highest.
    assert stage.first_backward_temporary_bytes == 2 * (100 - 50) + 100 + 5
    assert [row.input_bytes for row in partition_costs(layers, (0, 1, 2))] == [0, 10, 10]


def write_costs(path: Path, count: int = 8, **changes: Any) -> Path:
    layers = []
    for layer in uniform_layers(count):
        fields = {key: value for key, value in dataclasses.asdict(layer).items() if value not in (None, 0, ())}
        layers.append(fields | changes)
    path.write_text(json.dumps(layers))
    return path


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(cli, ["plan", "pipeline", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_json_contains_stages_and_schedules(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    result = json.loads(run("--costs", costs, "--stages", 4, "--microbatches", 8, "--capacity", "3000B", "--json"))
    assert [len(stage["layers"]) for stage in result["stages"]] == [2, 2, 2, 2]
    assert {row["schedule"] for row in result["schedules"]} >= {"gpipe", "1f1b", "chimera", "zb-v", "dualpipe-v"}
    for row in result["schedules"]:
        assert len(row["workers"]) == 4
        assert row["fits"] == all(worker["peak_bytes"] <= 3000 for worker in row["workers"])


def test_json_contains_the_options_and_workers_of_each_schedule(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    result = json.loads(
        run("--costs", costs, "--stages", 4, "--microbatches", 8, "--json",
            "--schedule", "chimera:f=2,method=doubling", "--schedule", "1f1b")
    )  # fmt: skip
    by_name = {row["schedule"]: row for row in result["schedules"]}
    assert by_name["chimera"]["options"] == {"f": 2, "method": "doubling"}
    one_f_one_b = by_name["1f1b"]
    # Two layers a stage: 3 s forward and backward each, (8 + 3) of them in a row.
    assert one_f_one_b["step_time_s"] == pytest.approx(6 * (8 + 3))
    assert one_f_one_b["bubble_ratio"] == pytest.approx(3 / 11)
    assert one_f_one_b["workers"] == [
        {
            "peak_bytes": 800 + flight * 100,
            "weight_bytes": 800,
            "activation_peak_bytes": flight * 100,
            "in_flight_peak": flight,
        }
        for flight in (4, 3, 2, 1)
    ]


def test_the_terminal_output_names_the_best_schedule_and_shows_its_actions(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    text = run("--costs", costs, "--stages", 2, "--microbatches", 4, "--schedule", "gpipe", "--show-schedule")
    assert "Stages for gpipe" in text and "Schedules by step time" in text
    assert parse_schedule(text[text.index("schedule gpipe") :]).name == "gpipe"


def test_the_terminal_output_explains_the_assumptions_of_some_schedules(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json", 40)
    common = ("--costs", costs, "--stages", 4, "--microbatches", 8)
    text = " ".join(run(*common, "--schedule", "zb-h2", "--schedule", "interleaved", "--schedule", "1f1b").split())
    assert "Each worker begins its next step when its own work is done: zb-h2." in text
    assert "Too many partitions to try all; a better one may exist: interleaved" in text
    full = run(*common, "--schedule", "interleaved", "--schedule", "1f1b", "--capacity", "10B")
    rows = {line.split()[0]: " ".join(line.split()) for line in full.splitlines() if line.strip()}
    assert " unknown " in rows["interleaved"] and " no " in rows["1f1b"]
    alone = run(*common, "--schedule", "1f1b")
    assert "Too many partitions" not in alone and "begins its next step" not in alone


def test_the_command_searches_degrees_and_stages(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    arguments = ("--costs", costs, "--workers", 4, "--batch", 16, "--microbatch-size", 1, "--microbatch-size", 2)
    result = json.loads(run(*arguments, "--schedule", "1f1b", "--json"))["schedules"]
    assert {(row["data_parallel"], row["num_workers"]) for row in result} == {(1, 4), (2, 2), (4, 1)}
    assert all(
        row["data_parallel"] * row["num_workers"] == 4 and len(row["workers"]) == row["num_workers"] for row in result
    )
    for row in result:
        assert row["samples_per_s"] == pytest.approx(16 / row["step_time_s"])
    assert "samples/s" in run(*arguments, "--schedule", "1f1b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a list of layers"),
        ('[{"name": "a"}]', "layer 0: missing forward_s, backward_s"),
        ("[3]", "expected an object"),
    ],
)
def test_invalid_cost_files_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "costs.json").write_text(content)
    with pytest.raises(MemtraceError, match=message):
        read_layers(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": -1}, "forward_s must be a number >= 0"),
        ({"forward_s": "fast"}, "forward_s must be a number"),
        ({"forward_s": None}, "forward_s must be a number >= 0, got None"),
        ({"forward_s": float("nan")}, "forward_s must be a number"),
        ({"forward_s": 1e300}, "forward_s must be at most"),
        ({"parameter_bytes": 10**25}, "parameter_bytes must be at most"),
        ({"activation_bytes": 10**400}, "activation_bytes must be at most"),
        ({"activation_bytes": 1.5}, "must be a whole number of bytes"),
        ({"weight_backward_s": 9.0}, "weight_backward_s is larger than backward_s"),
        ({"colour": 3}, "unknown field colour"),
    ],
)
def test_invalid_cost_values_are_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(MemtraceError, match=message):
        read_layers(write_costs(tmp_path / "costs.json", **change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", 2, "--microbatches", 2), "Give either TRACE or --costs"),
        (("--costs", "COSTS", "--stages", 2), "Give --stages and --microbatches"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--schedule", "pipe"), "unknown schedule"),
        (("--costs", "COSTS", "--stages", 3, "--microbatches", 2, "--schedule", "chimera"), "even number"),
        (("--costs", "COSTS", "--stages", 30, "--microbatches", 2), "8 layers cannot be split into 30"),
        (("--costs", "COSTS", "--workers", 2), "needs --batch"),
        (("--costs", "COSTS", "--workers", 2, "--batch", 4, "--stages", 2), "cannot be combined with --stages"),
        (("--costs", "COSTS", "--workers", 2, "--batch", 4, "--data-parallel", 2), "cannot be combined with --stages"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--batch", 4), "need --workers"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--rule", "chimera"), "need --workers"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--microbatch-size", 4), "needs --measured-size"),
        (("--costs", "COSTS", "--costs", "COSTS", "--stages", 2, "--microbatches", 2), "once for each of the 2"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--layer", "a"), "cannot be combined with --costs"),
        (("--costs", "nowhere.json", "--stages", 2, "--microbatches", 2), "cannot read the layer costs"),
        (("nowhere.memtrace", "--stages", 2, "--microbatches", 2), "does not exist"),
    ],
)
def test_the_command_rejects_invalid_options(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    costs = write_costs(tmp_path / "costs.json")
    given = [str(costs) if argument == "COSTS" else argument for argument in arguments]
    with pytest.raises(MemtraceError, match=message):
        run(*given)
