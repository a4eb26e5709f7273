"""TensorBoard: the memory of each training step as scalars.

from memtrace.integrations.tensorboard import log_scalars

with SummaryWriter() as writer, memtrace.record("run.memtrace") as recording:
    log_scalars(recording, writer)
    train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memtrace.integrations.scalars import ScalarStream, Sink

if TYPE_CHECKING:
    from memtrace.recording.session import Recording


def log_scalars(recording: Recording, writer: Any) -> None:
    """Log the memory of each step of a recording: peak, peak by category, reserved bytes and growth, by device.

    Call it once, inside the ``with`` block of the recording. Steps are logged some seconds after their ends, and the
    last ones when the recording ends, so the writer must be open then.

    Args:
        recording: The running recording.
        writer: A ``SummaryWriter`` of ``torch.utils.tensorboard`` or ``tensorboardX``.
    """
    ScalarStream(recording, [writer_sink(writer)])


def writer_sink(writer: Any) -> Sink:
    """Return a sink for the callbacks of memtrace that writes scalars to a ``SummaryWriter``."""

    def write(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return write
