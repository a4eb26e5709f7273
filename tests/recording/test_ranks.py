"""The ranks of one job: recorded for real over gloo, and by hand."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from memtrace.cli import cli

import memtrace
from memtrace.analysis import compute_coverage, steps_table
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.ranks import compare_ranks, ranks_table
from memtrace.errors import TraceError
from memtrace.format.manifest import Manifest
from memtrace.recording import output_dir as place
from memtrace.recording.clock import ClockAligner, ClockExchange
from memtrace.recording.output_dir import keep_older_trace, move_place, take_place
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of, with_manifest

PROGRAM = Path(__file__).parents[1] / "programs" / "ranks.py"
SNAPSHOTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "snapshots"
PARAMETER_BYTES = 4 * (64 * 256 + 256 + 256 * 64 + 64)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def torchrun(processes: int, *arguments: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += [f"--master-port={free_port()}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


# -- recorded ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> Path:
    """Four ranks under torchrun, the program unchanged; rank 2 has by far the largest batch."""
    path = tmp_path_factory.mktemp("ddp") / "job.memtrace"
    torchrun(4, "-m", "memtrace.cli", "record", "-o", path, PROGRAM, "ddp")
    return path


def test_every_rank_records_into_its_part_of_one_trace(ddp):
    trace = memtrace.load(ddp)
    assert trace.ranks == (0, 1, 2, 3)
    for number in trace.ranks:
        manifest = trace.rank(number).manifest
        assert (manifest.rank, manifest.world_size, manifest.finished) == (number, 4, True)
        assert len(steps_table(trace.rank(number))) == 4


def test_clocks_are_aligned_to_what_one_machine_shows(ddp):
    """On one machine the wall clock is the same for all, so it is the truth of when each recording began."""
    trace = memtrace.load(ddp)
    begins = [trace.rank(number).manifest.t0_epoch_ns for number in trace.ranks]
    for number in trace.ranks[1:]:
        clock = trace.rank(number).manifest.clock
        wrong = abs(clock.offset_ns - (begins[number] - begins[0]))
        assert wrong <= clock.error_ns + 200_000  # reading two clocks to tell t0_epoch_ns is not exact either
        assert clock.error_ns < 50_000_000
        assert clock.drift_ns is not None and abs(clock.drift_ns) < 50_000_000


def test_ranks_of_a_data_parallel_job(ddp):
    found = compare_ranks(memtrace.load(ddp))
    assert found.missing_ranks == ()
    assert [row.bytes_by_category["parameter"] for row in found.ranks] == [PARAMETER_BYTES] * 4
    assert (found.rank_to_inspect, found.slowest_rank) == (2, 2)
    peaks = [row.peak_bytes for row in found.ranks]
    assert peaks[0] == peaks[1] == peaks[3] < peaks[2]
    assert found.imbalance == pytest.approx(4 * peaks[2] / sum(peaks))
    shown = CliRunner().invoke(cli, ["ranks", str(ddp)])
    assert shown.exit_code == 0, shown.output
    assert "Inspect rank 2 first" in shown.output
    given = json.loads(CliRunner().invoke(cli, ["ranks", str(ddp), "--json"]).output)
    assert [row["peak_bytes"] for row in given["ranks"]] == peaks
    assert given["rank_to_inspect"] == 2
    assert list(ranks_table(memtrace.load(ddp))["peak_bytes"]) == peaks


def test_a_killed_rank_does_not_spoil_the_others(tmp_path):
    """No agent ends the other ranks here: rank 1 is killed with SIGKILL, the rest see their connections break."""
    path = tmp_path / "job.memtrace"
    port = str(free_port())
    processes = []
    for rank in range(4):
        place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(PROGRAM), "kill", str(path)]
        processes.append(subprocess.Popen(command, env=os.environ | place, stderr=subprocess.DEVNULL))
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes[1] == -9
    trace = memtrace.load(path)
    assert trace.ranks == (0, 1, 2, 3)
    assert not compute_coverage(trace.rank(1)).finished
    assert len(steps_table(trace.rank(1))) >= 1
    for number in (0, 2, 3):
        covered = compute_coverage(trace.rank(number))
        assert covered.finished and "left the recorded block" in (covered.stop_reason or "")
    found = compare_ranks(trace)
    assert all(row.peak_bytes for row in found.ranks)
    assert found.rank_to_inspect == 1
    assert "ended before the others" in found.reason


def test_sharded_tensors_are_told_apart(tmp_path):
    """FSDP2: each rank holds half of the parameters and of the optimizer's state, and memtrace knows them."""
    torchrun(2, PROGRAM, "fsdp", tmp_path / "job.memtrace")
    trace = memtrace.load(tmp_path / "job.memtrace")
    held = {"parameter": 0, "optimizer_state": 0}
    for number in trace.ranks:
        found = blocks(trace.rank(number))
        gradients = found.size[found.category == CATEGORY["gradient"]]
        assert gradients.sum() == 4 * PARAMETER_BYTES // 2  # four steps
        row = compare_ranks(trace).ranks[number]
        for category in held:
            held[category] += row.bytes_by_category[category]
        # Buffers of a gather or a reduction that is under way at the peak are all that is left.
        assert row.bytes_by_category.get("unknown", 0) < 0.2 * row.peak_bytes
    assert held["parameter"] == PARAMETER_BYTES
    # Two moments of every parameter, and a step count of 4 bytes for each of 4 parameters on each rank.
    assert held["optimizer_state"] == 2 * PARAMETER_BYTES + 2 * 4 * 4


