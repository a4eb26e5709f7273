"""The pictures of a planned pipeline show the numbers of the simulation."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from memtrace.cli import cli
from memtrace.dashboards.planned_pipeline import (
    PlannedPipeline,
    PlannedSchedule,
    trade_off_figure,
    write_planned_pipeline,
)
from memtrace.dashboards.schedules import MAX_CELLS, memory_figure, peaks_figure, simulation_figure, slot_figure

from memtrace.pipeline.costs import Network, partition_costs
from memtrace.pipeline.plan import PlanSettings, SchedulePrediction, plan_pipeline, predict_schedule
from memtrace.pipeline.schedules.registry import all_schedule_choices, build_schedule, parse_schedule_choice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.simulator import simulate_schedule
from memtrace.units import choose_byte_unit
from tests.dashboards.browser import draw_everything, needs_chromium, opened
from tests.pipeline.cases import schedules, uniform_layers


def drawn_actions(figure: go.Figure) -> dict[str, list[tuple[float, float]]]:
    """Start and end of the bars of each worker, in order, without bubbles and all-reduces."""
    bars: dict[str, list[tuple[float, float]]] = {}
    for trace in figure.data:
        if trace.base is not None and trace.name != "all-reduce of gradients":
            for row, start, length in zip(trace.y, trace.base, trace.x, strict=True):
                bars.setdefault(row, []).append((start, start + length))
    return {row: sorted(values) for row, values in bars.items()}


@settings(max_examples=25, deadline=None)
@given(schedules())
def test_bars_begin_and_end_as_the_actions_of_the_simulation(schedule: Schedule) -> None:
    stages = partition_costs(uniform_layers(schedule.num_stages), range(schedule.num_stages))
    simulation = simulate_schedule(schedule, stages)
    if schedule.num_actions > MAX_CELLS:
        return
    drawn = drawn_actions(simulation_figure(simulation))
    for worker, (begin, end) in enumerate(zip(simulation.offsets, simulation.offsets[1:], strict=False)):
        if end > begin:
            actions = np.stack([simulation.start_s[begin:end], simulation.end_s[begin:end]], axis=1)
            assert np.array(drawn[f"worker {worker}"]) == pytest.approx(actions)


def predictions(**settings: Any) -> list[SchedulePrediction]:
    choices = all_schedule_choices(4, 8)
    plan = plan_pipeline(
        uniform_layers(8), 4, 8, choices=choices, recompute=(False, True), settings=PlanSettings(**settings)
    )
    return list(plan.predictions)


def test_recomputation_is_the_first_part_of_a_backward() -> None:
    for prediction in predictions():
        if any(action.overlapped for action in prediction.schedule.actions()):
            continue  # two actions at once: their bars share the height of the row
        busy = {row: sum(end - start for start, end in bars) for row, bars in
                drawn_actions(simulation_figure(prediction.simulation)).items()}  # fmt: skip
        assert list(busy.values()) == pytest.approx(prediction.simulation.busy_s.tolist())
        names = {trace.name for trace in simulation_figure(prediction.simulation).data}
        assert ("recomputation" in names) == prediction.recompute


def test_all_reduces_are_drawn_on_every_worker_that_takes_part() -> None:
    settings = PlanSettings(network=Network(seconds_per_byte=1e-2))
    simulation = predict_schedule(
        uniform_layers(4), 4, 4, parse_schedule_choice("chimera"), settings=settings
    ).simulation
    (bars,) = [trace for trace in simulation_figure(simulation).data if trace.name == "all-reduce of gradients"]
    drawn = sorted((row, start, start + length) for row, start, length in zip(bars.y, bars.base, bars.x, strict=True))
    expected = sorted(
        (f"worker {worker}", each.start_s, each.end_s) for each in simulation.all_reduces for worker in each.workers
    )
    assert [row for row, *_ in drawn] == [row for row, *_ in expected]
    assert [times for _, *times in drawn] == pytest.approx(np.array([times for _, *times in expected]))


def test_directions_have_hues_of_their_own_and_backwards_are_darker() -> None:
    colors = {trace.name: trace.marker.color for trace in slot_figure(build_schedule("chimera", 4, 4)).data[1:]}
    assert set(colors) == {"down: forward", "down: backward", "up: forward", "up: backward"}
    assert len(set(colors.values())) == 4
    brightness = {name: sum(int(color[place : place + 2], 16) for place in (1, 3, 5)) for name, color in colors.items()}
    assert all(brightness[f"{path}: forward"] > brightness[f"{path}: backward"] for path in ("down", "up"))


def test_memory_and_its_distribution_reach_the_peaks_of_the_workers() -> None:
    for prediction in predictions():
        peaks = [memory.peak_bytes for memory in prediction.memories]
        divisor, _ = choose_byte_unit(max(peaks))
        drawn = [max(curve.y) * divisor for curve in memory_figure(prediction.memories).data]
        assert drawn == pytest.approx(peaks)
        (box,) = peaks_figure([("name", prediction.memories)]).data
        assert [size * divisor for size in box.x] == pytest.approx(peaks)


def test_the_trade_off_shows_every_schedule() -> None:
    planned = PlannedPipeline(tuple(PlannedSchedule(str(p.choice), p) for p in predictions()[:10]), 10_000)
    figure = trade_off_figure(planned)
    assert figure is not None
    points = [(point.x[0], point.y[0]) for point in figure.data]
    expected = [(each.prediction.peak_bytes / 1024, each.prediction.step_time_s) for each in planned.schedules]
    assert np.array(points) == pytest.approx(np.array(expected))


@needs_chromium
def test_the_page_of_all_schedules_draws_and_is_bounded(browser: Any, tmp_path: Path) -> None:
    found = [PlannedSchedule(f"<b>{p.choice}</b>", p) for p in predictions(capacity_bytes=5_000)]
    path = write_planned_pipeline(found, tmp_path / "plan.html", capacity_bytes=5_000, notes=["a note"])
    assert path.stat().st_size < 3e6
    with opened(browser, path, width=390) as page:
        draw_everything(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.locator("#schedules tbody tr").count() == len(found)
        assert page.locator("text=<b>").count() > 0


def test_a_large_schedule_is_drawn_in_part() -> None:
    simulation = predict_schedule(uniform_layers(64), 64, 256, parse_schedule_choice("1f1b")).simulation
    figure = simulation_figure(simulation)
    assert sum(len(trace.y) for trace in figure.data if trace.base is not None) <= MAX_CELLS
    assert figure.layout.meta["note"] == f"Shows the first {MAX_CELLS:,} of {64 * 256 * 2:,} actions."


@pytest.mark.parametrize("sizes", [["--stages", "2", "--microbatches", "4"], ["--workers", "4", "--batch", "8"]])
def test_the_command_writes_the_page_without_a_recording(tmp_path: Path, sizes: list[str]) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps([{name: value for name, value in asdict(layer).items() if value is not None and
                                  name in ("name", "forward_s", "backward_s", "parameter_bytes", "gradient_bytes",
                                           "optimizer_bytes", "activation_bytes", "output_bytes")}
                                 for layer in uniform_layers(4)]))  # fmt: skip
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(cli, ["plan", "pipeline", "--costs", str(costs), *sizes, "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert "Peak memory over the workers" in page.read_text()
    missing = CliRunner().invoke(cli, ["plan", "pipeline", "--costs", str(costs), *sizes, "-o", str(costs / "x.html")])
    assert "does not exist" in str(missing.exception)
