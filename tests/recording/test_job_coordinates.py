"""The place of a process in the dimensions of its job, from device meshes and from Megatron-Core's groups."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType

import pytest
from torch.distributed import ProcessGroup

from memtrace.format.manifest import RankCoordinate
from memtrace.recording.job_coordinates import MEGATRON_GROUPS, find_coordinates
from memtrace.recording.plain_access import instances_of


def live_instances(types: tuple[type, ...]) -> list[list[object]]:
    return [instances_of((kind,), gc.get_objects()) for kind in types]


def test_megatron_names_the_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("megatron.core.parallel_state")
    groups = {"pp": ProcessGroup(3, 4), "dp": ProcessGroup(5, 16), "tp": ProcessGroup(1, 8)}
    for dimension, variable in MEGATRON_GROUPS.items():
        setattr(module, variable, groups.get(dimension))
    setattr(module, MEGATRON_GROUPS["pp"], [groups["pp"]])  # newer versions keep a list of pipelines
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", module)
    assert find_coordinates(live_instances) == (
        RankCoordinate("pp", 3, 4),
        RankCoordinate("dp", 5, 16),
        RankCoordinate("tp", 1, 8),
    )


def test_a_changed_megatron_leaves_the_coordinates_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("not here any more")

    module = ModuleType("megatron.core.parallel_state")
    module._PIPELINE_MODEL_PARALLEL_GROUP = Broken()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", module)
    assert find_coordinates(lambda types: [[] for _ in types]) == ()

    def fail(types: tuple[type, ...]) -> list[list[object]]:
        raise RuntimeError

    assert find_coordinates(fail) == ()


MESH_PROGRAM = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import memtrace
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=13, world_size=16, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("pp", "dp", "tp"))
stage, pair = mesh["pp"], mesh["dp", "tp"]
with memtrace.record(sys.argv[1]):
    pass
"""


def test_the_mesh_with_all_dimensions_counts(tmp_path: object) -> None:
    """Rank 13 of 2 x 4 x 2 is stage 1, and there data-parallel rank 2, tensor-parallel rank 1."""
    import memtrace

    path = f"{tmp_path}/job.memtrace"
    result = subprocess.run([sys.executable, "-c", MESH_PROGRAM, path], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    manifest = memtrace.load(path).manifest
    assert (manifest.rank, manifest.world_size) == (13, 16)
    assert {place.dimension: (place.index, place.size) for place in manifest.coordinates} == {
        "pp": (1, 2),
        "dp": (2, 4),
        "tp": (1, 2),
    }