# -- by hand -------------------------------------------------------------------------------------------------


def job(*sources: Trace, world_size: int | None = None) -> Trace:
    numbered = [
        with_manifest(source, rank=number, world_size=world_size or len(sources))
        for number, source in enumerate(sources)
    ]
    return Trace(None, {number: trace._source for number, trace in enumerate(numbered)})


def rank_of(peak: int, works: int = 10, **more: Any) -> Trace:
    events = [event("alloc", 0, 5, peak, op_id=0), event("free", 0, 90, peak), *more.pop("events", [])]
    return trace_of(
        events=events,
        ops=[op(0, "forward", name=0) | {"start_ns": 2, "duration_ns": works}],
        names=[{"id": 0, "kind": "operator", "text": "aten::mm"}],
        spans=[step(0, 0, 100)],
    )


def test_alike_ranks_are_said_to_be_alike():
    found = compare_ranks(job(rank_of(100), rank_of(102), rank_of(101)))
    assert (found.rank_to_inspect, found.slowest_rank) == (1, None)
    assert "no rank stands out" in found.reason
    assert found.imbalance == pytest.approx(102 / 101)


def test_the_slowest_is_who_works_longest_in_a_step():
    found = compare_ranks(job(rank_of(100), rank_of(100, works=30), rank_of(100)))
    assert [row.compute_ns for row in found.ranks] == [10, 30, 10]
    assert found.slowest_rank == found.rank_to_inspect == 1


def test_the_first_of_several_deaths_is_to_blame():
    """The agent of a job kills the other ranks when one dies."""
    killed, culprit = (with_manifest(rank_of(100), finished=False, t0_epoch_ns=begun) for begun in (2000, 1000))
    found = compare_ranks(job(killed, rank_of(100), culprit))
    assert found.rank_to_inspect == 2
    assert found.ranks[0].ended_epoch_ns - found.ranks[2].ended_epoch_ns == 1000


def test_out_of_memory_comes_before_a_death_and_that_before_imbalance():
    dead, oom = rank_of(100), rank_of(50, events=[event("oom", None, 95, 1000)])
    dead = with_manifest(dead, finished=False)
    assert compare_ranks(job(rank_of(100), dead, oom, rank_of(900))).rank_to_inspect == 2
    assert compare_ranks(job(rank_of(100), dead, rank_of(900))).rank_to_inspect == 1
    assert compare_ranks(job(rank_of(100), rank_of(900))).rank_to_inspect == 1


def test_a_rank_that_wrote_nothing_is_missing(ddp, tmp_path):
    """Its disk was full, or it died before its manifest was written."""
    path = tmp_path / "job.memtrace"
    shutil.copytree(ddp, path)
    (path / "rank=2" / "manifest.json").unlink()
    found = compare_ranks(memtrace.load(path))
    assert [row.rank for row in found.ranks] == [0, 1, 3]
    assert found.missing_ranks == (2,)


def test_a_rank_with_a_truncated_manifest_does_not_spoil_the_others(ddp, tmp_path):
    path = tmp_path / "job.memtrace"
    shutil.copytree(ddp, path)
    manifest = path / "rank=2" / "manifest.json"
    manifest.write_text(manifest.read_text()[:40])
    trace = memtrace.load(path)
    assert trace.ranks == (0, 1, 3)
    assert any("rank 2 is left out" in note and str(manifest) in note for note in compute_coverage(trace.rank(1)).notes)
    found = compare_ranks(trace)
    assert [row.rank for row in found.ranks] == [0, 1, 2, 3] and found.missing_ranks == ()
    assert str(manifest) in (found.ranks[2].problem or "") and found.ranks[2].peak_bytes is None
    assert found.rank_to_inspect in trace.ranks
    shown = " ".join(CliRunner().invoke(cli, ["ranks", str(path)]).output.split())
    assert "Rank 2: " in shown and "cannot be read" in shown
    checked = CliRunner().invoke(cli, ["check", str(path), "--max-peak", "1TiB"])
    assert checked.exit_code == 1 and "cannot be read" in str(checked.exception)
    for wrong in (lambda: trace.rank(2), lambda: memtrace.load(path / "rank=2")):
        with pytest.raises(TraceError, match="cannot be read"):
            wrong()


