"""The words for the categories of ``memtrace.format.schema.CATEGORIES`` in every output of memtrace."""

from __future__ import annotations

from typing import Final

CATEGORY_LABELS: Final[dict[str, str]] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations",
    "input": "inputs",
    "temporary": "temporaries",
    "workspace": "workspaces",
    "unknown": "unknown",
}
"""Label of each category in tables, legends and sentences."""

CATEGORY_MEANINGS: Final[dict[str, str]] = {
    "parameter": "model weights and buffers",
    "gradient": "gradients of the parameters, as backward stores them in .grad",
    "optimizer_state": "tensors that the optimizer keeps between steps, such as Adam's two moments",
    "activation": "tensors that forward allocates and backward reads",
    "input": "the batch",
    "temporary": "allocated and freed within one phase",
    "workspace": "allocated and freed within one operator call",
    "unknown": "blocks for which the trace has too little information to choose a category",
}
"""Glossary entry of each category."""


def describe_category_share(category: str, share: str) -> str:
    """Return a clause such as ``activations hold 81 %``.

    Args:
        category: One of ``CATEGORIES``.
        share: Formatted share, see ``memtrace.units.format_share``.
    """
    if category == "unknown":
        return f"blocks of unknown category hold {share}"
    return f"{CATEGORY_LABELS[category]} {'holds' if category == 'optimizer_state' else 'hold'} {share}"
