"""Costs of layers, stages and messages: the input of every pipeline simulation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from memtrace.errors import MemtraceError
from memtrace.format.storage import AnyPath, to_path


class SharedWeights(NamedTuple):
    """Weights that several layers use, such as a tied embedding.

    The first layer that uses them counts their bytes in its own fields, so its entry has zeros.
    """

    number: int
    """Identifies the weights: the same number in every layer that uses them."""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    optimizer_temporary_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Costs of one layer of a model. Times and activation bytes are for one micro-batch."""

    name: str
    forward_s: float
    backward_s: float
    """Input gradients and weight gradients together."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Kept from the forward pass until the backward pass."""
    output_bytes: int
    """Passed to the next layer: the size of the message if a stage ends with this layer."""
    weight_backward_s: float | None = None
    """The part of ``backward_s`` spent on weight gradients; None: half of it."""
    weight_activation_bytes: int | None = None
    """The part of ``activation_bytes`` that weight gradients need; None: all of it."""
    forward_temporary_bytes: int = 0
    """Peak during the forward pass, above the activations that it keeps."""
    backward_temporary_bytes: int = 0
    """Peak during the backward pass, above activations and gradients."""
    input_backward_temporary_bytes: int | None = None
    """Peak during a backward pass of the input only, which frees no activations on its way; None: the same as
    ``backward_temporary_bytes``."""
    largest_gradient_bytes: int = 0
    """The largest gradient of one parameter, which exists twice while it is accumulated; 0: accumulated in place."""
    first_backward_temporary_bytes: int | None = None
    """Peak during the first backward pass of a step, which allocates the weight gradients: ``backward_temporary_bytes``
    plus the gradients as they appear; None: all gradients on top of it."""
    unsaved_output_bytes: int = 0
    """The part of ``output_bytes`` that ``activation_bytes`` does not contain: a stage that ends with this layer keeps
    it in addition."""
    unsaved_model_output_bytes: int = 0
    """Last layer only: the part of ``model_output_bytes`` that autograd does not save."""
    model_output_bytes: int = 0
    """Last layer only: what the model passes to the loss function."""
    loss_bytes: int = 0
    """Last layer only: the loss, with the whole storage that it was reduced in."""
    batch_bytes: int = 0
    """First and last layer only: the part of the batch (inputs, targets) that the layer reads."""
    optimizer_temporary_bytes: int = 0
    """Temporaries of an optimizer that updates all parameters at once; they add up over the layers of a worker."""
    largest_optimizer_temporary_bytes: int = 0
    """Temporaries of an optimizer that updates one parameter at a time: only the largest of a worker counts."""
    shared: tuple[SharedWeights, ...] = ()
    """Weights shared with other layers. A stage without the first of these layers holds a copy of them."""


MAX_SECONDS: Final = 1e9
MAX_BYTES: Final = 1e13
"""Limit for one layer. Sums over layers, micro-batches and weight versions then stay far within 64 bits."""
_NUMBERS: Final = tuple(field.name for field in dataclasses.fields(LayerCosts) if field.name not in ("name", "shared"))
_REQUIRED: Final = tuple(field.name for field in dataclasses.fields(LayerCosts) if field.default is dataclasses.MISSING)
_DEFAULTS: Final[Mapping[str, Callable[[LayerCosts], Any]]] = {
    "weight_backward_s": lambda layer: layer.backward_s / 2,
    "weight_activation_bytes": lambda layer: layer.activation_bytes,
    "input_backward_temporary_bytes": lambda layer: layer.backward_temporary_bytes,
}


def layer_cost(layer: LayerCosts, field: str) -> Any:
    """The value of a field of ``layer``, with the documented default where the field is None."""
    value = getattr(layer, field)
    return _DEFAULTS[field](layer) if value is None else value


