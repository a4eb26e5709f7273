"""The reports of ranks that are kept beside their traces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from memtrace.cli import cli

from memtrace.analysis import rank_reports
from memtrace.analysis.rank_overview import survey_ranks
from memtrace.analysis.rank_reports import REPORT_NAME
from memtrace.analysis.ranks import compare_ranks
from memtrace.trace import load
from tests.builders import copied_job


@pytest.fixture
def job(gpt_trace: Path, tmp_path: Path) -> Path:
    return copied_job(gpt_trace, tmp_path / "job.memtrace", 3)


def as_json(job: Path) -> object:
    result = CliRunner().invoke(cli, ["ranks", str(job), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_second_question_reads_no_events_and_gets_the_same_answer(job: Path, ranks_read: list[int]) -> None:
    first, answer = survey_ranks(load(job)), as_json(job)
    assert ranks_read == [0, 1, 2]
    second = survey_ranks(load(job))
    assert as_json(job) == answer
    assert ranks_read == [0, 1, 2]
    assert second.comparison == first.comparison
    for one, other in zip(first.loads, second.loads, strict=True):
        assert (one.step == other.step).all() and (one.step_peak_bytes == other.step_peak_bytes).all()
        assert (one.rank, one.device, one.peak_bytes, one.bytes_by_category) == (
            other.rank, other.device, other.peak_bytes, other.bytes_by_category,
        )  # fmt: skip


def test_only_ranks_that_are_new_or_changed_are_read(job: Path, ranks_read: list[int]) -> None:
    compare_ranks(load(job))
    shutil.copytree(job / "rank=0", job / "rank=3", ignore=shutil.ignore_patterns(REPORT_NAME))
    manifest = json.loads((job / "rank=3" / "manifest.json").read_text())
    (job / "rank=3" / "manifest.json").write_text(json.dumps({**manifest, "rank": 3, "world_size": 4}))
    events = job / "rank=1" / "events-00000.parquet"
    events.write_bytes(events.read_bytes())
    ranks_read.clear()
    assert [summary.rank for summary in compare_ranks(load(job)).ranks] == [0, 1, 2, 3]
    assert ranks_read == [1, 3]


def test_a_running_recording_is_read_every_time(job: Path, ranks_read: list[int]) -> None:
    path = job / "rank=2" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "finished": False}))
    compare_ranks(load(job))
    compare_ranks(load(job))
    assert ranks_read == [0, 1, 2, 2]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff", b'{"version": [1, "x"]}', b"[" * 100_000],
    ids=["empty", "list", "text", "old", "deep"],
)
def test_a_damaged_report_is_made_again(job: Path, ranks_read: list[int], content: bytes) -> None:
    expected = compare_ranks(load(job))
    kept = (job / "rank=1" / REPORT_NAME).read_bytes()
    (job / "rank=1" / REPORT_NAME).write_bytes(content)
    ranks_read.clear()
    assert compare_ranks(load(job)) == expected
    assert ranks_read == [1]
    assert (job / "rank=1" / REPORT_NAME).read_bytes() == kept


def test_a_member_of_another_type_is_no_report(job: Path, ranks_read: list[int]) -> None:
    expected = compare_ranks(load(job))
    path = job / "rank=0" / REPORT_NAME
    stored = json.loads(path.read_text())
    stored["summary"]["peak_bytes"] = "\x1b[31mmany"
    path.write_text(json.dumps(stored))
    ranks_read.clear()
    assert compare_ranks(load(job)) == expected
    assert ranks_read == [0]


def test_a_folder_that_cannot_be_written_to_is_read_every_time(
    job: Path, ranks_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(rank_reports, "write_file", refuse)
    assert compare_ranks(load(job)) == compare_ranks(load(job))
    assert ranks_read == [0, 1, 2, 0, 1, 2]


def test_a_window_has_reports_of_its_own(job: Path) -> None:
    whole = compare_ranks(load(job))
    window = compare_ranks(load(job).window(1, 1))
    assert [summary.num_steps for summary in window.ranks] == [1, 1, 1]
    assert compare_ranks(load(job)) == whole
