"""Call stacks as a tree: every stack comes back as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from memtrace.dashboards.stack_encoding import build_frame_tree

from memtrace.frames import Frame
from tests.builders import trace_of

NUM_FRAMES = 5


@given(st.lists(st.lists(st.integers(0, NUM_FRAMES - 1), max_size=6), max_size=12))
def test_every_stack_is_a_path_from_the_root(stacks: list[list[int]]) -> None:
    frames = [{"id": number, "kind": "frame", "text": f"f{number}.py\t{number}\tmain"} for number in range(NUM_FRAMES)]
    rows = [{"id": 100 + n, "kind": "stack", "text": "", "frames": stack} for n, stack in enumerate(stacks)]
    tree = build_frame_tree(trace_of(names=[*frames, *rows]), [-1, *(100 + n for n in range(len(stacks)))])
    assert tree.node_of_stack[0] == 0
    assert (tree.parent[1:] < range(1, len(tree.parent))).all() and tree.parent[0] == -1
    for stack, node in zip(stacks, tree.node_of_stack[1:].tolist(), strict=True):
        found = []
        while node > 0:
            found.append(tree.frames[tree.frame[node]])
            node = int(tree.parent[node])
        assert found == [Frame(f"f{number}.py", number, "main") for number in stack]
    assert len({(int(p), int(f)) for p, f in zip(tree.parent, tree.frame, strict=True)}) == len(tree.parent)
