"""What a layer, a stage and a message cost: the numbers that schedules are simulated with."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from memtrace.errors import MemtraceError


class Shared(NamedTuple):
    """Weights that several layers use. The bytes of the first of them have them already: its entry says 0."""

    number: int
    """The same for all users."""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    optimizer_temporary_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a model; seconds and activation bytes are of one micro-batch.

    What is not known of a layer's finer costs (None) is taken as the docstring of the field says.
    """

    name: str
    forward_s: float
    backward_s: float
    """Gradients of the input and of the weights together."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Kept from forward until backward."""
    output_bytes: int
    """Handed to the next layer: the message if a cut lies behind this layer."""
    weight_backward_s: float | None = None
    """The part of ``backward_s`` that weight gradients take; None: half."""
    weight_activation_bytes: int | None = None
    """The part of ``activation_bytes`` that weight gradients need; None: all of it."""
    forward_temporary_bytes: int = 0
    """Alive within the forward only, at its highest above what is kept."""
    backward_temporary_bytes: int = 0
    """Alive within the backward only, at its highest above activations and gradients."""
    input_backward_temporary_bytes: int | None = None
    """As ``backward_temporary_bytes``, for an input backward, which gives up no activations on its way; None: the
    same."""
    largest_gradient_bytes: int = 0
    """The gradient of one parameter while it is added to what earlier micro-batches gave; 0: added in
    place."""
    first_backward_temporary_bytes: int | None = None
    """As ``backward_temporary_bytes``, with the gradients of the weights as they come to be allocated, in a
    step that begins without them; None: all gradients on top of it."""
    unsaved_output_bytes: int = 0
    """The part of ``output_bytes`` that is not in ``activation_bytes``: a stage that ends here keeps it as
    well."""
    result_bytes: int = 0
    """Of the last layer: what it hands to the loss and no backward keeps."""
    handed_bytes: int = 0
    """Of the last layer: all that it hands to the loss, kept by a backward or not."""
    loss_bytes: int = 0
    """Of the last layer: the loss, with the storage that it was reduced in."""
    batch_bytes: int = 0
    """Of the first and the last layer: the part of the batch (inputs, targets) that it reads."""
    optimizer_temporary_bytes: int = 0
    """Alive within the optimizer's step only; adds up over the layers of a worker."""
    largest_optimizer_temporary_bytes: int = 0
    """Alive while the optimizer is at one parameter only: of the layers of a worker the largest counts."""
    shared: tuple[Shared, ...] = ()
    """A stage without the first user of shared weights holds a copy of them."""


MOST_SECONDS: Final = 1e9
MOST_BYTES: Final = 1e13
"""Of one layer. Sums over layers, micro-batches and versions of weights then stay far within 64 bits."""
_NUMBERS: Final = tuple(field.name for field in dataclasses.fields(Layer) if field.name not in ("name", "shared"))
_REQUIRED: Final = tuple(field.name for field in dataclasses.fields(Layer) if field.default is dataclasses.MISSING)


