"""The model and the optimizers that a plan is applied to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtrace.errors import MemtraceError
from memtrace.units import format_names

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Target:
    """A model and its optimizers."""

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]

    def find_modules(self, names: Iterable[str]) -> dict[str, torch.nn.Module]:
        """Return the modules of the model by the names that a plan uses.

        Where the recording detected the model by itself, names in the trace begin with the class of the model, and with
        a number if it was not the first model of its class, as in ``Sequential#2.0``.

        Raises:
            MemtraceError: The model has no module of such a name.
        """
        wanted = list(names)
        modules = self._modules(wanted)
        missing = [name for name in wanted if name not in modules]
        if missing:
            from memtrace.recording.plain_access import type_name

            raise MemtraceError(
                f"the plan names modules that the model ({type_name(self.model)}) does not have: "
                f"{format_names(missing)}. Apply the plan to the model it was made for, or record this model and make "
                "a plan for it."
            )
        return {name: modules[name] for name in wanted}

    def has_modules(self, names: Iterable[str]) -> bool:
        """Return whether the model has modules of all these names."""
        wanted = set(names)
        return self._modules(wanted).keys() >= wanted

    def _modules(self, wanted: Collection[str]) -> dict[str, torch.nn.Module]:
        """Return the modules of the model by all names that a plan can use for them."""
        from memtrace.recording.plain_access import type_name, walk_modules

        modules = dict(walk_modules(self.model))
        prefix = type_name(self.model)
        roots = {root for root in (name.split(".")[0] for name in wanted) if root.partition("#")[0] == prefix}
        if len(roots) == 1:  # otherwise the plan names modules of several models of this class
            prefix = roots.pop()
        return {f"{prefix}.{name}" if name else prefix: module for name, module in modules.items()} | modules


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` made a module, or was called on it (``Module.compile``)."""
    from torch.nn import Module

    from memtrace.recording.plain_access import child_module

    own: dict[str, object] = Module.__dict__["__dict__"].__get__(module)
    return child_module(module, "_orig_mod") is not None or own.get("_compiled_call_impl") is not None
