"""The models that the pipeline papers measure, as layers with exact parameters and messages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from memtrace.pipeline.costs import LayerCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a transformer: an embedding, equal blocks and a head."""

    num_blocks: int
    hidden: int
    num_heads: int
    sequence: int
    embedding_parameters: int
    head_parameters: int
    mask_elements: int = 0
    """Elements sent with every sequence in addition to the hidden states, for example an attention mask."""

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: attention and feed-forward with biases, and two layer norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    def message_elements(self, microbatch: int) -> int:
        """Elements sent from one stage to the next for a micro-batch of ``microbatch`` sequences."""
        return microbatch * (self.sequence * self.hidden + self.mask_elements)

    def block_activation_bytes(self, microbatch: int) -> int:
        """Activations of one block in 16-bit precision without recomputation: s b h (34 + 5 a s / h)."""
        elements = self.sequence * microbatch
        return 34 * elements * self.hidden + 5 * self.num_heads * self.sequence * elements

    def eager_block_activation_bytes(self, microbatch: int) -> int:
        """Activations of one block in 32-bit precision with a GELU and a layer norm that are written in Python.

        That is how the code of the Chimera paper has them (transformers/modeling.py in its repository). In bytes per
        token and hidden element: inputs of the linear layers 28, query, key and value 12, two dropout masks 2, three
        tensors of the GELU 48, and two of each layer norm 16; per attention score 9: softmax, mask and dropout.
        """
        elements = self.sequence * microbatch
        return 106 * elements * self.hidden + 9 * self.num_heads * self.sequence * elements


BERT_48: Final = Transformer(
    num_blocks=48,
    hidden=1024,
    num_heads=16,
    sequence=128,
    # Words, positions, segments and layer norm.
    embedding_parameters=(30522 + 512 + 2) * 1024 + 2 * 1024,
    # Pooler; transform with layer norm; decoder with its own bias; next-sentence classifier.
    head_parameters=2 * (1024**2 + 1024) + 2 * 1024 + 30522 * 1024 + 30522 + 2 * 1024 + 2,
    mask_elements=128,
)
"""BERT with 48 blocks, as in the Chimera paper."""
GPT_2: Final = Transformer(
    num_blocks=64,
    hidden=1280,
    num_heads=20,
    sequence=632,
    embedding_parameters=(50257 + 1024) * 1280,
    # Final layer norm; decoder without a bias, not tied to the embedding.
    head_parameters=2 * 1280 + 50257 * 1280,
)
"""GPT-2 with 64 blocks, as in the Chimera paper."""


def transformer_layers(
    model: Transformer,
    microbatch: int,
    *,
    flops: float,
    parameter_width: int = 4,
    optimizer_words: int = 2,
    message_width: int = 4,
) -> list[LayerCosts]:
    """Make the layers of ``model``: embedding, blocks and head.

    Args:
        model: the sizes.
        microbatch: sequences per micro-batch.
        flops: floating-point operations per second of one worker; a token takes 2 per parameter, plus attention.
        parameter_width: bytes per parameter and per element of its gradient.
        optimizer_words: elements of that width that the optimizer keeps per parameter; Adam keeps 2.
        message_width: bytes per element of a message.
    """
    tokens = microbatch * model.sequence
    attention = 4 * tokens * model.sequence * model.hidden
    message = model.message_elements(microbatch) * message_width

    def layer(name: str, parameters: int, work: float, activation_bytes: int) -> LayerCosts:
        return LayerCosts(
            name=name,
            forward_s=work / flops,
            backward_s=2 * work / flops,
            parameter_bytes=parameters * parameter_width,
            gradient_bytes=parameters * parameter_width,
            optimizer_bytes=parameters * parameter_width * optimizer_words,
            activation_bytes=activation_bytes,
            output_bytes=message,
        )

    block = 2.0 * tokens * model.block_parameters + attention
    return [
        layer("embedding", model.embedding_parameters, 0.0, 2 * tokens * model.hidden),
        *(
            layer(f"blocks.{n}", model.block_parameters, block, model.block_activation_bytes(microbatch))
            for n in range(model.num_blocks)
        ),
        layer("head", model.head_parameters, 2.0 * tokens * model.head_parameters, 2 * tokens * model.hidden),
    ]


def chimera_paper_layers(model: Transformer, microbatch: int, *, flops: float) -> list[LayerCosts]:
    """The layers of ``model`` as the Chimera paper measures them: one per block, in 32-bit precision with Adam.

    The embedding belongs to the first block and the head to the last one, so that equal numbers of layers are the
    paper's stages.
    """
    activation_bytes = model.eager_block_activation_bytes(microbatch)
    embedding, *blocks, head = transformer_layers(model, microbatch, flops=flops)
    blocks = [dataclasses.replace(block, activation_bytes=activation_bytes) for block in blocks]
    return [_merge(embedding, blocks[0]), *blocks[1:-1], _merge(head, blocks[-1])]


def _merge(end: LayerCosts, block: LayerCosts) -> LayerCosts:
    return dataclasses.replace(
        block,
        forward_s=block.forward_s + end.forward_s,
        backward_s=block.backward_s + end.backward_s,
        parameter_bytes=block.parameter_bytes + end.parameter_bytes,
        gradient_bytes=block.gradient_bytes + end.gradient_bytes,
        optimizer_bytes=block.optimizer_bytes + end.optimizer_bytes,
        activation_bytes=block.activation_bytes + end.activation_bytes,
    )
