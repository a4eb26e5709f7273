"""Reads the memory files of other tools into the tables of a trace.

    for manifest, tables in readers.read("snapshot.pickle"):
        ...

CUDA memory snapshots (pickle, gzip, JSON, or inside a memory_viz page), Chrome traces of torch.profiler, and the JSON
files of ``export_memory_timeline``; told by content, not by name. Other packages add kinds through the entry-point
group ``memtrace.readers`` (see ``memtrace.readers.registry.Reader``).
"""

from __future__ import annotations

from memtrace.readers.job import number_ranks, read, read_job

__all__ = ["number_ranks", "read", "read_job"]
