"""Trains on two ranks with the DDP of pytorch_lightning: ``python lightning_ranks.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from memtrace.integrations.lightning import MemtraceCallback


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    data = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8)
    callback = MemtraceCallback(folder / "run.memtrace")
    assert isinstance(callback, pl.Callback)
    assert "lightning.pytorch" not in sys.modules
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=folder, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Model(), data)
