"""Forward passes without a backward: which memory their graphs hold, and the line that is reported for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memtrace
from memtrace.analysis.components import connected_components
from memtrace.analysis.findings import Finding, find_device_waste

PATTERN = "forward without backward"


def network(depth: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(128, 128), nn.Tanh())))


def dead_graphs_of(program: Callable[[], None], folder: Path) -> list[Finding]:
    """Return the findings of dead graphs in a program that save something."""
    with memtrace.record(folder / "run.memtrace"):
        program()
    waste = find_device_waste(memtrace.load(folder / "run.memtrace"), "cpu")
    return [finding for finding in waste.findings if finding.pattern == PATTERN and finding.saved_bytes]


def line_of(function: Callable[..., object], text: str) -> str:
    """Return ``:line function`` of the line of a function that contains a text, as allocation sites end."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + offset for offset, line in enumerate(lines) if text in line)
    return f":{number} {function.__qualname__}"


def contrastive_step(query: nn.Module, key: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(256, 128)
    queries = query(x)
    keys = key(x)  # the dead graph
    (queries * keys.detach()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_short_dead_graph_between_nodes_that_backward_runs_is_found(tmp_path: Path) -> None:
    def program() -> None:
        query, key = network(3), network(3)
        optimizer = torch.optim.SGD(query.parameters(), lr=0.1)
        for _ in range(6):
            contrastive_step(query, key, optimizer)

    (finding,) = dead_graphs_of(program, tmp_path)
    assert finding.site is not None and finding.site.endswith(line_of(contrastive_step, "the dead graph"))


def act(policy: nn.Module, states: torch.Tensor) -> torch.Tensor:
    action: torch.Tensor = policy(states).sigmoid()
    return action


def roll_out(policy: nn.Module) -> torch.Tensor:
    values = [act(policy, torch.randn(256, 128)) for _ in range(6)]  # the dead graphs
    return torch.stack(values).detach()


def test_dead_graphs_of_a_function_that_training_calls_too_are_one_finding_at_its_caller(tmp_path: Path) -> None:
    def program(*, has_graph: bool) -> None:
        policy = network(2)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(4):
            with torch.set_grad_enabled(has_graph):
                rewards = roll_out(policy)
            for reward in rewards:
                (act(policy, torch.randn(256, 128)) - reward).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    findings = dead_graphs_of(lambda: program(has_graph=True), tmp_path / "with")
    assert len(findings) == 1
    assert dead_graphs_of(lambda: program(has_graph=False), tmp_path / "without") == []
    with_graph, without = (memtrace.load(tmp_path / name / "run.memtrace") for name in ("with", "without"))
    saved = find_device_waste(with_graph, "cpu").peak_bytes - find_device_waste(without, "cpu").peak_bytes
    assert findings[0].saved_bytes == saved
    assert findings[0].site is not None and ".py:" in findings[0].site
    _, _, place = findings[0].site.rpartition(".py")
    number = int(place[1:].split()[0])
    lines, first = inspect.getsourcelines(roll_out)
    assert first <= number < first + len(lines), findings[0].site


def test_residual_additions_of_a_live_graph_are_not_dead(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.cat([torch.tanh(layer(x))])
            return x

    def program() -> None:
        model = Residual()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            model(torch.randn(256, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert dead_graphs_of(program, tmp_path) == []


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_connected_components_equal_those_of_a_search(graph: tuple[int, list[tuple[int, int]]]) -> None:
    num_nodes, edges = graph
    first, second = np.array(edges, np.int64).reshape(-1, 2).T
    expected = []
    for node in range(num_nodes):
        reached, frontier = {node}, {node}
        while frontier:
            near = {b for a, b in edges if a in frontier} | {a for a, b in edges if b in frontier}
            frontier = near - reached
            reached |= near
        expected.append(min(reached))
    assert connected_components(first, second, num_nodes).tolist() == expected
