"""Read the memory files of other tools into the tables of a trace.

    for rank in readers.read("snapshot.pickle"):
        print(rank.manifest["rank"], rank.tables["events"].num_rows)

The readers cover CUDA memory snapshots (pickle, gzip, JSON, or a memory_viz page), Chrome traces of torch.profiler, and
the JSON files of ``export_memory_timeline``. The content of a file decides which reader takes it, not its name. Other
packages add readers through the entry-point group ``memtrace.readers`` (see ``memtrace.readers.registry.Reader``).
"""

from __future__ import annotations

from memtrace.readers.job import number_ranks, read, read_each, read_job
from memtrace.readers.rank import ReadRank

__all__ = ["ReadRank", "number_ranks", "read", "read_each", "read_job"]
