"""The application of ``memtrace serve``: the page, payloads of windows, and the status of recordings."""

from __future__ import annotations

NUM_GROWING_SITES = 5
