"""Layers made by hand."""

from __future__ import annotations

from typing import Any

from memtrace.planning.pipeline.costs import Layer


def uniform_layers(count: int, **changes: Any) -> list[Layer]:
    """Equal layers: forward 1 s, backward 2 s, round numbers of bytes; ``changes`` by the names of Layer."""
    values: dict[str, Any] = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "parameter_bytes": 100,
        "gradient_bytes": 100,
        "optimizer_bytes": 200,
        "activation_bytes": 50,
        "output_bytes": 10,
    }
    return [Layer(name=f"layer{number}", **(values | changes)) for number in range(count)]
