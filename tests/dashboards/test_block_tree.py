"""The pictures of the explorer, from the payload to the sums of their boxes, against sums over the blocks in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memtrace.dashboards.palette import SERIES_COLORS
from memtrace.dashboards.payload import build_payload

from memtrace.analysis.block_catalog import BlockCatalog, catalog_blocks
from memtrace.frames import Frame
from memtrace.trace import Trace
from tests.dashboards.scripts import Scripts, running_scripts
from tests.dashboards.test_explorer import live_after, random_trace

SCRIPTS = ("format.js", "worker.js", "block_columns.js", "block_fields.js", "block_query.js", "block_selection.js", "colors.js",
           "block_tree.js")  # fmt: skip
ANSWER = """
const state = {}, store = { get: () => state };
let data = null;
async function open({ packed, plain }) {
  const opened = { ...plain };
  for (const [name, table] of Object.entries(packed)) {
    opened[name] = table.json ? await inflate(table.json).json() : await unpackColumns(table);
  }
  data = describeBlocks(opened);
  return data.blocks.size.length;
}
function answer(question) {
  if (question.packed) return open(question);
  if (question.texts) return Object.fromEntries(assignColors(question.texts, question.palette));
  const { row, group, onlyOwn, color } = question, hierarchy = hierarchyOf(data, group, onlyOwn);
  const coloring = coloringOf(data, color), sums = sumTree(data, hierarchy, liveAt(data.blocks, row), coloring);
  const pathOf = (node) => (node > 0 ? [...pathOf(hierarchy.parent[node]), hierarchy.title[node]] : []);
  return hierarchy.title.map((_, node) => ({ path: pathOf(node), bytes: sums.bytes[node], count: sums.count[node],
    colors: Object.fromEntries([...(sums.byColor[node] ?? [])].map(([code, bytes]) => [coloring.groups[code].label, bytes])) }));
}
"""
ROWS = (-1, 5, 40, 150, 399)


def title(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} {frame.function}"


def paths_of(trace: Trace, catalog: BlockCatalog, index: int, group: str) -> list[str]:
    if group == "module":
        parts = (catalog.modules[catalog.module[index]] or "outside any module").split(".")
        return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    frames = trace.frames(catalog.stacks[catalog.stack[index]])
    if not frames:
        return [f"no call stack: {catalog.no_stack_reasons[catalog.no_stack_reason[index]]}"]
    return [title(frame) for frame in (frames if group == "callee" else reversed(frames))]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    trace = random_trace()
    payload = build_payload(trace, "cpu")
    assert payload is not None
    with running_scripts(SCRIPTS, ANSWER) as running:
        assert running.ask({"packed": payload.packed, "plain": payload.plain}) == len(
            catalog_blocks(trace, "cpu", 10_000)
        )
        yield running


@pytest.mark.parametrize("group", ["module", "stack", "callee"])
@pytest.mark.parametrize("color", ["category", "operator"])
def test_every_box_has_the_bytes_of_its_blocks(scripts: Scripts, group: str, color: str) -> None:
    trace = random_trace()
    catalog = catalog_blocks(trace, "cpu", 10_000)
    for row in ROWS:
        sizes: Counter[tuple[str, ...]] = Counter()
        counts: Counter[tuple[str, ...]] = Counter()
        for index in np.flatnonzero(np.isin(catalog.block, list(live_after(trace, row)))).tolist():
            path = paths_of(trace, catalog, index, group)
            for depth in range(len(path) + 1):
                sizes[tuple(path[:depth])] += int(catalog.size[index])
                counts[tuple(path[:depth])] += 1
        boxes: list[dict[str, Any]] = scripts.ask({"row": row, "group": group, "onlyOwn": False, "color": color})
        assert {tuple(box["path"]): box["bytes"] for box in boxes if box["count"]} == sizes
        assert {tuple(box["path"]): box["count"] for box in boxes if box["count"]} == counts
        assert all(sum(box["colors"].values()) == box["bytes"] for box in boxes)


def test_stacks_without_own_frames_have_a_box_of_their_own(scripts: Scripts) -> None:
    trace = random_trace()
    boxes = scripts.ask({"row": 399, "group": "stack", "onlyOwn": True, "color": "size"})
    assert boxes[0]["bytes"] == sum(box["bytes"] for box in boxes if len(box["path"]) == 1)
    assert boxes[0]["count"] == len(live_after(trace, 399))


def test_texts_keep_their_colors_unless_a_larger_text_has_them(scripts: Scripts) -> None:
    palette = list(SERIES_COLORS)
    texts = [f"train.py:{line} main" for line in range(len(palette))]
    colors = scripts.ask({"texts": texts, "palette": palette})
    assert sorted(colors.values()) == sorted(palette)
    for number in range(len(texts)):
        alone = scripts.ask({"texts": [texts[number]], "palette": palette})[texts[number]]
        assert colors[texts[number]] == alone or alone in [colors[text] for text in texts[:number]]
