"""The alignment of the clocks of the ranks of a job."""

from __future__ import annotations

import threading
import time

import torch

from memtrace.recording.clock import ClockAligner, ClockExchange


def test_offsets_are_measured_within_their_error() -> None:
    store = torch.distributed.HashStore()
    skews_ns = {0: 0, 1: 5_000_000_000, 2: -3_000_000_000}

    def exchange(rank: int) -> ClockExchange:
        return ClockExchange(store, rank, lambda: time.perf_counter_ns() + skews_ns[rank], "test")

    num_served: list[int] = []
    server = threading.Thread(target=lambda: num_served.append(exchange(0).serve(2, lambda: False)))
    server.start()
    offsets = {rank: exchange(rank).measure_offset(lambda: False) for rank in (2, 1)}
    server.join()
    assert num_served == [2]
    for rank, offset in offsets.items():
        assert offset is not None
        assert abs(offset.offset_ns + skews_ns[rank]) <= offset.error_ns < 100_000_000


def test_no_rank_waits_for_ranks_that_do_not_record() -> None:
    store = torch.distributed.HashStore()
    assert ClockExchange(store, 1, time.perf_counter_ns, "no server").measure_offset(lambda: True) is None
    assert ClockExchange(store, 0, time.perf_counter_ns, "no clients").serve(3, lambda: True) == 0


def test_a_process_outside_of_a_process_group_has_no_offset() -> None:
    aligner = ClockAligner("no group", 1, time.perf_counter_ns)
    aligner.start()
    alignment = aligner.stop()
    assert alignment.offset_ns is None
    assert alignment.note is not None and "never joined" in alignment.note