def test_missing_and_unreadable_ranks_are_named():
    class Damaged:
        def __init__(self) -> None:
            self.manifest = Manifest(world_size=4)

        def num_rows(self, table: str) -> int:
            return 1

        def read(self, table: str, columns: tuple[str, ...]) -> list[Any]:
            raise TraceError("events-00000.parquet is damaged")

        def notes(self) -> list[str]:
            return []

    good = with_manifest(rank_of(100), world_size=4)
    found = compare_ranks(Trace(None, {0: good._source, 3: Damaged()}))
    assert found.missing_ranks == (1, 2)
    assert found.ranks[0].peak_bytes == 100
    assert found.ranks[1].peak_bytes is None
    assert "damaged" in (found.ranks[1].problem or "")


def test_several_foreign_files_are_ranks_too():
    files = [SNAPSHOTS / name for name in ("complete_small.pickle", "synthetic.pickle",
                                           "transformer_training_step.pickle", "expandable_segments.pickle")]  # fmt: skip
    if not all(file.is_file() for file in files):
        pytest.skip("the snapshots of ../shared/data are not here")
    shown = CliRunner().invoke(cli, ["ranks", *map(str, files), "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    alone = [compare_ranks(memtrace.load(file)).ranks[0].peak_bytes for file in files]
    assert [row["peak_bytes"] for row in found["ranks"]] == alone
    assert found["rank_to_inspect"] == alone.index(max(alone))


# -- clocks --------------------------------------------------------------------------------------------------


def test_offsets_are_found_over_a_store():
    store = torch.distributed.HashStore()
    skews = {0: 0, 1: 5_000_000_000, 2: -3_000_000_000}

    def clock(rank: int) -> ClockExchange:
        return ClockExchange(store, rank, lambda: time.perf_counter_ns() + skews[rank], "test")

    served = []
    server = threading.Thread(target=lambda: served.append(clock(0).tell(2, lambda: False)))
    server.start()
    found = {rank: clock(rank).ask(lambda: False) for rank in (2, 1)}
    server.join()
    assert served == [2]
    for rank, offset in found.items():
        assert abs(offset.offset_ns + skews[rank]) <= offset.error_ns < 100_000_000


def test_nobody_waits_for_a_rank_that_does_not_record():
    store = torch.distributed.HashStore()
    deadline = time.monotonic() + 0.2
    late = lambda: time.monotonic() > deadline  # noqa: E731
    assert ClockExchange(store, 1, time.perf_counter_ns, "alone").ask(late) is None
    assert ClockExchange(store, 0, time.perf_counter_ns, "nobody").tell(3, late) == 0
    aligner = ClockAligner("no group", 1, time.perf_counter_ns)
    aligner.start()
    told = aligner.stop()
    assert told["offset_ns"] is None
    assert "never joined" in told["note"]


LATE = """
import sys, torch, memtrace
import torch.distributed as dist
with memtrace.record(sys.argv[1]):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[3]), world_size=3)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.randn(8, 8)).sum().backward()
        optimizer.step()
        dist.barrier()
    dist.destroy_process_group()
"""


def test_processes_that_join_their_job_while_they_record_end_up_in_one_trace(tmp_path):
    path, port = tmp_path / "job.memtrace", free_port()
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    for _ in range(2):
        started = [
            subprocess.Popen([sys.executable, "-c", LATE, str(path), str(port), str(rank)], env=environment)
            for rank in (2, 1, 0)
        ]
        assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["job-old1.memtrace", "job.memtrace"]
    for folder in tmp_path.iterdir():
        trace = memtrace.load(folder)
        assert trace.ranks == (0, 1, 2)
        told = [trace.rank(number).manifest for number in trace.ranks]
        assert [(one.command[3], one.rank, one.world_size) for one in told] == [
            ("0", 0, 3), ("1", 1, 3), ("2", 2, 3),
        ]  # fmt: skip
        # The clocks are looked at; on a busy machine so short a job may be over before they are tied.
        assert all(one.finished and one.clock.reference_rank == 0 for one in told)


def test_a_place_that_stays_taken_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "WAIT_SECONDS", 0.1)
    first, second = (take_place(tmp_path / "job.memtrace", 0, 1) for _ in range(2))
    (first.folder / "manifest.json").write_text("{}")
    assert (first.trace.name, second.trace.name) == ("job.memtrace", "job-2.memtrace")
    assert not move_place(second, first.trace, 0)
    assert move_place(second, first.trace, 1)
    assert second.folder == first.trace / "rank=1"
    assert [folder.name for folder in tmp_path.iterdir()] == ["job.memtrace"]


def test_ranks_of_an_earlier_larger_job_are_moved_away(tmp_path, capsys):
    trace = tmp_path / "job.memtrace"
    for number in range(4):
        (trace / f"rank={number}").mkdir(parents=True)
        (trace / f"rank={number}" / "manifest.json").write_text("{}")
    keep_older_trace(trace / "rank=0", world_size=2)
    keep_older_trace(trace / "rank=1")
    assert not trace.exists() or not list(trace.iterdir())
    assert sorted(path.name for path in (tmp_path / "job-old1.memtrace").iterdir()) == [
        "rank=0", "rank=1", "rank=2", "rank=3",
    ]  # fmt: skip
    assert "is now" in capsys.readouterr().err
