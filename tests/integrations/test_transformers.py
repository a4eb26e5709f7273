"""The callback of Hugging Face's Trainer and the loop of Accelerate, against the real libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrace
from memtrace.analysis import measure_step_memory, steps_table
from memtrace.integrations.scalars import step_scalars
from memtrace.trace import Trace
from tests.integrations.helpers import range_names, steps_overlap_ranges

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its state in classes."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make_trainer(folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = model or transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (32, 16), generator=generator)]
    options = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_strategy": "no"} | options
    arguments = transformers.TrainingArguments(
        str(folder / "out"), use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no", **options
    )
    return transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks))


def callback(folder: Path, **options: Any) -> Any:
    from memtrace.integrations.transformers import MemtraceCallback

    return MemtraceCallback(folder / "run.memtrace", **options)


def recorded(folder: Path) -> Trace:
    return memtrace.load(folder / "run.memtrace")


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_training_has_one_step_per_optimizer_step_and_evaluation_apart(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, callback(tmp_path), eval_strategy="steps", eval_steps=3, gradient_accumulation_steps=2,
        num_train_epochs=2, save_strategy="steps", save_steps=4,
    )  # fmt: skip
    trainer.train()
    trace = recorded(tmp_path)
    assert len(steps_table(trace)) == 8
    num_evaluations = sum("eval_loss" in row for row in trainer.state.log_history)
    assert range_names(trace).count("validation") == num_evaluations >= 2
    assert not steps_overlap_ranges(trace, "validation")
    assert trace.manifest.finished
    labels = trace.labels.merge(trace.names, left_on="name", right_on="id")
    assert "transformer.h.0.attn.c_attn.weight" in set(labels["text"])


def test_training_is_bitwise_the_same_with_the_callback(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path)
    plain.train()
    followed = make_trainer(tmp_path, callback(tmp_path))
    followed.train()
    assert all(torch.equal(one, other) for one, other in zip(weights(plain), weights(followed), strict=True))
    assert plain.state.global_step == followed.state.global_step == 8


class Events(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Writes down the events of a training and what the trainer's state is at each of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool, bool]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.seen.append((name, state.global_step, control.should_evaluate, control.should_save))

        return event


def test_other_callbacks_get_the_same_events(tmp_path: Path) -> None:
    seen = []
    for callbacks in ([], [callback(tmp_path)]):
        events = Events()
        make_trainer(
            tmp_path, *callbacks, events, eval_strategy="steps", eval_steps=3, gradient_accumulation_steps=2,
            num_train_epochs=2, save_strategy="steps", save_steps=2,
        ).train()  # fmt: skip
        seen.append(events.seen)
    assert seen[0] == seen[1]
    order = [name for name, step, *_ in seen[0] if step == 0]
    assert order == [
        "on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step",
        "on_optimizer_step",
    ]  # fmt: skip


def test_sinks_get_the_scalars_of_the_analysis_under_the_global_step(tmp_path: Path) -> None:
    got: dict[int, dict[str, float]] = {}
    make_trainer(tmp_path, callback(tmp_path, sinks=[got.__setitem__])).train()
    assert got == {memory.step + 1: step_scalars(memory) for memory in measure_step_memory(recorded(tmp_path))}
    assert len(got) == 8


def test_an_evaluation_that_the_program_starts_itself_is_a_range(tmp_path: Path) -> None:
    class Evaluate(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if state.global_step == 2:
                trainer.evaluate()

    trainer = make_trainer(tmp_path, callback(tmp_path), Evaluate())
    trainer.train()
    assert range_names(recorded(tmp_path)).count("validation") == 1
    assert len(steps_table(recorded(tmp_path))) == 8


class FailingLoss(torch.nn.Module):
    """A model whose third forward pass fails."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.num_calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        if self.num_calls == 3:
            raise ValueError("bad batch")
        return {"loss": (self.weight * input_ids.float().mean()).sum()}


def test_an_exception_that_leaves_the_context_closes_the_recording(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad batch"), callback(tmp_path) as follower:
        make_trainer(tmp_path, follower, model=FailingLoss()).train()
    trace = recorded(tmp_path)
    assert trace.manifest.finished
    assert "ValueError" in str(trace.manifest.stop_reason)
    assert len(steps_table(trace)) == 2


def test_the_next_training_ends_the_recording_of_one_that_failed(tmp_path: Path) -> None:
    failed = callback(tmp_path)
    with pytest.raises(ValueError, match="bad batch"):
        make_trainer(tmp_path, failed, model=FailingLoss()).train()
    assert failed.adapter.is_recording
    (tmp_path / "next").mkdir()
    make_trainer(tmp_path, callback(tmp_path / "next")).train()
    assert not failed.adapter.is_recording
    assert len(steps_table(recorded(tmp_path))) == 2
    assert not any("recorded inside" in note for note in recorded(tmp_path / "next").manifest.coverage.notes)


def test_a_resumed_training_logs_the_steps_that_follow_the_checkpoint(tmp_path: Path) -> None:
    numbers: list[int] = []
    make_trainer(tmp_path, save_strategy="steps", save_steps=5).train()
    resumed = make_trainer(tmp_path, callback(tmp_path, sinks=[lambda step, _: numbers.append(step)]))
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert numbers == [6, 7, 8]


def accelerated_loop(folder: Path | None, **options: Any) -> list[torch.Tensor]:
    """The parameters after a loop of eight batches, with gradients of two batches accumulated."""
    from memtrace.integrations.accelerate import record

    torch.manual_seed(7)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    data = torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)

    def train(recording: Any) -> None:
        for number, batch in enumerate(data):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if recording is not None:
                recording.step()
                if number == 3:
                    with recording.validation(), torch.no_grad():
                        model(batch)

    if folder is None:
        train(None)
    else:
        with record(accelerator, folder / "run.memtrace", model=model, **options) as recording:
            train(recording)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_loop_of_accelerate_has_a_step_for_every_synchronization_of_gradients(tmp_path: Path) -> None:
    plain, followed = accelerated_loop(None), accelerated_loop(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(plain, followed, strict=True))
    trace = recorded(tmp_path)
    assert len(steps_table(trace)) == 4
    assert range_names(trace).count("validation") == 1
    assert not steps_overlap_ranges(trace, "validation")


def test_the_trackers_of_an_accelerator_get_the_scalars(tmp_path: Path) -> None:
    got: dict[int, dict[str, float]] = {}

    class Tracker(accelerate.tracking.GeneralTracker):  # type: ignore[misc, name-defined]
        name = "test"
        requires_logging_directory = False

        @property
        def tracker(self) -> None:
            return None

        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            assert step is not None
            got[step] = values

    from memtrace.integrations.accelerate import record

    accelerator = accelerate.Accelerator(cpu=True, log_with=[Tracker()])
    accelerator.init_trackers("test")
    model, optimizer = torch.nn.Linear(8, 8), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with record(accelerator, tmp_path / "run.memtrace", log_scalars=True) as recording:
        for _ in range(3):
            accelerator.backward(model(torch.randn(4, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
            recording.step()
    assert got == {memory.step: step_scalars(memory) for memory in measure_step_memory(recorded(tmp_path))}
    assert sorted(got) == [0, 1, 2]
