"""Analyses of a long trace a part at a time: ``partial``, ``merge`` and ``finish`` (``memtrace.engine`` runs them).

A part is read by itself, so the parts are analyzed in any order, in any process, and in memory that does not grow with
the trace. The results are those of the whole trace in memory, to the byte.

    spans.py        first pass: marked steps, waits and garbage collections, which the second pass cuts the parts by
    events.py       second pass: reads a part once, and joins what runs of parts hold: levels.py (live, allocated and
                    reserved bytes), step_facts.py (steps), retained.py (blocks that outlive steps)
    live_blocks.py  third pass: the blocks that are live at the peaks, and what they are for
    passes.py       the first two passes as ``partial``, ``merge`` and ``finish``
    summary.py      puts the passes together, with retained_memory.py (growth) and segments.py (reserved memory)
"""
