"""Schedules are valid, survive a text round trip, and free all the memory that they allocate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, StageCosts
from memtrace.pipeline.memory_rules import COST_FIELDS, PAPER, TORCH, MemoryModel, torch_pipelining_model
from memtrace.pipeline.peak_moments import find_peak_moments
from memtrace.pipeline.schedules.actions import KINDS, Action, parse_action
from memtrace.pipeline.schedules.registry import (
    SCHEDULE_FAMILIES,
    all_schedule_choices,
    build_schedule,
    parse_schedule_choice,
)
from memtrace.pipeline.schedules.schedule import Schedule, parse_schedule
from memtrace.pipeline.schedules.validation import find_faults, validate_schedule
from memtrace.pipeline.simulation.simulator import simulate_schedule
from memtrace.pipeline.simulation.worker_memory import simulate_memory
from tests.pipeline.cases import schedules

combine_layers = st.builds(
    StageCosts,
    forward_s=st.floats(0.1, 5),
    input_backward_s=st.floats(0.1, 5),
    weight_backward_s=st.floats(0.1, 5),
    parameter_bytes=st.integers(0, 100),
    gradient_bytes=st.integers(0, 100),
    optimizer_bytes=st.integers(0, 100),
    activation_bytes=st.integers(50, 99),
    weight_activation_bytes=st.integers(0, 50),
    input_bytes=st.integers(0, 20),
    output_bytes=st.integers(0, 20),
    forward_temporary_bytes=st.integers(0, 99),
    backward_temporary_bytes=st.integers(0, 99),
    input_backward_temporary_bytes=st.integers(0, 99),
    first_backward_temporary_bytes=st.integers(0, 199),
    unsaved_output_bytes=st.integers(0, 20),
    unsaved_model_output_bytes=st.integers(0, 20),
    model_output_bytes=st.integers(0, 20),
    loss_bytes=st.integers(0, 4),
    batch_bytes=st.integers(0, 20),
    optimizer_temporary_bytes=st.integers(0, 99),
    largest_optimizer_temporary_bytes=st.integers(0, 99),
)

models = st.sampled_from(
    [
        PAPER,
        TORCH,
        MemoryModel(boundaries=True),
        torch_pipelining_model(TORCH, "ScheduleGPipe", "merged"),
        torch_pipelining_model(TORCH, "Schedule1F1B", "microbatches"),
    ]
)


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_every_generated_schedule_is_valid(schedule: Schedule) -> None:
    assert find_faults(schedule) == []


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_a_schedule_survives_a_text_round_trip(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule)) == schedule


@given(
    st.builds(
        Action,
        st.sampled_from(KINDS),
        st.integers(0, 99),
        st.integers(0, 999),
        st.integers(0, 9),
        st.sampled_from([None, 0, 1]),
        st.booleans(),
    )
)
def test_an_action_survives_a_text_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.data(), schedules(), st.booleans(), models)
@settings(max_examples=150, deadline=None)
def test_memory_returns_to_the_level_at_the_start(
    data: st.DataObject, schedule: Schedule, recompute: bool, model: MemoryModel
) -> None:
    stages = [data.draw(combine_layers) for _ in range(schedule.num_stages)]
    simulation = simulate_schedule(schedule, stages, network=Network(latency_s=0.1), recompute=recompute)
    for worker in simulate_memory(simulation, model):
        assert worker.total_bytes[0] == worker.total_bytes[-1] == worker.weight_bytes[0]
        assert worker.in_flight[-1] == worker.activation_bytes[-1] == worker.temporary_bytes[-1] == 0
        assert worker.total_bytes.min() >= 0 and worker.activation_bytes.min() >= 0
        assert np.all(np.diff(worker.time_s) >= 0)


@given(st.data(), schedules())
@settings(max_examples=100, deadline=None)
def test_simulated_times_respect_dependencies_and_durations(data: st.DataObject, schedule: Schedule) -> None:
    stages = [data.draw(combine_layers) for _ in range(schedule.num_stages)]
    network = Network(latency_s=0.3, seconds_per_byte=0.01)
    simulation = simulate_schedule(schedule, stages, network=network)
    table = simulation.to_dataframe()
    assert len(table) == schedule.num_actions
    rows = {}
    for action, row in zip(schedule.actions(), table.itertuples(), strict=True):
        rows[action.kind, action.stage, action.microbatch, action.half] = row
    for worker, row in enumerate(schedule.rows):
        own = table[table["worker"] == worker]
        apart = np.array([not action.overlapped for action in row[:-1]], dtype=bool)
        begin, end = own["start_s"].to_numpy()[1:], own["end_s"].to_numpy()[:-1]
        assert np.all(begin[apart] >= end[apart] - 1e-9)
    for (kind, stage, microbatch, half), row in rows.items():
        if kind == "F" and stage:
            before = rows["F", stage - 1, microbatch, half]
            travel = network.message_s(stages[stage - 1].output_bytes) * (before.worker != row.worker)
            assert row.start_s >= before.end_s + travel - 1e-9
        if kind == "W":
            assert row.start_s >= rows["I", stage, microbatch, half].end_s - 1e-9


@given(st.data(), schedules(), models, st.booleans())
@settings(max_examples=150, deadline=None)
def test_peak_moments_contain_the_simulated_peak(
    data: st.DataObject, schedule: Schedule, model: MemoryModel, recompute: bool
) -> None:
    stages = [data.draw(combine_layers) for _ in range(schedule.num_stages)]
    workers = simulate_memory(simulate_schedule(schedule, stages, recompute=recompute), model)
    for worker, moments in zip(workers, find_peak_moments(schedule, model, recompute=recompute), strict=True):
        sizes = np.array([[getattr(stages[stage], field) for field in COST_FIELDS] for stage in moments.stages])
        expected = (moments.counts * sizes).sum(axis=(1, 2)).max()
        # Half of an odd number of bytes is rounded up, in each of the three levels.
        halved = any(action.half is not None for action in schedule.actions())
        assert expected == pytest.approx(worker.peak_bytes, abs=1.5 if halved else 0)


def change_schedule(**changes: object) -> Schedule:
    schedule = build_schedule("1f1b", 2, 2)
    return Schedule(**{**{name: getattr(schedule, name) for name in Schedule.__dataclass_fields__}, **changes})


@pytest.mark.parametrize(
    ("rows", "slots", "message"),
    [
        ("F0.0 F0.1 B0.0 B0.1 / F1.0 B1.0 F1.1 B1.1", "0 1 3 5 / 0 2 3 4", "needs a result that is ready after"),
        ("F0.0 F0.1 B0.0 B0.1 / F1.0 B1.0 F1.1 B1.1", "0 1 1 5 / 1 2 3 4", "two actions in one slot"),
        ("F0.0 F0.1 B0.0 / F1.0 B1.0 F1.1 B1.1", "0 1 3 / 1 2 3 4", "no backward on stage 0"),
        ("F0.0 F0.1 B0.0 I0.1 / F1.0 B1.0 F1.1 B1.1", "0 1 3 5 / 1 2 3 4", "has I on stage 0"),
        (
            "F0.0 F1.1 B0.0 B0.1 / F1.0 B1.0 F0.1 B1.1",
            "0 1 3 5 / 1 2 3 4",
            "is on worker 0, but worker 1 holds its stage",
        ),
        ("F0.0 F0.1 F0.1 B0.0 B0.1 / F1.0 B1.0 F1.1 B1.1", "0 1 2 3 5 / 1 2 3 4", "has 2 forwards"),
        ("F0.0 F0.1 B0.0 B0.1 / F1.0 B1.0 F1.1 B1.1&", "0 1 3 5 / 1 2 3 4", "not followed by a backward"),
        ("F0.0 F0.7 B0.0 B0.1 / F1.0 B1.0 F1.1 B1.1", "0 1 3 5 / 1 2 3 4", "no such stage"),
        ("F0.0 F0.1 B0.0 B0.1@0 / F1.0 B1.0@1 F1.1 B1.1", "0 1 3 5 / 1 2 3 4", "passes through 2 pipelines"),
    ],
)
def test_validation_finds_faults(rows: str, slots: str, message: str) -> None:
    broken = change_schedule(
        rows=tuple(tuple(map(parse_action, row.split())) for row in rows.split("/")),
        slots=tuple(tuple(map(int, row.split())) for row in slots.split("/")),
        placement=((0, 1), (0, 1)),
    )
    with pytest.raises(MemtraceError, match=message):
        validate_schedule(broken)


def test_a_deadlock_is_an_error() -> None:
    text = """
        schedule broken
        stages 2
        microbatches 1
        pipeline 0 0 1
        worker 0 | B0.0 F0.0
        worker 1 | F1.0 B1.0
    """
    with pytest.raises(MemtraceError, match="wait for each other"):
        simulate_schedule(parse_schedule(text), [StageCosts(forward_s=1, input_backward_s=1, weight_backward_s=1)] * 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense 3", "unknown keyword 'nonsense'"),
        ("schedule a\nstages 1", "incomplete"),
        ("schedule a\nstages 1\nmicrobatches 1\npipeline 0 0\nworker 0 | X0.0", "invalid action"),
        ("schedule a\nstages 1\nmicrobatches 1\nupdate never\npipeline 0 0\nworker 0 | F0.0", "update never"),
    ],
)
def test_invalid_schedule_text_is_rejected(text: str, message: str) -> None:
    with pytest.raises(MemtraceError, match=message):
        parse_schedule(text)


def test_schedule_choices_survive_a_text_round_trip_and_reject_unknown_options() -> None:
    for choice in all_schedule_choices(8, 32):
        assert parse_schedule_choice(str(choice)) == choice
    assert parse_schedule_choice("DAPPLE").family is parse_schedule_choice("1F1B").family is SCHEDULE_FAMILIES["1f1b"]
    assert parse_schedule_choice("Chimera:f=2,method=doubling").options == {"f": 2, "method": "doubling"}
    for text in ("pipe", "chimera:g=1", "chimera:f=0", "1f1b:f=1", "interleaved:chunks=x"):
        with pytest.raises(MemtraceError):
            parse_schedule_choice(text)


@pytest.mark.parametrize(
    ("name", "workers", "microbatches"),
    [
        ("chimera", 3, 4),
        ("chimera:f=3", 4, 4),
        ("chimera:method=other", 4, 4),
        ("interleaved", 4, 9),
        ("dualpipe", 3, 8),
        ("dualpipe", 4, 6),
        ("dualpipe", 4, 9),
        ("dualpipe-v", 4, 7),
        ("pipedream-2bw", 4, 3),
        ("1f1b", 0, 3),
    ],
)
def test_schedules_reject_sizes_that_they_do_not_support(name: str, workers: int, microbatches: int) -> None:
    with pytest.raises(MemtraceError):
        parse_schedule_choice(name).build(workers, microbatches)
