"""The weight versions of a stage under PipeDream and PipeDream-2BW.

A forward runs with tensors that share the memory of a version but not its version counter
(``torch.func.functional_call``), so the backward of a micro-batch uses the weights of its forward. An update writes to
the memory of the newest version, unless this version is still needed: then it writes to a copy. So there are exactly as
many copies of the weights as versions in use.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn


class StageWeights:
    """The weight versions of one stage; version 0 is the initial one, and every update makes the next one.

    Args:
        module: the stage; its parameters always are the newest version.
        optimizer: updates the parameters of the stage.
        is_double_buffered: whether the version before the newest one is kept even if no micro-batch uses it at the
            moment (PipeDream-2BW).
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, is_double_buffered: bool) -> None:
        self._module, self._optimizer, self._is_double_buffered = module, optimizer, is_double_buffered
        self.newest = 0
        self._versions: dict[int, dict[str, torch.Tensor]] = {0: self._share_newest()}
        self._num_users: Counter[int] = Counter()

    def run(self, version: int, value: torch.Tensor) -> torch.Tensor:
        """Run the forward of a micro-batch with a version that is kept, and keep the version until ``release``."""
        self._num_users[version] += 1
        return torch.func.functional_call(self._module, self._versions[version], (value,))

    def parameters(self, version: int) -> list[torch.Tensor]:
        """The tensors of a version, in whose ``grad`` backwards accumulate."""
        return list(self._versions[version].values())

    def release(self, version: int) -> None:
        """Note that a backward of a micro-batch that used the version is done; ``update`` frees the version."""
        self._num_users[version] -= 1

    def update(self, version: int) -> None:
        """Update the newest version with the gradients that were computed with ``version``."""
        named = dict(self._module.named_parameters())
        for name, parameter in named.items():
            tensor = self._versions[version][name]
            parameter.grad, tensor.grad = tensor.grad, None
        del tensor
        self.newest += 1
        self._drop_unused()
        if self.newest - 1 in self._versions:
            for parameter in named.values():
                # Parameters keep their identity, because the optimizer has its state by parameter.
                parameter.data = parameter.data.clone()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._versions[self.newest] = self._share_newest()

    def _share_newest(self) -> dict[str, torch.Tensor]:
        return {
            # ``detach`` would share the version counter, which the optimizer's updates in place increase.
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self._module.named_parameters()
        }

    def _drop_unused(self) -> None:
        kept = {self.newest, *(version for version, users in self._num_users.items() if users)}
        if self._is_double_buffered:
            kept.add(self.newest - 1)
        self._versions = {version: tensors for version, tensors in self._versions.items() if version in kept}
