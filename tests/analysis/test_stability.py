"""Step-to-step stability, the fit of allocations, and block signatures, on real training programs."""

from __future__ import annotations

import pytest

from memtrace.analysis import assign_signatures, blocks_table, find_leaks, fit_allocations, measure_stability
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.block_signatures import signatures_table
from memtrace.analysis.event_codes import KIND
from memtrace.trace import Trace
from tests.programs.training import PROGRAMS, STEPS, Program

REGULAR = ("MLP", "CNN, batch norm", "transformer", "GAN, two optimizers", "accumulation of 4")


@pytest.mark.parametrize("name", REGULAR)
def test_steps_of_regular_programs_match_completely(program_traces: dict[str, Trace], name: str) -> None:
    stability = measure_stability(program_traces[name])
    assert stability.median_matching_bytes == stability.median_matching_blocks == stability.median_matching_events == 1
    assert (stability.matching_bytes[3:] == 1).all()


@pytest.mark.parametrize("name", REGULAR)
def test_allocations_of_regular_programs_fit_exactly(program_traces: dict[str, Trace], name: str) -> None:
    trace = program_traces[name]
    fit = fit_allocations(trace)
    assert fit is not None and fit.is_exact
    kind = trace.columns("events", "kind")["kind"]
    through_last_step = kind[: step_rows(trace).end_row[-1]]
    assert (through_last_step == KIND["alloc"]).sum() == fit.constant + fit.per_step * STEPS


def test_varying_sequence_lengths_are_reported_as_different_sizes(program_traces: dict[str, Trace]) -> None:
    stability = measure_stability(program_traces["LSTM, varying lengths"])
    assert stability.median_matching_bytes is not None and stability.median_matching_bytes < 0.9
    assert any(len(row.other_size_in) > 10 for row in stability.differences)


def test_steps_after_an_evaluation_are_reported_as_different(program_traces: dict[str, Trace]) -> None:
    stability = measure_stability(program_traces["evaluation every 5"])
    assert {number for row in stability.differences for number in row.only_in} == {5, 10, 15, 20, 25}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_without_a_leak_have_none_reported(program_traces: dict[str, Trace], program: Program) -> None:
    assert find_leaks(program_traces[program.name]).leaks == ()


def test_a_signature_is_the_same_block_of_every_step(program_traces: dict[str, Trace]) -> None:
    trace = program_traces["MLP"]
    signatures, table = assign_signatures(trace), signatures_table(trace)
    assert len(signatures) == len(table)
    has_signature = signatures.of_block >= 0
    assert has_signature.sum() == signatures.num_steps.sum()
    regular = table[table["num_steps"] >= STEPS - 1]
    assert len(regular) >= 50
    assert (regular["accesses_std"].fillna(0) <= regular["accesses_mean"] + 1).all()
    # A step has a signature at most once.
    step = blocks_table(trace)["step"].to_numpy(dtype=float, na_value=-1)
    pairs = set(zip(signatures.of_block[has_signature].tolist(), step[has_signature].tolist(), strict=True))
    assert len(pairs) == has_signature.sum()
