"""Layer costs by micro-batch size: interpolation between measurements, and what a plan says about them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from memtrace.cli import cli

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import PROPORTIONAL_BYTES, PROPORTIONAL_SECONDS, LayerCosts
from memtrace.pipeline.microbatch_costs import MicrobatchCosts, combine_microbatch_sizes
from tests.pipeline.cases import uniform_layers

FIXED_S, PER_SAMPLE_S = 0.5, 0.1


def affine_layers(size: int, count: int = 4) -> list[LayerCosts]:
    """Layers with a fixed cost, a cost per sample, and gradients that do not depend on the size."""
    return uniform_layers(
        count,
        forward_s=FIXED_S + PER_SAMPLE_S * size,
        backward_s=2 * (FIXED_S + PER_SAMPLE_S * size),
        activation_bytes=50 * size,
        output_bytes=10 * size,
        batch_bytes=8 * size,
        backward_temporary_bytes=3 * size,
        first_backward_temporary_bytes=3 * size + 100,
    )


@given(st.sets(st.integers(1, 64), min_size=2, max_size=5), st.integers(1, 128))
def test_costs_on_a_line_are_recovered_at_every_size(measured: set[int], size: int) -> None:
    """Between the sizes and beyond them, because a fixed cost plus a cost per sample is a line."""
    costs = combine_microbatch_sizes([(f"run-{each}", each, affine_layers(each)) for each in measured])
    for layer, expected in zip(costs.at(size), affine_layers(size), strict=True):
        for name in PROPORTIONAL_SECONDS:
            assert getattr(layer, name) == pytest.approx(getattr(expected, name))
        for name in (*PROPORTIONAL_BYTES, "first_backward_temporary_bytes", "parameter_bytes", "gradient_bytes"):
            assert getattr(layer, name) == getattr(expected, name)
    inside = min(measured) <= size <= max(measured)
    assert costs.basis(size) == ("measured" if size in measured else "interpolated" if inside else "extrapolated")


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.floats(0.01, 10)), min_size=2, max_size=4, unique_by=lambda pair: pair[0]
    ),
    st.integers(1, 128),
)
def test_noise_never_leads_to_impossible_times(measured: list[tuple[int, float]], size: int) -> None:
    """No time is 0 or below, and a size between two measured ones takes a time between theirs."""
    costs = combine_microbatch_sizes(
        [(str(each), each, uniform_layers(1, forward_s=seconds)) for each, seconds in measured]
    )
    seconds = costs.at(size)[0].forward_s
    assert seconds > 0
    below = [(each, value) for each, value in sorted(measured) if each <= size]
    above = [(each, value) for each, value in sorted(measured) if each >= size]
    if below and above:
        low, high = sorted([below[-1][1], above[0][1]])
        assert low * (1 - 1e-9) <= seconds <= high * (1 + 1e-9)
    elif above:
        assert seconds <= above[0][1]
    else:
        assert seconds >= below[-1][1]


def test_one_measurement_is_taken_in_proportion() -> None:
    costs = MicrobatchCosts((4,), (affine_layers(4),))
    assert costs.basis(4) == "measured" and costs.basis(2) == "proportional"
    assert costs.at(2)[0].forward_s == pytest.approx((FIXED_S + 4 * PER_SAMPLE_S) / 2)
    assert costs.at(2)[0].activation_bytes == 100


def test_efficiency_is_relative_to_the_best_size() -> None:
    costs = MicrobatchCosts((1, 4), (affine_layers(1), affine_layers(4)))
    small, middle, large = costs.efficiency([2])
    assert [row.basis for row in (small, middle, large)] == ["measured", "interpolated", "measured"]
    assert small.seconds_per_sample == pytest.approx(4 * 3 * (FIXED_S + PER_SAMPLE_S))
    assert large.efficiency == 1
    assert small.efficiency == pytest.approx((FIXED_S / 4 + PER_SAMPLE_S) / (FIXED_S + PER_SAMPLE_S))


def test_measurements_that_do_not_belong_together_are_rejected() -> None:
    with pytest.raises(MemtraceError, match=r"a and b both have micro-batches of 4 samples"):
        combine_microbatch_sizes([("a", 4, affine_layers(4)), ("b", 4, affine_layers(4))])
    with pytest.raises(MemtraceError, match="different layers or parameters"):
        combine_microbatch_sizes([("a", 4, affine_layers(4)), ("b", 8, affine_layers(8, count=5))])
    with pytest.raises(MemtraceError, match=r"b: given as micro-batches of 8 samples, but .* as large as 4 samples"):
        combine_microbatch_sizes([("a", 2, affine_layers(2)), ("b", 8, affine_layers(4))])


def write(path: Path, layers: list[LayerCosts]) -> Path:
    kept = [
        {key: value for key, value in dataclasses.asdict(each).items() if value not in (None, 0, ())} for each in layers
    ]
    path.write_text(json.dumps(kept))
    return path


def plan(*arguments: object) -> Any:
    result = CliRunner().invoke(cli, ["plan", "pipeline", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_command_states_where_costs_come_from(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{size}.json", affine_layers(size)) for size in (4, 16)]
    several = ("--costs", files[0], "--costs", files[1], "--measured-size", 4, "--measured-size", 16)
    search = ("--workers", 4, "--batch", 64, "--schedule", "1f1b", "--microbatch-size", 8, "--microbatch-size", 2)
    report = plan(*several, *search)
    assert {(row["microbatch_size"], row["costs_basis"]) for row in report["schedules"]} == {
        (8, "interpolated"), (2, "extrapolated"),
    }  # fmt: skip
    assert [row["microbatch_size"] for row in report["efficiency"]] == [2, 4, 8, 16]
    assert any("micro-batches of 2 samples are extrapolated" in text for text in report["assumptions"])
    single = plan("--costs", files[0], "--measured-size", 4, *search)
    assert any("of 2, 8 samples are taken in proportion" in text for text in single["assumptions"])
    # A larger micro-batch is more efficient per sample; in proportion it would look as efficient as any other.
    fixed = plan(*several, "--stages", 2, "--microbatches", 4, "--microbatch-size", 8, "--schedule", "1f1b")
    (row,) = fixed["schedules"]
    assert row["microbatch_size"] == 8 and row["step_time_s"] == pytest.approx(2 * 3 * (FIXED_S + 0.8) * 5)
    text = CliRunner().invoke(cli, ["plan", "pipeline", *map(str, (*several, *search))]).output
    assert "Efficiency by micro-batch size" in text and "8 x 8 i" in text


def test_the_command_states_that_all_reduces_are_free_without_a_bandwidth(tmp_path: Path) -> None:
    costs = ("--costs", write(tmp_path / "costs.json", uniform_layers(8)), "--stages", 4, "--microbatches", 8)
    both = ("--schedule", "chimera", "--schedule", "1f1b")
    (free,) = plan(*costs, *both)["assumptions"]
    assert "all-reduce of gradients is free" in free and "(chimera)" in free
    # Slower than the bandwidth that the sentence names, 1f1b is faster; faster than it, Chimera.
    amount, unit = free.split("only above ")[1].split()[:2]
    break_even = float(amount) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit]
    for factor, winner in ((0.9, "1f1b"), (1.1, "chimera")):
        report = plan(*costs, *both, "--bandwidth", f"{round(factor * break_even)}B")
        assert report["schedules"][0]["schedule"] == winner
        assert "takes 50 % of a worker's speed" in report["assumptions"][0]
    (messages,) = plan(*costs, "--schedule", "1f1b")["assumptions"]
    assert "messages between workers are free" in messages
    halves = plan(*costs, "--schedule", "chimera:method=halving", "--bandwidth", "1kB")["assumptions"]
    assert any("half the time of a micro-batch" in text for text in halves)


def test_chimeras_rule_keeps_one_micro_batch_size_for_each_depth(tmp_path: Path) -> None:
    costs = ("--costs", write(tmp_path / "costs.json", uniform_layers(8)), "--measured-size", 1)
    search = ("--workers", 8, "--batch", 64, "--schedule", "chimera", "--capacity", "6kB", "--recompute", "both")
    sizes = [word for size in (1, 2, 4, 8, 16) for word in ("--microbatch-size", size)]
    every, rule = (plan(*costs, *search, *sizes, "--rule", name)["schedules"] for name in ("fastest", "chimera"))
    assert len({(row["data_parallel"], row["num_workers"]) for row in rule}) == len(rule) == 3
    for row in rule:
        same = [
            other
            for other in every
            if other["num_workers"] == row["num_workers"]
            and other["fits"]
            and other["num_microbatches"] >= other["num_workers"]
        ]
        without = [other for other in same if not other["recompute"]]
        assert row["microbatch_size"] == max(other["microbatch_size"] for other in without or same)
        assert row["recompute"] == (not without)