def read_layers(path: str | Path) -> list[Layer]:
    """The layers of a JSON file: a list of objects with the fields of Layer (or such a list under "layers").

    Raises MemtraceError where the file, an object or a number is not what it should be.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MemtraceError(f"cannot read the costs {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise MemtraceError(f"{path} is not JSON: {error}") from error
    if isinstance(content, dict):
        content = content.get("layers")
    if not isinstance(content, list) or not content:
        raise MemtraceError(f"{path} must hold a list of layers, each with {', '.join(_REQUIRED)}")
    return [_layer(entry, f"layer {number} of {path}") for number, entry in enumerate(content)]


def _layer(entry: Any, where: str) -> Layer:
    if not isinstance(entry, Mapping):
        raise MemtraceError(f"{where} is not an object with {', '.join(_REQUIRED)}")
    missing = [name for name in _REQUIRED if name not in entry]
    if missing:
        raise MemtraceError(f"{where} lacks {', '.join(missing)}")
    unknown = [name for name in entry if name != "name" and name not in _NUMBERS]
    if unknown:
        raise MemtraceError(f"{where} has {', '.join(map(str, unknown))}, which memtrace does not know")
    given = [name for name in _NUMBERS if name in _REQUIRED or entry.get(name) is not None]
    values = {name: _number(entry[name], name, where) for name in given}
    layer = Layer(name=str(entry["name"]), **values)
    if (layer.weight_backward_s or 0) > layer.backward_s:
        raise MemtraceError(f"{where}: weight_backward_s is more than backward_s")
    if (layer.weight_activation_bytes or 0) > layer.activation_bytes:
        raise MemtraceError(f"{where}: weight_activation_bytes is more than activation_bytes")
    return layer


def _number(value: Any, name: str, where: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise MemtraceError(f"{where}: {name} must be a number >= 0, not {value!r}")
    most = MOST_SECONDS if name.endswith("_s") else MOST_BYTES
    if value > most:
        raise MemtraceError(f"{where}: {name} must be at most {most:g}, not {value!r}")
    if name.endswith("_s"):
        return float(value)
    if int(value) != value:
        raise MemtraceError(f"{where}: {name} counts bytes and must be whole, not {value!r}")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage: a run of layers. Seconds and activation bytes are of one micro-batch."""

    forward_s: float
    input_backward_s: float
    weight_backward_s: float
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    weight_activation_bytes: int = 0
    """What is left of the activations between input backward and weight backward."""
    input_bytes: int = 0
    """What comes from the stage before; all that is kept of a micro-batch under recomputation."""
    output_bytes: int = 0
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    input_backward_temporary_bytes: int = 0
    first_backward_temporary_bytes: int = 0
    """As ``backward_temporary_bytes``, for the backward that first allocates the gradients of the weights."""
    unsaved_output_bytes: int = 0
    """The part of ``output_bytes`` that is not in ``activation_bytes``."""
    result_bytes: int = 0
    handed_bytes: int = 0
    loss_bytes: int = 0
    batch_bytes: int = 0
    optimizer_temporary_bytes: int = 0
    largest_optimizer_temporary_bytes: int = 0

    @property
    def backward_s(self) -> float:
        """Input and weight backward together."""
        return self.input_backward_s + self.weight_backward_s


def uniform_stages(
    num_stages: int,
    *,
    forward_s: float = 1.0,
    input_backward_s: float = 0.5,
    weight_backward_s: float = 0.5,
    **costs: int,
) -> list[StageCosts]:
    """Equal stages, as papers draw them; further costs by the names of StageCosts."""
    stage = StageCosts(
        forward_s=forward_s, input_backward_s=input_backward_s, weight_backward_s=weight_backward_s, **costs
    )
    return [stage] * num_stages


def stage_costs(layers: Sequence[Layer], input_bytes: int = 0) -> StageCosts:
    """The costs of a stage made of ``layers``; ``input_bytes`` is the message it receives."""
    weight_s = [_or(layer.weight_backward_s, layer.backward_s / 2) for layer in layers]
    held: list[Layer | Shared] = [*layers, *_copies(layers)]
    return StageCosts(
        forward_s=math.fsum(layer.forward_s for layer in layers),
        input_backward_s=math.fsum(layer.backward_s - weight for layer, weight in zip(layers, weight_s, strict=True)),
        weight_backward_s=math.fsum(weight_s),
        parameter_bytes=sum(one.parameter_bytes for one in held),
        gradient_bytes=sum(one.gradient_bytes for one in held),
        optimizer_bytes=sum(one.optimizer_bytes for one in held),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        weight_activation_bytes=sum(_or(layer.weight_activation_bytes, layer.activation_bytes) for layer in layers),
        input_bytes=input_bytes,
        output_bytes=layers[-1].output_bytes if layers else 0,
        unsaved_output_bytes=layers[-1].unsaved_output_bytes if layers else 0,
        result_bytes=layers[-1].result_bytes if layers else 0,
        handed_bytes=layers[-1].handed_bytes if layers else 0,
        loss_bytes=layers[-1].loss_bytes if layers else 0,
        batch_bytes=sum(layer.batch_bytes for layer in layers),
        optimizer_temporary_bytes=sum(one.optimizer_temporary_bytes for one in held),
        largest_optimizer_temporary_bytes=max((layer.largest_optimizer_temporary_bytes for layer in layers), default=0),
        forward_temporary_bytes=_forward_excess(layers),
        backward_temporary_bytes=_backward_excess(layers, fresh_gradients=False),
        input_backward_temporary_bytes=max(
            (_or(layer.input_backward_temporary_bytes, layer.backward_temporary_bytes) for layer in layers),
            default=0,
        ),
        first_backward_temporary_bytes=_backward_excess(layers, fresh_gradients=True),
    )


