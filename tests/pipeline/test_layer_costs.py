"""Layer costs measured in a trace equal those of the model: summed tensors, and what autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cnn import CNN
from gpt import GPT, synthetic_text, train_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import memtrace
from memtrace.errors import TraceError
from memtrace.pipeline.costs import combine_layers, partition_costs
from memtrace.pipeline.layer_costs import MeasuredLayers, measure_layer_costs
from tests.builders import with_manifest

BATCH, LENGTH, WIDTH = 3, 32, 64


def record(
    path: Path,
    model: nn.Module,
    step: Callable[[torch.optim.Optimizer], None],
    steps: int = 4,
    *,
    foreach: bool = False,
) -> memtrace.Trace:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    with memtrace.record(path / "run.memtrace", model=model, optimizer=optimizer, stacks=False):
        for _ in range(steps):
            step(optimizer)
    return memtrace.load(path / "run.memtrace")


@pytest.fixture(scope="module")
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(width=WIDTH, layers=3, length=LENGTH)


@pytest.fixture(scope="module")
def measured(gpt: GPT, tmp_path_factory: pytest.TempPathFactory) -> MeasuredLayers:
    def step(optimizer: torch.optim.Optimizer) -> None:
        train_step(gpt, optimizer, synthetic_text(BATCH, LENGTH))

    return measure_layer_costs(record(tmp_path_factory.mktemp("gpt"), gpt, step))


def layer_modules(model: GPT) -> list[nn.Module]:
    return [model.tokens, model.positions, *model.blocks, model.norm, model.head]


def test_layers_are_the_blocks_and_the_modules_beside_them(measured: MeasuredLayers) -> None:
    names = ["tokens", "positions", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert [layer.name for layer in measured.layers] == names
    assert measured.step == 3 and measured.model.fresh_gradients


def test_model_state_is_the_sum_of_the_tensors(gpt: GPT, measured: MeasuredLayers) -> None:
    for layer, module in zip(measured.layers, layer_modules(gpt), strict=True):
        tensors = list(module.parameters())
        total = sum(tensor.nbytes for tensor in tensors)
        assert layer.parameter_bytes == layer.gradient_bytes == total
        # AdamW keeps two moments, and a 4-byte step count for every parameter.
        assert layer.optimizer_bytes == 2 * total + 4 * len(tensors)
        assert layer.largest_gradient_bytes == max(tensor.nbytes for tensor in tensors)


def saved_bytes(model: nn.Module, text: torch.Tensor) -> int:
    """Bytes of the storages that autograd saves in a forward, without parameters, buffers and batch."""
    excluded = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers(), text]}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            saved[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    assert loss.requires_grad
    return sum(size for size, _ in saved.values())


def test_activations_are_what_autograd_saves(gpt: GPT, measured: MeasuredLayers) -> None:
    text = synthetic_text(BATCH, LENGTH)
    # flatten() copies the target: 8 bytes per token belong to the batch, not to the activations.
    target = 8 * BATCH * LENGTH
    kept = sum(layer.activation_bytes for layer in measured.layers)
    assert kept == pytest.approx(saved_bytes(gpt, text), abs=2 * target)
    blocks = measured.layers[2:5]
    assert len({block.activation_bytes for block in blocks}) == 1


def test_the_output_of_a_layer_is_one_hidden_state(measured: MeasuredLayers) -> None:
    hidden = 4 * BATCH * LENGTH * WIDTH
    assert [layer.output_bytes for layer in measured.layers[1:-1]] == [hidden] * 5
    assert measured.layers[-1].output_bytes == 0
    # Autograd does not save the output of the embedding: a stage that ends there keeps it for its backward.
    assert measured.layers[0].unsaved_output_bytes == hidden


def test_batch_bytes_and_model_output_belong_to_the_first_and_last_layers(gpt: GPT, measured: MeasuredLayers) -> None:
    # Inputs and targets are views of one tensor, which is one token longer than each of them.
    assert [layer.batch_bytes for layer in measured.layers] == [BATCH * (LENGTH + 1) * 8, 0, 0, 0, 0, 0,
                                                                BATCH * (LENGTH + 1) * 8]  # fmt: skip
    logits = BATCH * LENGTH * gpt.head.out_features * 4
    assert [layer.model_output_bytes for layer in measured.layers] == [0] * 6 + [logits]
    assert measured.layers[-1].loss_bytes == 4


def test_loss_bytes_are_the_storage_that_the_loss_was_reduced_in(tmp_path: Path) -> None:
    model, inputs, targets = nn.Linear(8, 64), torch.rand(16, 8), torch.rand(16, 64)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    (layer,) = measure_layer_costs(record(tmp_path, model, step)).layers
    expected = nn.functional.mse_loss(model(inputs), targets).untyped_storage().nbytes()
    assert (layer.model_output_bytes, layer.loss_bytes) == (16 * 64 * 4, expected)
    assert layer.batch_bytes == inputs.nbytes + targets.nbytes


def test_times_are_positive_and_plausible(measured: MeasuredLayers) -> None:
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in measured.layers)
    assert all(0 < layer.forward_s + layer.backward_s < 5 for layer in measured.layers)


def test_patterns_choose_the_layers(gpt: GPT, tmp_path: Path) -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        train_step(gpt, optimizer, synthetic_text(BATCH, LENGTH))

    trace = record(tmp_path, gpt, step)
    whole = measure_layer_costs(trace)
    chosen = measure_layer_costs(trace, ("blocks.*.attention", "head"))
    assert [layer.name for layer in chosen.layers] == [*(f"blocks.{n}.attention" for n in range(3)), "head"]
    # Any choice of layers adds up to the whole model.
    for field in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"):
        total = sum(getattr(layer, field) for layer in chosen.layers)
        assert total == sum(getattr(layer, field) for layer in whole.layers)
    with pytest.raises(TraceError, match="no module called in a step matches nothing"):
        measure_layer_costs(trace, ("nothing",))


def test_the_layers_of_a_sequential_model_are_its_children(tmp_path: Path) -> None:
    model = CNN()

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(10, (4,)))
        loss.backward()
        optimizer.step()

    measured = measure_layer_costs(record(tmp_path, model, step))
    assert [layer.name for layer in measured.layers] == [*(f"features.{n}" for n in range(8)), "classifier"]
    convolution = measured.layers[0]
    assert convolution.output_bytes == 4 * 4 * 32 * 32 * 32
    # The running statistics of batch norm are buffers: they have no gradient and no optimizer state.
    norm = measured.layers[1]
    assert norm.gradient_bytes == 2 * 32 * 4 and norm.parameter_bytes == 4 * 32 * 4 + 8


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_temporaries_are_of_one_parameter_or_of_all(tmp_path: Path, foreach: bool) -> None:
    """Without foreach the largest parameter of a worker counts, with foreach all parameters count."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64), nn.Linear(64, 64), nn.Linear(64, 64))

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()

    layers = measure_layer_costs(record(tmp_path, model, step, foreach=foreach)).layers
    needed = [combine_layers(layers[begin:]) for begin in (0, 3)]
    whole = [sum(p.nbytes for p in model[begin:].parameters()) for begin in (0, 3)]
    if foreach:
        assert all(stage.largest_optimizer_temporary_bytes == 0 for stage in needed)
        assert needed[1].optimizer_temporary_bytes == pytest.approx(
            needed[0].optimizer_temporary_bytes * whole[1] / whole[0], abs=len(layers)
        )
    else:
        # AdamW's denominator and its square root, for the largest weight.
        assert [stage.optimizer_temporary_bytes for stage in needed] == [0, 0]
        for stage, largest in zip(needed, (4 * 64 * 1024, 4 * 64 * 64), strict=True):
            assert stage.largest_optimizer_temporary_bytes == pytest.approx(2 * largest, rel=0.01)


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_recomputed_and_not_another_microbatch(tmp_path: Path, reentrant: bool) -> None:
    model = Checkpointed(reentrant)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
        optimizer.step()

    measured = measure_layer_costs(record(tmp_path, model, step))
    layers = measured.layers
    assert [layer.name for layer in layers] == [f"blocks.{n}" for n in range(3)]
    assert [layer.gradient_bytes for layer in layers] == [layer.parameter_bytes for layer in layers]
    # The operators of a reentrant checkpoint have other sequence numbers.
    assert any("could be attributed to blocks.0, blocks.1," in note for note in measured.notes) == reentrant
    assert reentrant or all(layer.backward_s > 0 for layer in layers)
    hidden, inner = 4 * 16 * 32, 4 * 16 * 256
    # A block keeps the input of the next block; its recomputed activations live within its backward.
    assert [layer.activation_bytes for layer in layers[:2]] == [hidden, hidden]
    assert all(layer.backward_temporary_bytes >= inner for layer in layers[0 if not reentrant else 2 :])


