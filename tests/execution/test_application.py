"""``memtrace.apply``, on a model that the user passes and on one that is detected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memtrace
from memtrace import MemtraceError, Plan
from memtrace.execution.detected_model import apply_to_detected_model
from memtrace.planning.actions import Recompute
from memtrace.planning.plan import StepCost
from tests.execution.helpers import noted  # noqa: F401

COST = StepCost(1, None)


def make_plan(*modules: str) -> Plan:
    return Plan("cpu", (Recompute(modules),), COST, COST)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.body(x))
        return output


@pytest.mark.parametrize("names", [("body.0", "head"), ("Net.body.0", "Net.head"), ("Net#2.body.0", "Net#2.head")])
def test_the_plan_is_in_effect_inside_the_block(noted: list[str], names: tuple[str, ...]) -> None:  # noqa: F811
    model = Net()
    with memtrace.apply(make_plan(*names), model, torch.optim.SGD(model.parameters())):
        assert noted == ["begin Linear,Linear 1"]
    assert noted[-1] == "end Linear,Linear"


def test_a_module_that_the_model_lacks_is_an_error_before_anything_changes(noted: list[str]) -> None:  # noqa: F811
    with (
        pytest.raises(MemtraceError, match=r"\(Net\) does not have: blocks\.7"),
        memtrace.apply(make_plan("body.0", "blocks.7"), Net()),
    ):
        pytest.fail("the block must not run")
    assert noted == []


def test_an_action_that_cannot_be_carried_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.execution.application._APPLIERS", {})
    with pytest.raises(MemtraceError, match="cannot carry this out"), memtrace.apply(make_plan("head"), Net()):
        pytest.fail("the block must not run")


def test_an_exception_in_the_block_ends_the_plan(noted: list[str]) -> None:  # noqa: F811
    with pytest.raises(KeyError), memtrace.apply(make_plan("head"), Net()):
        raise KeyError
    assert noted == ["begin Linear 0", "end Linear"]


def test_the_first_model_with_the_modules_is_detected(noted: list[str]) -> None:  # noqa: F811
    other, model = nn.Linear(4, 4), Net()
    optimizer = torch.optim.SGD(model.parameters())
    with apply_to_detected_model(make_plan("Net.head")):
        other(torch.ones(1, 4))
        assert noted == []
        model(torch.ones(1, 4))
        assert noted == ["begin Linear 1"]
        model(torch.ones(1, 4))
    assert noted == ["begin Linear 1", "end Linear"]
    assert not nn.modules.module._global_forward_pre_hooks
    del optimizer


def test_a_plan_that_fits_no_model_is_reported_and_the_program_runs(noted: list[str]) -> None:  # noqa: F811
    with pytest.warns(UserWarning, match="not applied: no model"), apply_to_detected_model(make_plan("encoder")):
        assert Net()(torch.ones(1, 4)).shape == (1, 1)
    assert noted == []
    assert not nn.modules.module._global_forward_pre_hooks
