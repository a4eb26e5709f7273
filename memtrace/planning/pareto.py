"""The Pareto front: the plans that no other plan beats both in memory and in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pareto_front(items: Sequence[T], key: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the items that no other item beats in both criteria, by the first criterion.

    Args:
        items: The items; of several with equal criteria the first is kept.
        key: Returns the two criteria of an item; less is better.
    """
    ordered = sorted(range(len(items)), key=lambda number: (*key(items[number]), number))
    front: list[T] = []
    for number in ordered:
        if not front or key(items[number])[1] < key(front[-1])[1]:
            front.append(items[number])
    return front
