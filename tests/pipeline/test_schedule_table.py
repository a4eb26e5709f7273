"""The drawing of a schedule: every action has its place, paths are named, and Chimera's published table is reproduced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from memtrace.pipeline.costs import partition_costs
from memtrace.pipeline.plan import predict_schedule
from memtrace.pipeline.schedule_table import name_paths, simulated_cells, slot_cells
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD
from memtrace.pipeline.schedules.registry import build_schedule, parse_schedule_choice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.simulator import simulate_schedule
from tests.pipeline.cases import schedules, uniform_layers


def test_chimera_of_four_workers_is_the_table_of_the_paper() -> None:
    """Source: Chimera, figure 3: D = 4 workers and N = 4 micro-batches, a forward and a backward of one slot each."""
    drawn = {
        (cell.worker, cell.start): (cell.action.kind, cell.path, cell.label)
        for cell in slot_cells(build_schedule("chimera", 4, 4))
    }
    depth = 4
    expected = {}
    for path, first in (("down", 0), ("up", 2)):
        for place in range(2):
            for stage in range(depth):
                worker = stage if path == "down" else depth - 1 - stage
                expected[worker, stage + 2 * place] = (FORWARD, path, str(first + place))
                expected[worker, 2 * depth - 1 - stage + 2 * place] = (BACKWARD, path, str(first + place))
    assert drawn == expected


def test_chimera_takes_sixteen_forwards_and_keeps_three_or_four_micro_batches() -> None:
    prediction = predict_schedule(uniform_layers(4), 4, 4, parse_schedule_choice("chimera"))
    assert max(cell.end for cell in simulated_cells(prediction.simulation)) == pytest.approx(16.0)
    assert [memory.in_flight_peak for memory in prediction.memories] == [3, 4, 4, 3]


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_every_action_is_drawn_once_at_its_time(schedule: Schedule) -> None:
    layers = uniform_layers(schedule.num_stages)
    for recompute in (False, True):
        simulation = simulate_schedule(
            schedule, partition_costs(layers, range(schedule.num_stages)), recompute=recompute
        )
        cells = simulated_cells(simulation)
        assert [(cell.start, cell.end) for cell in cells] == list(
            zip(simulation.start_s.tolist(), simulation.end_s.tolist(), strict=True)
        )
        assert [cell.action for cell in cells] == list(schedule.actions())
        for cell in cells:
            repeats = recompute and cell.action.kind in "BI"
            assert (cell.recomputed - cell.start > 0) == repeats
            if repeats and cell.action.kind == BACKWARD:
                assert (cell.recomputed - cell.start) * 3 == pytest.approx(cell.end - cell.start)  # 1 of 1 + 2 seconds
        # Only actions that share the height of a row overlap.
        last: dict[tuple[int, int], float] = {}
        for cell in cells:
            lanes = (0, 1) if cell.lane is None else (cell.lane,)
            assert cell.start >= max(last.get((cell.worker, lane), 0.0) for lane in lanes) - 1e-9
            last |= {(cell.worker, lane): cell.end for lane in lanes}
            assert (cell.lane == 0) == cell.action.overlapped


@pytest.mark.parametrize(
    ("name", "workers", "paths"),
    [
        ("gpipe", 4, {""}),
        ("gems", 4, {"down", "up"}),
        ("chimera", 2, {"down", "up"}),
        ("chimera:f=2", 8, {"down 1", "down 2", "up 1", "up 2"}),
        ("dualpipe", 4, {"down", "up"}),
        ("interleaved:chunks=3", 4, {"chunk 0", "chunk 1", "chunk 2"}),
        ("zb-v", 4, {"chunk 0", "chunk 1"}),
    ],
)
def test_paths_are_the_directions_or_chunks(name: str, workers: int, paths: set[str]) -> None:
    schedule = build_schedule(name, workers, 2 * workers)
    assert set(name_paths(schedule).values()) == paths
    if "down" in paths:
        assert {path for (worker, _, stage), path in name_paths(schedule).items() if worker == stage == 0} == {"down"}
