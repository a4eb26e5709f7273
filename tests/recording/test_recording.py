"""The recorder against ground truth: torch's own profiler, the live tensors, and the program without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.analysis.steps import step_columns
from memtrace.format.schema import CATEGORIES
from memtrace.recording.writer import PartWriter
from memtrace.trace import Trace
from tests.programs.kinds import PROGRAMS, Step, mlp, transformer


def recorded(step: Step, folder: Path, *, steps: int = 3, observer: str = "native", **options: object) -> Trace:
    with memtrace.record(folder / "run.memtrace", observer=observer, **options):
        for _ in range(steps):
            step()
    return memtrace.load(folder / "run.memtrace")


def bytes_of(trace: Trace, category: str) -> int:
    """Bytes of a category live at the end of the trace."""
    found = blocks(trace)
    chosen = (found.category == CATEGORIES.index(category)) & (found.free_event < 0)
    return int(found.size[chosen].sum())


def storages(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_allocations_are_those_of_torch_profiler(program, tmp_path):
    step = program()
    step()
    state = torch.get_rng_state()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    path = tmp_path / "profile.json"
    profile.export_chrome_trace(str(path))
    told = [
        event["args"]["Bytes"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"
    ]
    torch.set_rng_state(state)
    trace = recorded(step, tmp_path, steps=1)
    events = trace.events
    ours = Counter(events[events.kind == "alloc"]["size"].tolist())
    assert ours == Counter(size for size in told if size > 0)
    # The profiler leaves out frees of what is older than it.
    began = set(events[events.kind == "alloc"].block_id)
    mine = events[events.kind.isin(["alloc", "free"]) & events.block_id.isin(began)]
    changes = np.where(mine.kind == "alloc", mine["size"], -mine["size"]).astype(int)
    assert np.cumsum(changes).max() == np.cumsum(told).max()
    assert changes.tolist() == told


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_labelled_bytes_are_the_sums_over_live_tensors(observer, tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert bytes_of(trace, "parameter") == storages([*model.parameters(), *model.buffers()])
    assert bytes_of(trace, "gradient") == storages([p.grad for p in model.parameters()])
    assert bytes_of(trace, "optimizer_state") == storages(
        [t for state in optimizer.state.values() for t in state.values()]
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_results_are_bitwise_those_without_recording(program, observer, tmp_path):
    torch.manual_seed(1)
    step = program()
    plain = [step() for _ in range(3)]
    torch.manual_seed(1)
    step = program()
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        traced = [step() for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def _described(trace: Trace) -> tuple[Counter[object], Counter[object]]:
    """What lasts, with its category, reads and writes; and what passes. Sums of gradients and biases left out."""
    table, lasts, passes = blocks(trace), Counter(), Counter()
    for row in np.flatnonzero((table.alloc_event >= 0) & (table.op_name >= 0) & (table.size > 8)):
        name, size, category = (
            trace.name(int(table.op_name[row])),
            int(table.size[row]),
            CATEGORIES[table.category[row]],
        )
        if name.startswith(("aten::empty", "aten::add")):
            continue
        if category in ("temporary", "workspace", "unknown"):
            passes[name, size] += 1
        else:
            lasts[name, size, category, int(table.num_reads[row]), int(table.num_writes[row])] += 1
    return lasts, passes


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_observers_agree(program, tmp_path):
    """Blocks, sizes, categories, reads and writes, but for what DispatchObserver's docstring lists."""
    found = {}
    for observer in ("native", "dispatch"):
        torch.manual_seed(2)
        step = program()
        step()
        found[observer] = _described(recorded(step, tmp_path / observer, steps=2, observer=observer))
    assert found["native"][0] == found["dispatch"][0]
    assert not found["dispatch"][1] - found["native"][1]