class Tied(nn.Module):
    """A model whose head shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.head(self.middle(self.tokens(text)))
        assert isinstance(hidden, torch.Tensor)
        return hidden


def tied_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    optimizer.step()


def test_notes_mention_tied_weights_and_further_ranks(tmp_path: Path, measured: MeasuredLayers) -> None:
    model = Tied()
    trace = record(tmp_path, model, lambda optimizer: tied_step(model, optimizer)).rank(0)
    tied = measure_layer_costs(trace)
    (note,) = tied.notes
    assert note.startswith("head shares 1.00 KiB of parameters with tokens: a stage with it")
    # With two stages each has a copy; a single stage holds the weight once.
    for first_layers, expected in (([0, 1], [1024, 1024]), ([0, 2], [1024, 1024]), ([0], [1024])):
        stages = partition_costs(tied.layers, first_layers)
        middle = [[0, 288], [288, 0]][first_layers[-1] == 2] if len(stages) == 2 else [288]
        assert [stage.parameter_bytes for stage in stages] == [a + b for a, b in zip(expected, middle, strict=True)]
        assert [stage.gradient_bytes for stage in stages] == [stage.parameter_bytes for stage in stages]
        assert all(stage.optimizer_bytes >= 2 * stage.parameter_bytes for stage in stages)
    assert measure_layer_costs(with_manifest(trace, world_size=4)).notes[0].startswith("The trace is of one of 4 ranks")
    assert not any("of parameters with" in note for note in measured.notes)


def test_a_tied_gradient_is_no_temporary_of_the_layers_in_between(tmp_path: Path) -> None:
    """Autograd keeps the gradient of the head until the embedding adds to it; a stage in between holds neither."""
    model = Tied()
    trace = record(tmp_path, model, lambda optimizer: tied_step(model, optimizer))
    middle = measure_layer_costs(trace).layers[1]
    weight, hidden = 1024, 2 * 4 * 8 * 4
    assert middle.backward_temporary_bytes < weight and middle.backward_temporary_bytes >= hidden


def test_a_note_warns_about_times_of_fake_tensors(tmp_path: Path) -> None:
    with FakeTensorMode():
        model = Tied()
        notes = measure_layer_costs(record(tmp_path, model, lambda optimizer: tied_step(model, optimizer))).notes
    assert any("fake tensors" in note for note in notes)


def test_with_gradient_accumulation_the_costs_are_of_one_microbatch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(width=WIDTH, layers=2, length=LENGTH)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            text = synthetic_text(BATCH, LENGTH)
            logits = model(text[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()

    measured = measure_layer_costs(record(tmp_path, model, step))
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(layer.gradient_bytes for layer in measured.layers) == total
    kept = sum(layer.activation_bytes for layer in measured.layers)
    assert kept == pytest.approx(saved_bytes(model, synthetic_text(BATCH, LENGTH)), rel=0.01)


def test_a_trace_without_a_backward_is_rejected(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with memtrace.record(tmp_path / "run.memtrace", model=model):
        model(torch.randn(2, 4))
    with pytest.raises(TraceError, match="no step has module calls and a backward"):
        measure_layer_costs(memtrace.load(tmp_path / "run.memtrace"))
