"""The callback of Lightning, against the real trainer."""

from __future__ import annotations

import copy
import csv
import logging
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memtrace
from memtrace.analysis import measure_step_memory, steps_table
from memtrace.errors import MemtraceError
from memtrace.integrations.lightning import MemtraceCallback
from memtrace.integrations.scalars import step_scalars
from memtrace.trace import Trace
from tests.integrations.helpers import range_names, steps_overlap_ranges

L = pytest.importorskip("lightning", reason="Lightning is not installed")
PROGRAM = Path(__file__).with_name("lightning_ranks.py")


class Regression(L.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        self.fail_at = fail_at

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise ValueError("bad batch")
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(num_batches: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(8 * num_batches, 64, generator=generator)
    return DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)


def fit(folder: Path, *callbacks: Any, fail_at: int | None = None, ckpt_path: Any = None, **options: Any) -> Any:
    """The trainer after ``fit`` of a fresh model with the same seed."""
    torch.manual_seed(7)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 2, "log_every_n_steps": 1} | options
    trainer = L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **quiet, **options)
    trainer.fit(Regression(fail_at), loader(6), loader(2), ckpt_path=ckpt_path)
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.lightning_module.parameters()]


def recorded(folder: Path) -> Trace:
    return memtrace.load(folder / "run.memtrace")


def test_a_fit_has_one_step_per_optimizer_step_and_validation_apart(tmp_path: Path) -> None:
    fit(tmp_path, MemtraceCallback(tmp_path / "run.memtrace"))
    trace = recorded(tmp_path)
    assert len(steps_table(trace)) == 12
    assert range_names(trace).count("validation") == 3  # the sanity check, and one for each epoch
    assert not steps_overlap_ranges(trace, "validation")
    assert trace.manifest.finished
    labels = trace.labels.merge(trace.names, left_on="name", right_on="id")
    assert {"net.0.weight", "net.2.bias"} <= set(labels["text"])


def test_training_is_bitwise_the_same_with_the_callback(tmp_path: Path) -> None:
    plain = weights(fit(tmp_path))
    followed = weights(fit(tmp_path, MemtraceCallback(tmp_path / "run.memtrace")))
    assert all(torch.equal(one, other) for one, other in zip(plain, followed, strict=True))


def test_accumulated_batches_belong_to_one_step(tmp_path: Path) -> None:
    fit(tmp_path, MemtraceCallback(tmp_path / "run.memtrace"), accumulate_grad_batches=3)
    assert len(steps_table(recorded(tmp_path))) == 4


def test_fast_dev_run_records_its_only_step(tmp_path: Path) -> None:
    fit(tmp_path, MemtraceCallback(tmp_path / "run.memtrace", log_scalars=True), fast_dev_run=True)
    assert len(steps_table(recorded(tmp_path))) == 1


def test_an_exception_closes_the_recording_and_reaches_the_program(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad batch"):
        fit(tmp_path, MemtraceCallback(tmp_path / "run.memtrace"), fail_at=4)
    trace = recorded(tmp_path)
    assert trace.manifest.finished
    assert "ValueError" in str(trace.manifest.stop_reason)
    assert len(steps_table(trace)) == 4


def test_a_resumed_run_continues_the_numbers_of_the_logged_steps(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    numbers: list[int] = []
    keep = {"enable_checkpointing": True}
    first = fit(tmp_path, ModelCheckpoint(tmp_path, "last"), MemtraceCallback(tmp_path / "run.memtrace"),
                max_epochs=1, **keep)  # fmt: skip
    assert first.global_step == 6
    resumed = fit(tmp_path, MemtraceCallback(tmp_path / "run.memtrace", sinks=[lambda step, _: numbers.append(step)]),
                  ckpt_path=tmp_path / "last.ckpt")  # fmt: skip
    assert resumed.global_step == 12
    assert numbers == [6, 7, 8, 9, 10, 11]
    assert len(steps_table(recorded(tmp_path))) == 6
    assert len(steps_table(memtrace.load(tmp_path / "run-old1.memtrace"))) == 6


def test_logged_scalars_are_those_of_the_analysis_under_the_steps_of_the_trainer(tmp_path: Path) -> None:
    logger = L.pytorch.loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fit(tmp_path, MemtraceCallback(tmp_path / "run.memtrace", log_scalars=True), logger=logger)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {int(row["step"]): float(row["memtrace/cpu/peak_bytes"]) for row in rows if row["memtrace/cpu/peak_bytes"]}
    expected = [step_scalars(memory)["memtrace/cpu/peak_bytes"] for memory in measure_step_memory(recorded(tmp_path))]
    assert logged == dict(enumerate(expected))
    assert set(logged) == {int(row["step"]) for row in rows if row["loss"]}


def test_a_failing_hook_warns_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemtraceCallback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any, **more: Any) -> None:
            trainer = object()  # as if Lightning had changed
            super().on_train_batch_end(trainer, pl_module, *batch, **more)

    plain = weights(fit(tmp_path))
    with caplog.at_level(logging.WARNING, logger="memtrace"):
        followed = weights(fit(tmp_path, Broken(tmp_path / "run.memtrace")))
    assert len([record for record in caplog.records if record.name == "memtrace"]) == 1
    assert all(torch.equal(one, other) for one, other in zip(plain, followed, strict=True))
    assert recorded(tmp_path).manifest.finished


def test_the_callback_is_one_of_lightning_and_can_be_copied(tmp_path: Path) -> None:
    callback = MemtraceCallback(tmp_path / "run.memtrace", last_steps=3)
    assert isinstance(callback, L.Callback)
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert isinstance(other, (MemtraceCallback, L.Callback))
        fit(tmp_path, other)
        assert recorded(tmp_path).manifest.finished


def test_a_wrong_option_is_reported_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="max_steps"):
        MemtraceCallback(tmp_path / "run.memtrace", max_steps=0)


@pytest.mark.slow
def test_each_rank_of_ddp_records_its_own_part_also_under_the_name_pytorch_lightning(tmp_path: Path) -> None:
    if find_spec("pytorch_lightning") is None:
        pytest.skip("pytorch_lightning is not installed")
    result = subprocess.run(
        [sys.executable, PROGRAM, tmp_path], capture_output=True, text=True, check=False, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    trace = recorded(tmp_path)
    assert trace.ranks == (0, 1)
    assert [len(steps_table(trace.rank(rank))) for rank in trace.ranks] == [4, 4]
    assert all(trace.rank(rank).manifest.finished for rank in trace.ranks)
