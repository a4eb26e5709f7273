"""The head of the page: coverage, key figures, sentences a newcomer understands, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memtrace.dashboards.text import name_text

from memtrace.analysis import compute_coverage
from memtrace.analysis.growth import growth
from memtrace.analysis.peak import Peak, find_peak, peak_by_category, peak_by_module, peak_by_site
from memtrace.analysis.steps import step_columns
from memtrace.categories import CATEGORY_LABELS
from memtrace.units import format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.trace import Trace

ADVICE = {
    "activation": "Recompute them in backward (torch.utils.checkpoint) for the modules that hold most, train in bf16 "
    "(autocast), or take a smaller batch and accumulate gradients.",
    "optimizer_state": "Use an optimizer that keeps less (SGD, Adafactor, 8-bit Adam), or shard it (ZeRO, FSDP).",
    "gradient": "Call zero_grad(set_to_none=True) before forward, or free gradients as they are used "
    "(optimizer in backward).",
    "parameter": "Store the weights in bf16, shard them (FSDP), or freeze and quantise what is not trained.",
    "temporary": "Look at the lines below: in-place operators, fused kernels or smaller chunks avoid them.",
    "workspace": "An operator's own scratch memory: another algorithm or layout may need less.",
    "input": "Load smaller batches, or keep the data set on disk rather than in memory.",
    "unknown": "Record with stacks and accesses on, and pass model= and optimizer=, so that more can be told.",
}
_OF_A_FILE = "This file does not say what they are; a recording by memtrace does."
_LOST = {0: "no", None: "an unknown number of"}


def key_figures(trace: Trace, device: str) -> dict[str, Any]:
    """What the template shows of one device: coverage, cards, sentences and hints."""
    found = find_peak(trace, device)
    return {
        "coverage": _coverage(trace),
        "cards": _cards(trace, found),
        "sentences": _sentences(trace, found),
        "hints": _hints(trace, found),
    }


def _coverage(trace: Trace) -> dict[str, Any]:
    told, manifest = compute_coverage(trace), trace.manifest
    first, last = told.first_event_ns, told.last_event_ns
    span = format_duration(last - first) if first is not None and last is not None else "an unknown time"
    source = manifest.source
    warnings = list(told.notes)
    if not told.finished:
        warnings.insert(0, f"unfinished: {told.stop_reason or 'the process died while recording'}.")
    if told.lost_events:
        warnings.insert(0, f"{told.lost_events:,} events were lost: what follows is not complete.")
    versions = {name: version for name, version in manifest.versions.items() if version}
    facts = [
        (
            "recorded by",
            f"memtrace {manifest.memtrace_version}, {source.observer or source.kind}",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("command", name_text(" ".join(map(str, manifest.command or ["unknown"])))),
        ("events", f"{told.num_events:,}"),
        ("lost events", "unknown" if told.lost_events is None else f"{told.lost_events:,}"),
        ("older than the recording", format_bytes(told.baseline_bytes)),
        ("of unknown category at the peak", format_bytes(told.unattributed_bytes)),
        (
            "outside the allocator",
            "unknown" if told.outside_allocator_bytes is None else format_bytes(told.outside_allocator_bytes),
        ),
    ]
    return {
        "sentence": f"{told.num_events:,} events in {span}, {format_count(told.num_steps, 'step')}; "
        f"{_LOST.get(told.lost_events, 'some')} events lost.",
        "warnings": [name_text(text, 400) for text in warnings],
        "facts": facts,
    }


def _cards(trace: Trace, found: Peak) -> list[dict[str, Any]]:
    total = found.requested.bytes
    when = format_duration(found.time_ns) if found.time_ns is not None else f"event {found.requested.event:,}"
    when = when if found.requested.event >= 0 else "the start"
    cards: list[dict[str, Any]] = [
        {"label": "peak requested", "value": format_bytes(total), "hint": f"at {when}, {_where(found)}"},
    ]
    if found.reserved is not None:
        cards.append(
            {
                "label": "peak reserved",
                "value": format_bytes(found.reserved.bytes),
                "hint": "taken from the device",
            }
        )
    categories = peak_by_category(trace, found.device)
    if categories:
        name, size = categories[0].name, categories[0].bytes
        cards.append({"label": "most of it", "value": CATEGORY_LABELS[name or "unknown"], "category": name,
                      "hint": f"{format_bytes(size)}, {format_share(size, total)} of the peak"})  # fmt: skip
    columns = step_columns(trace)
    if len(columns["step"]):
        usual = sorted(columns["duration_ns"].tolist())[len(columns["step"]) // 2]
        cards.append(
            {
                "label": "steps",
                "value": f"{len(columns['step']):,}",
                "hint": f"{format_duration(usual)} each, as a rule",
            }
        )
    grows = growth(trace)
    if grows is not None:
        value = f"{format_bytes(grows.bytes_per_step)} a step" if grows.bytes_per_step > 0 else "nothing"
        cards.append(
            {
                "label": "grows",
                "value": value,
                "hint": f"over {grows.num_steps:,} steps, the first two left out",
            }
        )
    return cards


def _where(found: Peak) -> str:
    step = f"step {found.step}" if found.step is not None else "outside of the steps"
    return f"{step}, {found.phase}" if found.phase else step


def _sentences(trace: Trace, found: Peak) -> list[str]:
    total = found.requested.bytes
    sentences = []
    for what, rows in (
        ("line", peak_by_site(trace, found.device)),
        ("module", peak_by_module(trace, found.device)),
    ):
        known = [row for row in rows if row.name]
        if known:
            name, size, number = known[0].name, known[0].bytes, known[0].num_blocks
            sentences.append(
                f"The {what} that holds most of the peak is {name_text(name)}: {format_bytes(size)} "
                f"({format_share(size, total)}) in {number:,} block{'s' if number != 1 else ''}."
            )
    return sentences


def _advice(trace: Trace, category: str) -> str:
    recorded = trace.manifest.source.kind == "recording"
    return ADVICE[category] if recorded or category != "unknown" else _OF_A_FILE


def _hints(trace: Trace, found: Peak) -> list[dict[str, str]]:
    total, hints = found.requested.bytes, []
    grows = growth(trace)
    if grows is not None and grows.bytes_per_step > 0:
        where = f" First suspect: {name_text(grows.sources[0][0])}." if grows.sources else ""
        hints.append(
            {
                "finding": f"{format_bytes(grows.bytes_per_step)} more stay live after every step.",
                "advice": f"Something keeps tensors: a list of losses with their graphs, a cache, a hook.{where}",
            }
        )
    for group in peak_by_category(trace, found.device)[:3]:
        name, size = group.name, group.bytes
        if total and size / total >= 0.1:
            label = CATEGORY_LABELS[name or "unknown"]
            hints.append(
                {
                    "finding": f"{format_share(size, total)} of the peak: {label}.",
                    "advice": _advice(trace, name or "unknown"),
                }
            )
    columns = step_columns(trace)
    wait, lasting = int(columns["data_wait_ns"].sum()), int(columns["duration_ns"].sum())
    if lasting and wait / lasting >= 0.1:
        hints.append(
            {
                "finding": f"{format_share(wait, lasting)} of the time waits for data.",
                "advice": "More DataLoader workers, or data prepared beforehand, would speed up every step.",
            }
        )
    return hints