def _copies(layers: Sequence[Layer]) -> list[Shared]:
    """The shared weights of the layers, each once; where their first user is among these, it has them."""
    found: dict[int, Shared] = {}
    for layer in layers:
        for one in layer.shared:
            found.setdefault(one.number, one)
    return list(found.values())


def _forward_excess(layers: Sequence[Layer]) -> int:
    """How far the forward rises above what the whole stage keeps at its end."""
    kept, highest = 0, 0
    for layer in layers:
        kept += layer.activation_bytes
        highest = max(highest, kept + layer.forward_temporary_bytes)
    return highest - kept


def _backward_excess(layers: Sequence[Layer], *, fresh_gradients: bool) -> int:
    """How far the backward, last layer first, rises above the activations that it starts with."""
    return max(backward_rises(layers, fresh_gradients=fresh_gradients), default=0)


def backward_rises(layers: Sequence[Layer], *, fresh_gradients: bool) -> Iterator[int]:
    """The same for the stages that begin with the last layer, the one before it and so on."""
    level, highest = 0, 0
    seen: set[int] = set()
    for layer in reversed(layers):
        made, above = 0, layer.backward_temporary_bytes + layer.largest_gradient_bytes
        if fresh_gradients:
            # The gradient of shared weights is made by their last user, others add to it.
            made = layer.gradient_bytes + sum(one.gradient_bytes for one in layer.shared if one.number not in seen)
            seen.update(one.number for one in layer.shared)
            above = _or(layer.first_backward_temporary_bytes, layer.backward_temporary_bytes + made)
        highest = max(highest, level + above)
        level += made - layer.activation_bytes
        yield highest


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def cut_costs(layers: Sequence[Layer], first_layers: Sequence[int]) -> list[StageCosts]:
    """The stages of the cut whose stage s begins with layer ``first_layers[s]``."""
    bounds = [*first_layers, len(layers)]
    return [
        stage_costs(layers[begin:end], layers[begin - 1].output_bytes if begin else 0)
        for begin, end in itertools.pairwise(bounds)
    ]


def scaled(layers: Iterable[Layer], factor: float) -> list[Layer]:
    """The layers with a micro-batch ``factor`` times as large: time and activations grow in proportion."""
    return [_scaled(layer, factor) for layer in layers]


_WITH_MICROBATCH: Final = (
    "activation_bytes",
    "weight_activation_bytes",
    "output_bytes",
    "unsaved_output_bytes",
    "result_bytes",
    "handed_bytes",
    "loss_bytes",
    "batch_bytes",
    "forward_temporary_bytes",
    "backward_temporary_bytes",
    "input_backward_temporary_bytes",
)


def _scaled(layer: Layer, factor: float) -> Layer:
    changes: dict[str, Any] = {}
    for name in ("forward_s", "backward_s", "weight_backward_s"):
        value = getattr(layer, name)
        changes[name] = None if value is None else value * factor
    for name in _WITH_MICROBATCH:
        value = getattr(layer, name)
        changes[name] = None if value is None else math.ceil(value * factor)
    # What first backwards add in gradients does not depend on the micro-batch.
    if layer.first_backward_temporary_bytes is not None:
        added = layer.first_backward_temporary_bytes - layer.backward_temporary_bytes
        changes["first_backward_temporary_bytes"] = changes["backward_temporary_bytes"] + added
    return dataclasses.replace(layer, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The latency-bandwidth model of messages and of all-reduce (Chimera 3.4)."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def message_s(self, num_bytes: float) -> float:
        """Seconds that ``num_bytes`` take from one worker to another."""
        return self.latency_s + self.seconds_per_byte * num_bytes

    def all_reduce_s(self, num_bytes: float, num_replicas: int) -> float:
        """Seconds of Rabenseifner's all-reduce of ``num_bytes`` over ``num_replicas`` workers."""
        if num_replicas < 2:
            return 0.0
        latency = 2 * math.log2(num_replicas) * self.latency_s
        return latency + 2 * (num_replicas - 1) * self.seconds_per_byte * num_bytes / num_replicas