def read_layers(path: str | AnyPath) -> list[LayerCosts]:
    """Read layers from a JSON file: a list of objects with the fields of ``LayerCosts``, or {"layers": [...]}.

    Raises:
        MemtraceError: the file cannot be read, or a field is missing, unknown or invalid.
    """
    try:
        content = json.loads(to_path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MemtraceError(f"{path}: cannot read the layer costs: {error.strerror or error}") from error
    except ValueError as error:
        raise MemtraceError(f"{path}: not valid JSON: {error}") from error
    if isinstance(content, dict):
        content = content.get("layers")
    if not isinstance(content, list) or not content:
        raise MemtraceError(f"{path}: expected a list of layers, each with {', '.join(_REQUIRED)}")
    return [_parse_layer(entry, f"{path}, layer {number}") for number, entry in enumerate(content)]


def _parse_layer(entry: Any, where: str) -> LayerCosts:
    if not isinstance(entry, Mapping):
        raise MemtraceError(f"{where}: expected an object with {', '.join(_REQUIRED)}")
    missing = [name for name in _REQUIRED if name not in entry]
    if missing:
        raise MemtraceError(f"{where}: missing {', '.join(missing)}")
    unknown = [name for name in entry if name != "name" and name not in _NUMBERS]
    if unknown:
        raise MemtraceError(f"{where}: unknown field {', '.join(map(str, unknown))}")
    given = [name for name in _NUMBERS if name in _REQUIRED or entry.get(name) is not None]
    values = {name: _parse_number(entry[name], name, where) for name in given}
    layer = LayerCosts(name=str(entry["name"]), **values)
    if (layer.weight_backward_s or 0) > layer.backward_s:
        raise MemtraceError(f"{where}: weight_backward_s is larger than backward_s")
    if (layer.weight_activation_bytes or 0) > layer.activation_bytes:
        raise MemtraceError(f"{where}: weight_activation_bytes is larger than activation_bytes")
    return layer


def _parse_number(value: Any, name: str, where: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise MemtraceError(f"{where}: {name} must be a number >= 0, got {value!r}")
    limit = MAX_SECONDS if name.endswith("_s") else MAX_BYTES
    if value > limit:
        raise MemtraceError(f"{where}: {name} must be at most {limit:g}, got {value!r}")
    if name.endswith("_s"):
        return float(value)
    if int(value) != value:
        raise MemtraceError(f"{where}: {name} must be a whole number of bytes, got {value!r}")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of one stage of consecutive layers. Times and activation bytes are for one micro-batch.

    Fields without a docstring have the meaning of the field of ``LayerCosts`` with the same name.
    """

    forward_s: float
    input_backward_s: float
    weight_backward_s: float
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    weight_activation_bytes: int = 0
    """The activations that remain between the input backward pass and the weight backward pass."""
    input_bytes: int = 0
    """Received from the previous stage; all that is kept of a micro-batch under recomputation."""
    output_bytes: int = 0
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    input_backward_temporary_bytes: int = 0
    first_backward_temporary_bytes: int = 0
    unsaved_output_bytes: int = 0
    unsaved_model_output_bytes: int = 0
    model_output_bytes: int = 0
    loss_bytes: int = 0
    batch_bytes: int = 0
    optimizer_temporary_bytes: int = 0
    largest_optimizer_temporary_bytes: int = 0

    @property
    def backward_s(self) -> float:
        """Duration of a whole backward pass."""
        return self.input_backward_s + self.weight_backward_s

    @property
    def first_gradient_rise_bytes(self) -> int:
        """How much higher the peak of the first backward pass of a step is than that of later ones."""
        return max(0, self.first_backward_temporary_bytes - self.backward_temporary_bytes)


WEIGHT_FIELDS: Final = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "optimizer_temporary_bytes")
"""Fields that are summed over the layers of a stage and over the copies of shared weights."""
SUMMED_FIELDS: Final = ("activation_bytes", "weight_activation_bytes", "batch_bytes")
"""Fields that are summed over the layers of a stage."""
LARGEST_FIELDS: Final = ("input_backward_temporary_bytes", "largest_optimizer_temporary_bytes")
"""Fields of which a stage has the largest value of its layers."""
LAST_LAYER_FIELDS: Final = (
    "output_bytes", "unsaved_output_bytes", "unsaved_model_output_bytes", "model_output_bytes", "loss_bytes",
)  # fmt: skip
"""Fields that a stage takes from its last layer."""


def make_uniform_stages(
    num_stages: int,
    *,
    forward_s: float = 1.0,
    input_backward_s: float = 0.5,
    weight_backward_s: float = 0.5,
    **costs: int,
) -> list[StageCosts]:
    """Equal stages, as the papers draw them; ``costs`` are further fields of ``StageCosts``."""
    stage = StageCosts(
        forward_s=forward_s, input_backward_s=input_backward_s, weight_backward_s=weight_backward_s, **costs
    )
    return [stage] * num_stages


def combine_layers(layers: Sequence[LayerCosts], input_bytes: int = 0) -> StageCosts:
    """The costs of a stage made of ``layers``, which receives a message of ``input_bytes``."""
    weight_backward_s = [layer_cost(layer, "weight_backward_s") for layer in layers]
    weights: list[LayerCosts | SharedWeights] = [*layers, *_shared_copies(layers)]
    fields = {field: sum(getattr(holder, field) for holder in weights) for field in WEIGHT_FIELDS}
    fields |= {field: sum(layer_cost(layer, field) for layer in layers) for field in SUMMED_FIELDS}
    fields |= {field: max((layer_cost(layer, field) for layer in layers), default=0) for field in LARGEST_FIELDS}
    fields |= {field: layer_cost(layers[-1], field) if layers else 0 for field in LAST_LAYER_FIELDS}
    return StageCosts(
        forward_s=math.fsum(layer.forward_s for layer in layers),
        input_backward_s=math.fsum(
            layer.backward_s - weight_s for layer, weight_s in zip(layers, weight_backward_s, strict=True)
        ),
        weight_backward_s=math.fsum(weight_backward_s),
        input_bytes=input_bytes,
        forward_temporary_bytes=_forward_rise(layers),
        backward_temporary_bytes=max(backward_rises(layers, allocates_gradients=False), default=0),
        first_backward_temporary_bytes=max(backward_rises(layers, allocates_gradients=True), default=0),
        **fields,
    )


def _shared_copies(layers: Sequence[LayerCosts]) -> list[SharedWeights]:
    """The shared weights of the layers, each once: zeros where the first layer that uses them is among these."""
    copies: dict[int, SharedWeights] = {}
    for layer in layers:
        for weights in layer.shared:
            copies.setdefault(weights.number, weights)
    return list(copies.values())


def _forward_rise(layers: Sequence[LayerCosts]) -> int:
    """Peak of the forward pass above what the stage keeps when it ends."""
    kept, highest = 0, 0
    for layer in layers:
        kept += layer.activation_bytes
        highest = max(highest, kept + layer.forward_temporary_bytes)
    return highest - kept


def backward_rises(layers: Sequence[LayerCosts], *, allocates_gradients: bool) -> Iterator[int]:
    """Peak of the backward pass above the activations that it starts with.

    Yields one value for each stage that ends with the last of ``layers``: first the stage of the last layer alone, then
    the last two layers and so on.

    Args:
        layers: layers in forward order.
        allocates_gradients: whether this is the first backward pass of a step, which allocates the gradients.
    """
    level, highest = 0, 0
    shared_seen: set[int] = set()
    for layer in reversed(layers):
        allocated, above = 0, layer.backward_temporary_bytes + layer.largest_gradient_bytes
        if allocates_gradients:
            # The last layer that uses shared weights allocates their gradient, the others add to it.
            new = [weights for weights in layer.shared if weights.number not in shared_seen]
            shared_seen.update(weights.number for weights in new)
            allocated = layer.gradient_bytes + sum(weights.gradient_bytes for weights in new)
            above = layer.backward_temporary_bytes + allocated
            if layer.first_backward_temporary_bytes is not None:
                above = layer.first_backward_temporary_bytes
        highest = max(highest, level + above)
        level += allocated - layer.activation_bytes
        yield highest


def partition_costs(layers: Sequence[LayerCosts], first_layers: Sequence[int]) -> list[StageCosts]:
    """The costs of every stage when stage s begins with layer ``first_layers[s]``."""
    bounds = [*first_layers, len(layers)]
    return [
        combine_layers(layers[begin:end], layers[begin - 1].output_bytes if begin else 0)
        for begin, end in itertools.pairwise(bounds)
    ]


PROPORTIONAL_SECONDS: Final = ("forward_s", "backward_s", "weight_backward_s")
"""Fields of ``LayerCosts`` that grow with the micro-batch: times."""
PROPORTIONAL_BYTES: Final = (
    "activation_bytes", "weight_activation_bytes", "output_bytes", "unsaved_output_bytes", "unsaved_model_output_bytes",
    "model_output_bytes", "loss_bytes", "batch_bytes", "forward_temporary_bytes", "backward_temporary_bytes",
    "input_backward_temporary_bytes",
)  # fmt: skip
"""Fields of ``LayerCosts`` that grow with the micro-batch: bytes, without ``first_backward_temporary_bytes``, of which
only a part grows."""


def scale_microbatch(layers: Iterable[LayerCosts], factor: float) -> list[LayerCosts]:
    """The layers with a micro-batch ``factor`` times as large: times and activations grow in proportion."""
    return [_scale_layer(layer, factor) for layer in layers]


def _scale_layer(layer: LayerCosts, factor: float) -> LayerCosts:
    changes: dict[str, Any] = {}
    for name in PROPORTIONAL_SECONDS:
        value = getattr(layer, name)
        changes[name] = None if value is None else value * factor
    for name in PROPORTIONAL_BYTES:
        value = getattr(layer, name)
        changes[name] = None if value is None else math.ceil(value * factor)
    # The gradients that the first backward pass allocates do not depend on the micro-batch.
    if layer.first_backward_temporary_bytes is not None:
        added = layer.first_backward_temporary_bytes - layer.backward_temporary_bytes
        changes["first_backward_temporary_bytes"] = changes["backward_temporary_bytes"] + added
    return dataclasses.replace(layer, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Latency and bandwidth between workers: the cost model of messages and all-reduce (Chimera, section 3.4)."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    all_reduce_share: float = 0.0
    """Share of a worker's speed (0 to 1) that an all-reduce in progress takes from the computation beside it."""
    all_reduce_launch_s: float = 0.0
    """Seconds of computation that a worker loses by launching an all-reduce before its computation is done."""

    def message_s(self, num_bytes: float) -> float:
        """Seconds to send ``num_bytes`` from one worker to another."""
        return self.latency_s + self.seconds_per_byte * num_bytes

    def all_reduce_s(self, num_bytes: float, num_replicas: int) -> float:
        """Seconds to all-reduce ``num_bytes`` over ``num_replicas`` workers with Rabenseifner's algorithm."""
        if num_replicas < 2:
            return 0.0
        latency = 2 * math.log2(num_replicas) * self.latency_s
        return latency + 2 * (num_replicas - 1) * self.seconds_per_byte * num_bytes / num_replicas
