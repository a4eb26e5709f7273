"""Random schedules and hand-made layers for the pipeline tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from memtrace.pipeline.costs import LayerCosts
from memtrace.pipeline.schedules.registry import SCHEDULE_FAMILIES, ScheduleChoice
from memtrace.pipeline.schedules.schedule import Schedule


def uniform_layers(count: int, **changes: Any) -> list[LayerCosts]:
    """Equal layers (forward 1 s, backward 2 s, round numbers of bytes); ``changes`` are fields of ``LayerCosts``."""
    values: dict[str, Any] = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "parameter_bytes": 100,
        "gradient_bytes": 100,
        "optimizer_bytes": 200,
        "activation_bytes": 50,
        "output_bytes": 10,
    }
    return [LayerCosts(name=f"layer{number}", **(values | changes)) for number in range(count)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule family with any sizes that it supports."""
    family = SCHEDULE_FAMILIES[draw(st.sampled_from(sorted(SCHEDULE_FAMILIES)))]
    workers = draw(st.integers(1, 8))
    microbatches = draw(st.integers(1, 25))
    options: dict[str, int | str] = {}
    if family.name in ("chimera", "dualpipe"):
        workers = 2 * draw(st.integers(1, 5))
    if family.name == "chimera":
        half = workers // 2
        options["f"] = draw(st.sampled_from([f for f in range(1, half + 1) if half % f == 0]))
        options["method"] = draw(st.sampled_from(["direct", "doubling", "halving"]))
        microbatches = draw(st.integers(1, 5 * workers + 1))
    if family.name == "interleaved":
        options["chunks"] = draw(st.integers(1, 4))
        rounds = max(1, microbatches // workers)
        microbatches -= microbatches % rounds
    if family.name in ("dualpipe", "dualpipe-v"):
        microbatches = 2 * (workers + draw(st.integers(0, 6)))
    if family.name == "pipedream-2bw":
        microbatches = workers * draw(st.integers(1, 4))
        options["update_every"] = workers
    return ScheduleChoice(family, options).build(workers, microbatches)
