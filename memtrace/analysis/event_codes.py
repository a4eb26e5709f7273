"""Integer codes of the words in the columns ``events.kind``, ``ops.phase`` and ``spans.kind``."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.format.schema import EVENT_KINDS, PHASES, SPAN_KINDS

KIND: Final = {kind: np.int8(code) for code, kind in enumerate(EVENT_KINDS)}
"""Code of each kind of event."""
PHASE: Final = {phase: np.int8(code) for code, phase in enumerate(PHASES)}
"""Code of each phase of a training step."""
SPAN: Final = {kind: np.int8(code) for code, kind in enumerate(SPAN_KINDS)}
"""Code of each kind of span."""
