"""The losses of a run: the values on which the program calls ``backward``, compared bit by bit between two runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memtrace.errors import MemtraceError
from memtrace.format.files import replace_file
from memtrace.format.typed_json import InvalidMember, parse_value, read_json_file


@contextmanager
def write_losses(path: Path) -> Iterator[None]:
    """Write the losses of the program that runs in the ``with`` block as a JSON list of hexadecimal numbers.

    A loss is a tensor of one element from which ``torch.autograd.backward`` or ``Tensor.backward`` starts.
    """
    import torch

    losses: list[str] = []
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def backward_with_loss(tensors: Any, *arguments: Any, **options: Any) -> Any:
        if type(tensors) is torch.Tensor and tensors.numel() == 1:
            losses.append(float(tensors.item()).hex())
        return backward(tensors, *arguments, **options)

    torch.autograd.backward = backward_with_loss
    try:
        yield
    finally:
        torch.autograd.backward = backward
        replace_file(path, json.dumps(losses).encode())


def read_losses(path: Path) -> tuple[str, ...]:
    """Return what `write_losses` wrote; MemtraceError where it cannot be read."""
    try:
        losses: tuple[str, ...] = parse_value(tuple[str, ...], read_json_file(path))
    except (OSError, ValueError, InvalidMember) as error:
        raise MemtraceError(f"{path} cannot be read ({error}): the program has not run to its end.") from error
    return losses
