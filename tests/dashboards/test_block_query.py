"""The query language of the explorer, against a filter written in Python."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dashboards.scripts import Scripts, running_scripts

SCRIPTS = ("format.js", "block_fields.js", "block_query.js", "block_table.js")
ANSWER = """
function answer({ query, blocks, sort }) {
  const text = (name) => ({ type: "text", ofKind: (k) => blocks[k][name] });
  const ofKind = (name) => ({ type: "number", ofKind: (k) => blocks[k][name] });
  const ofBlock = (name) => ({ type: "number", ofBlock: (i) => blocks[i][name] });
  const fields = { category: text("category"), module: text("module"), operator: text("operator"), site: text("site"),
    name: text("name"), size: ofKind("size"), step: ofBlock("step"), lifetime: ofBlock("lifetime") };
  const kindOf = blocks.map((_, i) => i), { terms, problems } = parseQuery(query);
  const matches = compileQuery(terms, fields, kindOf, blocks.length), indices = kindOf.filter(matches);
  const sorted = [...sortBlocks(indices, fields[sort.field], sort.descending, kindOf, blocks.length)];
  return { indices, sorted, problems, sources: terms.map((term) => term.source) };
}
"""
TEXT_FIELDS = ("category", "module", "operator", "site", "name")
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "=": operator.eq, "": operator.eq}

# Few texts and numbers, so that random terms match some blocks and not others.
texts = st.one_of(
    st.sampled_from(["", "layers.3", "layers.30", "layers.3.mlp", "x:y", 'a "b" c', "back\\slash", "é,ü", "aten::mul_", "-1"]),
    st.text(st.sampled_from("ab3 .:,-\"\\(*é"), max_size=5),
)  # fmt: skip
numbers = st.integers(-1, 12)
blocks = st.fixed_dictionaries(
    {**dict.fromkeys(TEXT_FIELDS, texts), "size": st.integers(0, 6).map(lambda n: n * 512), "step": numbers, "lifetime": numbers}
)  # fmt: skip


@dataclass(frozen=True)
class Term:
    """A term of a query: its text and what it means."""

    source: str
    matches: Any


def quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def contains(text: str, part: str) -> bool:
    """Whether a part occurs in a text without a number being cut."""
    if not part:
        return not text
    for at in range(len(text) - len(part) + 1):
        before, after = text[at - 1 : at], text[at + len(part) : at + len(part) + 1]
        cuts = (part[0] in "0123456789" and before in set("0123456789")) or (
            part[-1] in "0123456789" and after in set("0123456789")
        )
        if text[at : at + len(part)] == part and not cuts:
            return True
    return False


@st.composite
def text_terms(draw: st.DrawFn) -> Term:
    field, values = draw(st.sampled_from(TEXT_FIELDS)), draw(st.lists(texts, min_size=1, max_size=3))
    exact = draw(st.booleans())
    source = f"{field}:" + ",".join(("=" if exact else "") + quote(value) for value in values)

    def matches(block: dict[str, Any]) -> bool:
        text = block[field].lower()
        return any(text == value.lower() if exact else contains(text, value.lower()) for value in values)

    return Term(source, matches)


@st.composite
def word_terms(draw: st.DrawFn) -> Term:
    word = draw(texts.filter(bool))
    return Term(quote(word), lambda block: any(word.lower() in block[field].lower() for field in TEXT_FIELDS))


@st.composite
def number_terms(draw: st.DrawFn) -> Term:
    field, low = draw(st.sampled_from(("size", "step", "lifetime"))), draw(st.integers(0, 12))
    factor, unit = {"size": (512, draw(st.sampled_from(["B", ""]))), "step": (1, ""), "lifetime": (1, "us")}[field]
    if draw(st.booleans()):
        high = draw(st.integers(0, 12))
        source = f"{field}:{low * factor}{unit}..{high * factor}{unit}"
        return Term(source, lambda block: block[field] >= 0 and low * factor <= block[field] <= high * factor)
    sign = draw(st.sampled_from(sorted(COMPARE)))
    return Term(
        f"{field}:{sign}{low * factor}{unit}",
        lambda block: block[field] >= 0 and COMPARE[sign](block[field], low * factor),
    )


@st.composite
def terms(draw: st.DrawFn) -> Term:
    term = draw(st.one_of(text_terms(), word_terms(), number_terms()))
    if not draw(st.booleans()):
        return term
    return Term(f"-{term.source}", lambda block: not term.matches(block))


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    with running_scripts(SCRIPTS, ANSWER) as running:
        yield running


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    query=st.lists(terms(), max_size=4),
    blocks=st.lists(blocks, max_size=12),
    field=st.sampled_from((*TEXT_FIELDS, "size", "step", "lifetime")),
    descending=st.booleans(),
)
def test_filters_and_orders_equal_those_written_in_python(
    scripts: Scripts, query: list[Term], blocks: list[dict[str, Any]], field: str, descending: bool
) -> None:
    answer = scripts.ask(
        {
            "query": " ".join(term.source for term in query),
            "blocks": blocks,
            "sort": {"field": field, "descending": descending},
        }
    )
    assert answer["problems"] == []
    assert answer["sources"] == [term.source for term in query]
    expected = [i for i, block in enumerate(blocks) if all(term.matches(block) for term in query)]
    assert answer["indices"] == expected
    # Python and JavaScript order texts alike below U+10000. Equal blocks keep their order.
    values = sorted({block[field] for block in blocks}, reverse=descending)
    assert answer["sorted"] == sorted(expected, key=lambda i: values.index(blocks[i][field]))


def test_terms_that_need_a_number_are_reported_and_ignored(scripts: Scripts) -> None:
    question: dict[str, Any] = {"blocks": [], "sort": {"field": "size", "descending": True}}
    answer = scripts.ask({**question, "query": "size:>large step:2..x relu lifetime:<3ms aten::mul nofield:3"})
    assert answer["problems"] == [
        "size:>large: size needs bytes such as >1MiB.",
        "step:2..x: step needs a number such as 3 or 2..5.",
    ]
    assert answer["sources"] == ["relu", "lifetime:<3ms", "aten::mul", "nofield:3"]
