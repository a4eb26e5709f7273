"""Connected components of an undirected graph."""

from __future__ import annotations

import numpy as np

from memtrace.format.arrays import Array


def connected_components(first: Array, second: Array, num_nodes: int) -> Array:
    """Return for each node the smallest node that it is connected with.

    Args:
        first: one end of each edge.
        second: the other end.
        num_nodes: the number of nodes, which are numbered from 0.
    """
    label = np.arange(num_nodes)
    while len(first):
        smallest = np.minimum(label[first], label[second])
        previous = label.copy()
        # Lower the roots of both ends as well, so that the number of rounds grows with the logarithm of the distance.
        for end in (first, second):
            np.minimum.at(label, previous[end], smallest)
            np.minimum.at(label, end, smallest)
        while not np.array_equal(label, label[label]):
            label = label[label]
        if np.array_equal(label, previous):
            break
    return label
