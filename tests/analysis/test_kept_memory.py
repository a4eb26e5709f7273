"""Memory that training loops keep by mistake: graphs after backward, replaced optimizers, batches, and near misses."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from memtrace.analysis.findings import DeviceWaste, Finding
from tests.analysis.program_waste import is_saved, waste_of


def findings_of(waste: DeviceWaste, pattern: str) -> list[Finding]:
    """Return the findings of one pattern."""
    return [finding for finding in waste.findings if finding.pattern == pattern]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def accumulate(retain_graph: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            x, y = torch.randn(512, 128), torch.randint(10, (512,))
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=retain_graph)
        optimizer.step()
        optimizer.zero_grad()


def test_a_graph_that_its_loss_keeps_after_backward_is_found(tmp_path: Path) -> None:
    waste = waste_of(lambda: accumulate(retain_graph=True), tmp_path / "retained")
    freed = waste_of(lambda: accumulate(retain_graph=False), tmp_path / "freed")
    (finding,) = findings_of(waste, "graph kept after backward")
    assert is_saved(finding, waste, freed)
    assert finding.site is not None and finding.site.endswith(" accumulate")
    assert findings_of(freed, "graph kept after backward") == []


def replace_optimizer(is_deleted: bool) -> None:
    model = mlp()
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3)]
    for number in range(2):
        for _ in range(3):
            F.cross_entropy(model(torch.randn(16, 128)), torch.randint(10, (16,))).backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
        if is_deleted:
            optimizers.clear()
        if number == 0:
            optimizers.append(torch.optim.Adam(model.parameters(), lr=1e-4))


def test_the_state_of_an_optimizer_that_another_one_replaced_is_found(tmp_path: Path) -> None:
    waste = waste_of(lambda: replace_optimizer(is_deleted=False), tmp_path / "kept")
    deleted = waste_of(lambda: replace_optimizer(is_deleted=True), tmp_path / "deleted")
    (finding,) = findings_of(waste, "state of a replaced optimizer")
    assert finding.category == "optimizer_state"
    assert is_saved(finding, waste, deleted)
    assert findings_of(deleted, "state of a replaced optimizer") == []


def test_optimizers_that_take_turns_replace_none(tmp_path: Path) -> None:
    def program() -> None:
        model = mlp()
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for _ in range(2)]
        for number in range(6):
            F.cross_entropy(model(torch.randn(16, 128)), torch.randint(10, (16,))).backward()
            optimizers[number % 2].step()
            optimizers[number % 2].zero_grad()

    assert findings_of(waste_of(program, tmp_path), "state of a replaced optimizer") == []


def prefetch(keeps_used: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    queue: list[torch.Tensor] = []
    used: list[torch.Tensor] = []
    for _ in range(10):
        while len(queue) < 2:
            queue.append(torch.randn(512, 128))
        x = queue.pop(0)
        if keeps_used:
            used.append(x)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_batches_that_were_loaded_ahead_when_the_run_ended_are_not_unused(tmp_path: Path) -> None:
    assert findings_of(waste_of(lambda: prefetch(keeps_used=False), tmp_path), "unused allocation") == []


def test_the_last_batch_is_not_leaked_while_its_variable_holds_it(tmp_path: Path) -> None:
    waste = waste_of(lambda: prefetch(keeps_used=True), tmp_path / "kept")
    dropped = waste_of(lambda: prefetch(keeps_used=False), tmp_path / "dropped")
    (finding,) = findings_of(waste, "leak")
    assert is_saved(finding, waste, dropped)


def train(*, clips: bool, in_backward: bool = False) -> None:
    # Equal layers: no single gradient dominates.
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    parameters = list(model.parameters())
    optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in parameters} if in_backward else {}
    optimizer = None if in_backward else torch.optim.Adam(parameters, lr=1e-3)

    def apply_gradient(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(apply_gradient) for p in parameters if in_backward]
    for _ in range(4):
        model(torch.randn(8, 512)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        if optimizer is not None:
            optimizer.step()
            _ = torch.randn(8)
            model.zero_grad()
    for handle in handles:  # garbage collection does not see that hooks hold parameters, which hold the hooks
        handle.remove()


def test_an_optimizer_in_backward_saves_about_what_is_predicted(tmp_path: Path) -> None:
    waste = waste_of(lambda: train(clips=False), tmp_path / "after")
    in_backward = waste_of(lambda: train(clips=False, in_backward=True), tmp_path / "during")
    (finding,) = findings_of(waste, "gradients kept through optimizer step")
    measured = waste.peak_bytes - in_backward.peak_bytes
    # The prediction keeps the temporary results of the largest parameter.
    assert 0.8 * measured <= finding.saved_bytes <= measured


def test_gradients_that_are_clipped_cannot_be_applied_in_backward(tmp_path: Path) -> None:
    assert findings_of(waste_of(lambda: train(clips=True), tmp_path), "gradients kept through optimizer step") == []
