"""Plans: ranking under a limit, (W, D, B) against enumeration, and the command with its JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from memtrace.cli import cli

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, cut_costs, read_layers, scaled, stage_costs
from memtrace.pipeline.plan import Setting, plan, predict
from memtrace.pipeline.schedules.registry import all_choices, parse_choice
from memtrace.pipeline.schedules.schedule import parse
from memtrace.pipeline.search import largest_microbatches, search
from tests.pipeline.cases import uniform_layers

SHAPE = {"peak_bytes", "weight_bytes", "activation_peak_bytes", "in_flight_peak"}


def test_ranking_is_by_time_among_those_that_fit() -> None:
    layers = uniform_layers(16)
    found = plan(layers, 4, 8, choices=all_choices(4, 8), setting=Setting(capacity_bytes=3000))
    assert not found.skipped
    fitting = [one for one in found.predictions if one.fits]
    assert fitting and found.predictions[: len(fitting)] == fitting
    times = [one.step_time_s for one in fitting]
    assert times == sorted(times)
    for one in found.predictions:
        assert one.fits == all(worker.peak_bytes <= 3000 for worker in one.memories)
    free = plan(layers, 4, 8, choices=all_choices(4, 8))
    assert all(one.fits for one in free.predictions)


def test_what_cannot_be_built_is_left_out_with_its_reason() -> None:
    found = plan(uniform_layers(5), 3, 7, choices=all_choices(3, 7))
    left_out = {choice.family.name: reason for choice, reason in found.skipped}
    assert "even number of stages" in left_out["chimera"]
    assert "even number of workers" in left_out["dualpipe"]
    assert "5 layers cannot be cut into 6 stages" in left_out["zb-v"]
    assert {one.choice.family.name for one in found.predictions} == {
        "gpipe", "dapple", "pipedream", "pipedream-2bw", "gems", "zb-h1", "zb-h2",
    }  # fmt: skip


def test_recomputation_trades_time_for_memory() -> None:
    layers = uniform_layers(8, activation_bytes=1000, output_bytes=10)
    both = plan(layers, 4, 8, choices=[parse_choice("dapple")], recompute=(False, True)).predictions
    plain, again = sorted(both, key=lambda one: one.recompute)
    assert again.step_time_s == pytest.approx(plain.step_time_s * 4 / 3)
    # Stage 0 keeps nothing but its own running activations, the others four inputs at most.
    assert [worker.activation_peak_bytes for worker in again.memories] == [2000, 2030, 2020, 2010]
    assert [worker.activation_peak_bytes for worker in plain.memories] == [8000, 6000, 4000, 2000]


def test_messages_slow_down_and_all_reduce_waits() -> None:
    layers = uniform_layers(4)
    free = predict(layers, 4, 8, parse_choice("dapple"))
    slow = predict(layers, 4, 8, parse_choice("dapple"), setting=Setting(network=Network(latency_s=0.5)))
    assert slow.step_time_s > free.step_time_s
    wide = Setting(network=Network(seconds_per_byte=0.1), width=2)
    reduced = predict(uniform_layers(4, output_bytes=0), 4, 8, parse_choice("dapple"), setting=wide)
    # The last gradient that becomes whole is that of the first stage: its 100 bytes go over two workers.
    assert reduced.step_time_s == pytest.approx(free.step_time_s + 2 * 1 * 0.1 * 100 / 2)
    steady = predict(uniform_layers(4, output_bytes=0), 4, 8, parse_choice("pipedream"), setting=wide)
    assert steady.step_time_s == pytest.approx(max(24.0, 8 * 10.0))


def test_search_finds_what_enumeration_finds() -> None:
    layers = uniform_layers(8, forward_s=0.01, backward_s=0.02)
    setting = Setting(network=Network(latency_s=0.001, seconds_per_byte=1e-5), capacity_bytes=4000)
    names = ("dapple", "chimera")

    def choices(depth: int, count: int) -> list[Any]:
        del count
        return [parse_choice(name) for name in names if depth % 2 == 0 or name == "dapple"]

    found = search(layers, 8, 32, choices=choices, microbatch_sizes=(1, 2, 4), setting=setting)
    expected = []
    for width in (1, 2, 4, 8):
        for size in (1, 2, 4):
            depth, count = 8 // width, 32 // (width * size)
            for choice in choices(depth, count):
                one = predict(
                    scaled(layers, size), depth, count, choice, setting=dataclasses.replace(setting, width=width)
                )
                expected.append((not one.fits, one.step_time_s))
    assert [(not one.prediction.fits, one.prediction.step_time_s) for one in found] == sorted(expected)
    best = found[0]
    assert best.prediction.fits and best.width * best.depth == 8
    assert best.samples_per_s == pytest.approx(32 / best.prediction.step_time_s)
    rule = largest_microbatches(found)
    assert len({(one.width, one.depth) for one in rule}) <= 4
    for one in rule:
        larger = [
            other
            for other in found
            if other.prediction.fits
            and (other.width, other.depth) == (one.width, one.depth)
            and other.microbatch_size > one.microbatch_size
        ]
        assert not larger


def test_search_that_finds_nothing_says_why() -> None:
    with pytest.raises(MemtraceError, match="splits 7 evenly"):
        search(uniform_layers(4), 4, 7, choices=lambda d, n: [parse_choice("dapple")], microbatch_sizes=(2,))
    with pytest.raises(MemtraceError, match="cannot be cut"):
        search(uniform_layers(1), 2, 4, choices=lambda d, n: [parse_choice("zb-v")], microbatch_sizes=(1,))


def test_stage_costs_add_up_and_rise_where_layers_do() -> None:
    layers = uniform_layers(3, forward_temporary_bytes=7, backward_temporary_bytes=5, largest_gradient_bytes=20)
    stage = stage_costs(layers, input_bytes=10)
    assert (stage.forward_s, stage.backward_s, stage.input_backward_s) == (3.0, 6.0, 3.0)
    assert (stage.parameter_bytes, stage.activation_bytes, stage.output_bytes) == (300, 150, 10)
    # The last layer's forward has all activations below it; backward begins with the last layer.
    assert stage.forward_temporary_bytes == 7
    assert stage.backward_temporary_bytes == 25
    # With 100 bytes of new gradients for every 50 of activations given up, the first layer ends highest.
    assert stage.first_backward_temporary_bytes == 2 * (100 - 50) + 100 + 5
    assert [one.input_bytes for one in cut_costs(layers, (0, 1, 2))] == [0, 10, 10]


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


def test_json_has_the_documented_shape(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    found = json.loads(run("--costs", costs, "--stages", 4, "--microbatches", 8, "--capacity", "3000B", "--json"))
    assert [stage["num_layers"] for stage in found["stages"]] == [2, 2, 2, 2]
    assert {one["schedule"] for one in found["schedules"]} >= {"gpipe", "dapple", "chimera", "zb-v", "dualpipe-v"}
    for one in found["schedules"]:
        assert {"schedule", "options", "step_time_s", "bubble_ratio", "fits", "workers"} <= one.keys()
        assert len(one["workers"]) == 4
        assert all(worker.keys() == SHAPE for worker in one["workers"])
        assert one["fits"] == all(worker["peak_bytes"] <= 3000 for worker in one["workers"])


def test_json_of_one_schedule_with_options(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    found = json.loads(
        run("--costs", costs, "--stages", 4, "--microbatches", 8, "--json",
            "--schedule", "chimera:f=2,method=doubling", "--schedule", "dapple")
    )  # fmt: skip
    by_name = {one["schedule"]: one for one in found["schedules"]}
    assert by_name["chimera"]["options"] == {"f": 2, "method": "doubling", "recompute": False}
    dapple = by_name["dapple"]
    # Two layers a stage: 3 s forward and backward each, (8 + 3) of them in a row.
    assert dapple["step_time_s"] == pytest.approx(6 * (8 + 3))
    assert dapple["bubble_ratio"] == pytest.approx(3 / 11)
    assert dapple["workers"] == [
        {
            "peak_bytes": 800 + flight * 100,
            "weight_bytes": 800,
            "activation_peak_bytes": flight * 100,
            "in_flight_peak": flight,
        }
        for flight in (4, 3, 2, 1)
    ]


def test_text_names_the_best_and_shows_its_table(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    text = run("--costs", costs, "--stages", 2, "--microbatches", 4, "--schedule", "gpipe", "--show")
    assert "cut for gpipe" in text and "schedules by step time" in text
    assert parse(text[text.index("schedule gpipe") :]).name == "gpipe"


def test_text_says_what_figures_rest_on(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json", 40)
    common = ("--costs", costs, "--stages", 4, "--microbatches", 8)
    text = " ".join(run(*common, "--schedule", "zb-h2", "--schedule", "interleaved", "--schedule", "dapple").split())
    assert "zb-h2: each worker begins its next step when its own work is done" in text
    assert "interleaved: several stages share a worker" in text
    full = run(*common, "--schedule", "interleaved", "--schedule", "dapple", "--capacity", 10)
    rows = {line.split()[0]: " ".join(line.split()) for line in full.splitlines() if line.strip()}
    assert " not found " in rows["interleaved"] and " no " in rows["dapple"]
    alone = run(*common, "--schedule", "dapple")
    assert "share a worker" not in alone and "begins its next step" not in alone


def test_search_by_command(tmp_path: Path) -> None:
    costs = write_costs(tmp_path / "costs.json")
    arguments = ("--costs", costs, "--workers", 4, "--batch", 16, "--microbatch-size", 1, "--microbatch-size", 2)
    found = json.loads(run(*arguments, "--schedule", "dapple", "--json"))["configurations"]
    assert {(one["width"], one["stages"]) for one in found} == {(1, 4), (2, 2), (4, 1)}
    assert all(one["width"] * one["stages"] == 4 and len(one["workers"]) == one["stages"] for one in found)
    assert "samples/s" in run(*arguments, "--schedule", "dapple")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a list of layers"),
        ('[{"name": "a"}]', "layer 0 of .* lacks forward_s, backward_s"),
        ("[3]", "is not an object"),
    ],
)
def test_costs_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "costs.json").write_text(content)
    with pytest.raises(MemtraceError, match=message):
        read_layers(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": -1}, "forward_s must be a number >= 0"),
        ({"forward_s": "fast"}, "forward_s must be a number"),
        ({"forward_s": None}, "forward_s must be a number >= 0, not None"),
        ({"forward_s": float("nan")}, "forward_s must be a number"),
        ({"forward_s": 1e300}, "forward_s must be at most"),
        ({"parameter_bytes": 10**25}, "parameter_bytes must be at most"),
        ({"activation_bytes": 10**400}, "activation_bytes must be at most"),
        ({"activation_bytes": 1.5}, "counts bytes and must be whole"),
        ({"weight_backward_s": 9.0}, "weight_backward_s is more than backward_s"),
        ({"colour": 3}, "which memtrace does not know"),
    ],
)
def test_costs_with_wrong_values(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(MemtraceError, match=message):
        read_layers(write_costs(tmp_path / "costs.json", **change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", 2, "--microbatches", 2), "give a trace, or --costs"),
        (("--costs", "COSTS", "--stages", 2), "give --stages and --microbatches"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--schedule", "pipe"), "unknown schedule"),
        (("--costs", "COSTS", "--stages", 3, "--microbatches", 2, "--schedule", "chimera"), "even number"),
        (("--costs", "COSTS", "--stages", 30, "--microbatches", 2), "8 layers cannot be cut into 30"),
        (("--costs", "COSTS", "--workers", 2), "needs --batch"),
        (("--costs", "COSTS", "--workers", 2, "--batch", 4, "--stages", 2), "searches for --stages"),
        (("--costs", "COSTS", "--workers", 2, "--batch", 4, "--width", 2), "searches for --stages"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--batch", 4), "belong to --workers"),
        (("--costs", "COSTS", "--stages", 2, "--microbatches", 2, "--layer", "a"), "choose from a trace"),
        (("--costs", "nowhere.json", "--stages", 2, "--microbatches", 2), "cannot read the costs"),
        (("nowhere.memtrace", "--stages", 2, "--microbatches", 2), "does not exist"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    costs = write_costs(tmp_path / "costs.json")
    given = [str(costs) if argument == "COSTS" else argument for argument in arguments]
    with pytest.raises(MemtraceError, match=message):
        run(*given)
