"""Training with libraries of others, each on a tiny model with random weights. Run where the library is installed."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch

from tests.programs.kinds import Result, kind_with
from tests.programs.kinds.common import state, train

warnings.filterwarnings("ignore", module="transformers|diffusers|pytorch_lightning|lightning|torch_geometric")


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))


@kind_with("transformers")
def transformers_gpt2() -> Result:
    model = _gpt2()
    tokens = torch.randint(50, (2, 12))
    return train(model, lambda: model(input_ids=tokens, labels=tokens).loss)


@kind_with("transformers")
def transformers_generation() -> Result:
    model = _gpt2().eval()
    return model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=True, pad_token_id=0)


@kind_with("transformers", "accelerate")
def transformers_trainer() -> Result:
    from transformers import Trainer, TrainingArguments

    model = _gpt2()
    samples = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", logging_steps=1, gradient_checkpointing=True,
        )  # fmt: skip
        losses = Trainer(model, arguments, train_dataset=samples).train()
    return [losses.training_loss, state(model)]


@kind_with("transformers", "peft")
def low_rank_adapters() -> Result:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        _gpt2(), LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    )
    tokens = torch.randint(50, (2, 12))
    return train(model, lambda: model(input_ids=tokens, labels=tokens).loss)


@kind_with("diffusers")
def diffusers_unet() -> Result:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=20)

    def loss() -> torch.Tensor:
        x, noise, time = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8), torch.randint(20, (2,))
        return (model(scheduler.add_noise(x, noise, time), time).sample - noise).square().mean()

    return train(model, loss)


@kind_with("accelerate")
def accelerate_loop() -> Result:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(16, 16), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@kind_with("torch_geometric")
def geometric_graph_network() -> Result:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    first, second = GCNConv(8, 16), GCNConv(16, 4)
    graphs = [Data(x=torch.randn(6, 8), edge_index=torch.randint(6, (2, 14))) for _ in range(3)]
    batch = Batch.from_data_list(graphs)

    def loss() -> torch.Tensor:
        hidden = first(batch.x, batch.edge_index).relu()
        return global_mean_pool(second(hidden, batch.edge_index), batch.batch).square().mean()

    return train(torch.nn.ModuleList([first, second]), loss)


@kind_with("pytorch_lightning")
def lightning_trainer() -> Result:
    import pytorch_lightning as lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    model = Model()
    loader = torch.utils.data.DataLoader(torch.randn(12, 16), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    return [trainer.global_step, state(model)]


@kind_with("stable_baselines3", "gymnasium")
def reinforcement_learning_library() -> Result:
    from stable_baselines3 import PPO

    agent = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, n_epochs=2, seed=1, device="cpu")
    agent.learn(64)
    return state(agent.policy)