def test_a_backward_block_has_its_forward_operators_module(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    trace = recorded(lambda: model(torch.randn(4, 64)).sum().backward(), tmp_path, steps=1)
    ops = trace.ops
    known = ops[(ops.phase == "backward") & ops.module.notna()]
    backward = {
        trace.name(int(op)): trace.name(int(module)) for op, module in zip(known.name, known.module, strict=True)
    }
    assert backward["aten::tanh_backward"] == "Sequential.1"
    frames = trace.frames(
        int(ops[ops.name.fillna(0).map(lambda n: trace.name(int(n))) == "aten::tanh_backward"]["stack"].iloc[0])
    )
    assert any("activation.py" in frame.file for frame in frames)


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_an_access_of_a_view_counts_for_its_base_and_a_view_is_no_access(observer, tmp_path):
    base = torch.zeros(1000)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        view = base[10:20].view(2, 5)
        view.add_(1)
        view.sum()
    trace = memtrace.load(tmp_path / "run.memtrace")
    found = blocks(trace)
    mine = np.flatnonzero(found.size == 4000)
    assert len(mine) == 1
    assert (found.num_reads[mine[0]], found.num_writes[mine[0]]) == (2, 1)


def test_steps_are_optimizer_steps_also_under_accumulation_and_with_two_optimizers(tmp_path):
    model = nn.Linear(8, 8)
    first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    with memtrace.record(tmp_path / "run.memtrace"):
        for _ in range(4):
            for _ in range(3):
                model(torch.randn(2, 8)).sum().backward()
            first.step()
            second.step()
    assert step_columns(memtrace.load(tmp_path / "run.memtrace")).step.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("observer", ["native", "dispatch"])
@pytest.mark.parametrize("flush_seconds", [5, 0.02])
def test_a_mark_after_several_optimizer_steps_ends_one_step(observer, flush_seconds, tmp_path):
    critic, maker = (torch.optim.SGD(nn.Linear(8, 8).parameters()) for _ in range(2))
    with memtrace.record(tmp_path / "run.memtrace", observer=observer, flush_seconds=flush_seconds) as rec:
        for _ in range(3):
            for _ in range(5):
                torch.randn(8)
                critic.step()
                time.sleep(0.01)
            maker.step()
            rec.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    columns = step_columns(trace)
    assert columns.step.tolist() == [0, 1, 2]
    assert columns.num_allocs.tolist() == [5, 5, 5]
    assert columns.start_ns[0] <= trace.columns("events", "time_ns")["time_ns"][0]
    spans = trace.spans
    assert (spans["kind"] == "step").sum() == 3
    assert (spans["kind"] != "step").sum() >= 18  # the ranges of the optimizers are all there


def test_marked_steps_time_the_wait_for_data(tmp_path):
    class Slow(torch.utils.data.IterableDataset):
        def __iter__(self):
            for _ in range(3):
                time.sleep(0.02)
                yield torch.randn(8)

    step = mlp()
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        for _ in rec.steps(DataLoader(Slow(), batch_size=None)):
            step()
    columns = step_columns(memtrace.load(tmp_path / "run.memtrace"))
    assert columns.step.tolist() == [0, 1, 2]
    assert (columns.data_wait_ns >= 20_000_000).all()


def test_a_loader_that_starts_slowly_is_waited_for_in_the_first_step(tmp_path):
    class Loader:
        def __iter__(self):
            time.sleep(0.3)
            return iter([torch.randn(8)] * 3)

    step = mlp()
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        for _ in rec.steps(Loader()):
            step()
    waits = step_columns(memtrace.load(tmp_path / "run.memtrace")).data_wait_ns
    assert waits[0] >= 300_000_000 > waits[1:].max()


def test_max_steps_ends_the_recording_and_the_program_goes_on(tmp_path):
    trace = recorded(mlp(), tmp_path, steps=6, max_steps=2)
    assert len(step_columns(trace).step) == 2
    assert trace.manifest.stop_reason == "max_steps reached"


def test_a_ring_keeps_the_last_steps_and_what_lives(tmp_path):
    step = transformer()
    whole = recorded(step, tmp_path / "whole", steps=3)
    with memtrace.record(tmp_path / "run.memtrace", last_steps=3, flush_seconds=0.05) as rec:
        for _ in range(40):
            step()
            time.sleep(0.01)
    trace = memtrace.load(rec.path)
    numbers = step_columns(trace).step
    assert numbers[-1] == 39
    assert 3 <= len(numbers) < 40
    assert compute_coverage(trace).dropped_events > 0
    assert bytes_of(trace, "parameter") == bytes_of(whole, "parameter")
    assert bytes_of(trace, "optimizer_state") == bytes_of(whole, "optimizer_state")


def test_an_exception_in_the_block_goes_on_and_the_trace_is_whole(tmp_path):
    with pytest.raises(ZeroDivisionError), memtrace.record(tmp_path / "run.memtrace"):
        mlp()()
        raise ZeroDivisionError
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert trace.manifest.finished
    assert "ZeroDivisionError" in trace.manifest.stop_reason


def test_the_variables_of_the_program_live_no_longer_than_without_a_recording(tmp_path):
    def told():
        model, variables = nn.Linear(8, 8), locals()
        model(torch.randn(4, 8))
        return variables

    def loop():
        model, gone = nn.Linear(8, 8), []
        for _ in range(3):
            made = torch.ones(64)
            gone.append(weakref.ref(made))
            model(torch.randn(4, 8)).sum().backward()
            del made
        return [one() is None for one in gone]

    with memtrace.record(tmp_path / "run.memtrace"):
        assert loop() == [True] * 3
        assert "model" in told()  # what the program asked for itself stays


def test_an_exception_in_a_module_does_not_leave_it_open(tmp_path):
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("broken on purpose")

    with memtrace.record(tmp_path / "run.memtrace"):
        with pytest.raises(ValueError, match="broken on purpose"):
            nn.Sequential(nn.Linear(4, 4), Broken())(torch.zeros(1, 4))
        torch.ones(1000)
    ops = memtrace.load(tmp_path / "run.memtrace").ops
    assert ops.iloc[-1].phase == "other"


def test_nested_and_repeated_recordings(tmp_path, caplog):
    step = mlp()
    for _ in range(2):
        with memtrace.record(tmp_path / "outer.memtrace"), memtrace.record(tmp_path / "inner.memtrace"):
            step()
    assert "becomes a range" in caplog.text
    trace = memtrace.load(tmp_path / "outer.memtrace")
    spans = trace.spans
    assert str(tmp_path / "inner.memtrace") in {
        trace.name(int(name)) for name in spans[spans.kind == "range"].name.dropna()
    }
    assert compute_coverage(memtrace.load(tmp_path / "outer-old1.memtrace")).num_steps == 1
    assert not (tmp_path / "inner.memtrace").exists()


def test_torch_profiler_runs_at_the_same_time(tmp_path):
    step = mlp()
    with (
        memtrace.record(tmp_path / "run.memtrace"),
        torch.profiler.profile(profile_memory=True, with_stack=True) as profile,
    ):
        step()
    assert len(profile.events()) > 0
    assert compute_coverage(memtrace.load(tmp_path / "run.memtrace")).num_steps == 1


def test_forked_workers_and_user_threads(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8, num_workers=1)
    model = nn.Linear(8, 8)

    def work() -> None:
        for _ in range(20):
            torch.randn(333).mul(2)

    with memtrace.record(tmp_path / "run.memtrace"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        for (batch,) in loader:
            model(batch).sum().backward()
    trace = memtrace.load(tmp_path / "run.memtrace")
    events, ops = trace.events, trace.ops
    assert (events[events["size"] == 333 * 4].kind == "alloc").sum() == 40
    names = ops[ops.thread == 1].name.dropna().map(lambda name: trace.name(int(name)))
    assert (names == "aten::mul.Tensor").sum() >= 19  # the first operator of a thread is not seen, its memory is


def test_numpy_memory_begins_when_it_is_seen_and_ends_when_it_is_gone(tmp_path):
    model = nn.Linear(1000, 2)
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.05):
        for _ in range(3):
            model(torch.from_numpy(np.random.default_rng(0).random((7, 1000), np.float32))).sum()
            time.sleep(0.2)
    found = blocks(memtrace.load(tmp_path / "run.memtrace"))
    mine = found.size == 28000
    assert mine.sum() == 3
    assert (found.alloc_event[mine] >= 0).all()
    assert (found.free_event[mine] >= 0).sum() >= 2


def test_fake_tensors_trace_a_model_larger_than_the_machine(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), memtrace.record(tmp_path / "run.memtrace") as rec:
        model = nn.Sequential(*(nn.Linear(65536, 65536, bias=False) for _ in range(8)))
        model(torch.randn(16, 65536)).sum().backward()
    trace = memtrace.load(rec.path)
    assert trace.manifest.source.observer == "dispatch"
    assert find_peak(trace, "cpu").requested.bytes > 8 * 65536**2 * 4 * 2
    assert bytes_of(trace, "parameter") == 8 * 65536**2 * 4


@contextmanager
def endless_recording(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that records into ``path`` until it is killed; it has written something already."""
    program = (
        "import memtrace, torch, sys\n"
        f"with memtrace.record({str(path)!r}, flush_seconds=0.2):\n"
        "    while True:\n"
        "        torch.randn(1000).mul(2); print('.', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.time() + 60
        while not list(path.glob("rank=0/events-*.parquet")):
            assert time.time() < deadline
            assert process.stdout is not None
            process.stdout.read(100)
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_process_leaves_a_trace_that_opens(tmp_path):
    with endless_recording(tmp_path / "run.memtrace") as process:
        os.kill(process.pid, signal.SIGKILL)
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert not compute_coverage(trace).finished
    assert compute_coverage(trace).num_events > 0


def test_a_trace_that_another_process_is_writing_stays_where_it_is(tmp_path, capsys):
    path = tmp_path / "run.memtrace"
    with endless_recording(path):
        for _ in range(2):
            with memtrace.record(path) as beside:
                mlp()()
            assert beside.path == tmp_path / "run-2.memtrace"
            assert "another process is recording" in capsys.readouterr().err
        assert not compute_coverage(memtrace.load(path)).finished
    with memtrace.record(path) as after:
        mlp()()
    assert after.path == path
    assert compute_coverage(memtrace.load(path)).finished
    kept = {folder.name: compute_coverage(memtrace.load(folder)).finished for folder in tmp_path.iterdir()}
    assert kept == {
        "run.memtrace": True, "run-old1.memtrace": False, "run-2.memtrace": True, "run-2-old1.memtrace": True,
    }  # fmt: skip


def test_children_forked_meanwhile_do_not_keep_the_place(tmp_path):
    path = tmp_path / "run.memtrace"
    asked, answer = os.pipe()
    with memtrace.record(path):
        mlp()()
        child = os.fork()
        if child == 0:
            os.read(asked, 1)
            os._exit(0)
    try:
        with memtrace.record(path) as again:
            mlp()()
        assert again.path == path
    finally:
        os.write(answer, b".")
        os.waitpid(child, 0)


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path, monkeypatch, caplog):
    step = mlp()
    appended = PartWriter.append

    def full(self: PartWriter, batch: dict[str, object]) -> None:
        appended(self, batch)
        if self.num_events > 200:
            raise OSError(28, "No space left on device")

    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.02):
        step()
        time.sleep(0.3)
        monkeypatch.setattr(PartWriter, "append", full)
        for _ in range(50):
            step()
            time.sleep(0.005)
    assert caplog.text.count("No space left on device") == 1
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert not compute_coverage(trace).finished
    assert compute_coverage(trace).num_events > 0


def test_an_unwritable_path_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("mine")
    with memtrace.record(tmp_path / "file" / "run.memtrace"):
        mlp()()
    assert "nothing is recorded" in caplog.text
    assert (tmp_path / "file").read_text() == "mine"


def test_a_foreign_folder_is_not_touched(tmp_path, caplog):
    (tmp_path / "run.memtrace" / "rank=0").mkdir(parents=True)
    (tmp_path / "run.memtrace" / "rank=0" / "thesis.txt").write_text("mine")
    with memtrace.record(tmp_path / "run.memtrace"):
        mlp()()
    assert "not a memtrace trace" in caplog.text
    assert [path.name for path in (tmp_path / "run.memtrace" / "rank=0").iterdir()] == ["thesis.txt"]


def test_compiled_models_train_the_same(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = torch.randn(4, 16)
    plain = compiled(batch)
    with memtrace.record(tmp_path / "run.memtrace"):
        traced = compiled(batch)
        traced.sum().backward()
    assert torch.equal(plain, traced)


def test_ddp_and_options_out_of_range(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with memtrace.record(tmp_path / "run.memtrace"):
            for _ in range(2):
                model(torch.randn(4, 16)).sum().backward()
                optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert "Linear.weight" in {trace.name(int(name)) for name in trace.labels.name.dropna()}
    with pytest.raises(memtrace.MemtraceError, match="max_steps=0"):
        memtrace.record(tmp_path / "x", max_steps=0)
