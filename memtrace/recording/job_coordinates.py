"""Where a process stands in the dimensions of its job's parallelism: pipeline stage, tensor-parallel rank, and so on.

They are read from torch's device meshes, or from the process groups of Megatron-Core. Nothing is imported for it, and
no function of the program runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from memtrace.format.manifest import RankCoordinate

_MESH_MODULE: Final = "torch.distributed.device_mesh"
_MEGATRON_MODULE: Final = "megatron.core.parallel_state"
MEGATRON_GROUPS: Final = {
    "pp": "_PIPELINE_MODEL_PARALLEL_GROUP",
    "dp": "_DATA_PARALLEL_GROUP",
    "cp": "_CONTEXT_PARALLEL_GROUP",
    "ep": "_EXPERT_MODEL_PARALLEL_GROUP",
    "tp": "_TENSOR_MODEL_PARALLEL_GROUP",
}
"""Variables of ``megatron.core.parallel_state`` by the dimension that their group spans."""


def find_coordinates(
    live_instances: Callable[[tuple[type, ...]], list[list[Any]]],
) -> tuple[RankCoordinate, ...]:
    """Return the coordinates of this process; empty where the program has no mesh and does not use Megatron-Core.

    Args:
        live_instances: returns the living instances of some types, see ``Observer.live_instances``.
    """
    try:
        return _megatron_coordinates() or _mesh_coordinates(live_instances)
    except Exception:  # a version that keeps them elsewhere: they stay unknown
        return ()


def _mesh_coordinates(live_instances: Callable[[tuple[type, ...]], list[list[Any]]]) -> tuple[RankCoordinate, ...]:
    """Return the coordinates in the mesh with the most named dimensions, which is the one others are slices of."""
    base = getattr(sys.modules.get(_MESH_MODULE), "DeviceMesh", None)
    if not isinstance(base, type):
        return ()
    (meshes,) = live_instances((base,))
    found = [_place_in(mesh) for mesh in meshes if type(mesh) is base]
    return max(found, key=len, default=())


def _place_in(mesh: Any) -> tuple[RankCoordinate, ...]:
    """Return the coordinates in a mesh; empty for one without names, or that this process is not in."""
    names, places = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names or not places:
        return ()
    return tuple(
        RankCoordinate(str(name), int(place), int(size))
        for name, place, size in zip(names, places, mesh.shape, strict=True)
    )


def _megatron_coordinates() -> tuple[RankCoordinate, ...]:
    module = sys.modules.get(_MEGATRON_MODULE)
    if module is None:
        return ()
    from torch.distributed import ProcessGroup

    coordinates = []
    for dimension, variable in MEGATRON_GROUPS.items():
        group = vars(module).get(variable)
        if isinstance(group, list) and len(group) == 1:
            group = group[0]
        if isinstance(group, ProcessGroup):
            coordinates.append(RankCoordinate(dimension, group.rank(), group.size()))
    return tuple(coordinates)
