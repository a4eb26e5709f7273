"""The local server of ``memtrace serve``: the page of traces of any size, and of recordings that are still running."""
