"""The search for modules and tensors that exist when a recording starts."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from memtrace.recording.observers import Observer
from memtrace.recording.observers.dispatch_observer import DispatchObserver
from memtrace.recording.observers.native_observer import NativeObserver


class Base:
    """What is searched for."""

    def __init__(self) -> None:
        self.itself = self  # so that a cycle holds it


class Derived(Base):
    """A subclass."""


class Container(dict[str, int]):
    """Instances belong to a built-in type as well."""


class Hostile(type):
    """Its classes can be neither hashed nor compared."""

    def __hash__(cls) -> int:
        raise AssertionError

    def __eq__(cls, other: object) -> bool:
        raise AssertionError


class Unhashable(Base, metaclass=Hostile):
    """A subclass of that kind."""


class Pretender:
    """Claims to be an instance of Base."""

    @property
    def __class__(self) -> type:
        raise AssertionError


@pytest.fixture(params=[NativeObserver, DispatchObserver], ids=["native", "dispatch"])
def observer(request: pytest.FixtureRequest) -> Observer:
    make: Callable[[], Observer] = request.param
    return make()


@pytest.fixture
def automatic_collections_are_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def ids(objects: list[object]) -> list[int]:
    return sorted(map(id, objects))


@pytest.mark.usefixtures("automatic_collections_are_off")
def test_every_instance_is_found_once_whatever_its_age(observer: Observer) -> None:
    instances: list[object] = []
    others: list[object] = []
    containers: list[object] = []
    for generation in (2, 1, 0, None):
        for number in range(500):
            instances.append((Base, Derived, Unhashable)[number % 3]())
            containers.append(Container(number=number))
            others.append([Pretender(), {}])
        if generation is not None:
            gc.collect(generation)
    found = observer.live_instances((Base, Container))
    assert [ids(objects) for objects in found] == [ids(instances), ids(containers)]


@pytest.mark.usefixtures("automatic_collections_are_off")
def test_instances_are_found_from_within_a_collection(observer: Observer) -> None:
    instances = [Base() for _ in range(10)]
    found: list[list[int]] = []

    def search(phase: str, info: dict[str, int]) -> None:
        found.append(ids(observer.live_instances((Base,))[0]))

    gc.callbacks.append(search)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(search)
    assert found == 2 * [ids(list(instances))]


def test_the_search_leaves_no_references(observer: Observer) -> None:
    instance = Base()
    count = sys.getrefcount(instance)
    assert any(item is instance for item in observer.live_instances((Base,))[0])
    assert sys.getrefcount(instance) == count


FROZEN: Final = """
import gc, sys, torch, memtrace
tensor = torch.ones(1 << 16)
gc.freeze()
with memtrace.record(sys.argv[1], observer="native"):
    pass
events = memtrace.load(sys.argv[1]).events
assert tensor.data_ptr() in set(events.address[events.kind == "baseline"])
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python offers no way to visit frozen objects")
def test_frozen_tensors_are_in_the_baseline(tmp_path: Path) -> None:
    # In a process of its own: what is frozen here would never be collected again.
    subprocess.run([sys.executable, "-c", FROZEN, str(tmp_path / "run.memtrace")], check=True)
