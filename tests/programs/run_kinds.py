"""Run programs of all kinds and print a digest of what each computed, as JSON.

    python -m tests.programs.run_kinds [--record FOLDER] [--observer native] [--only NAME ...]

With ``--record``, each program runs inside a recording of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import memtrace
from tests.programs.kinds import Result, load_kinds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path)
    parser.add_argument("--observer", default="native")
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    digests = {}
    for name, program in load_kinds().items():
        if not options.only or name in options.only:
            recording = options.record / f"{name}.memtrace" if options.record else None
            digests[name] = run_program(program, recording, options.observer)
            print(name, digests[name], file=sys.stderr, flush=True)
    print(json.dumps(digests))


def run_program(program: Callable[[], Result], recording: Path | None, observer: str) -> str:
    """Return a digest of the result of a program and of the state that it leaves, or the error that it raised."""
    torch.manual_seed(7)
    digest = hashlib.sha256()
    try:
        if recording is None:
            result = program()
        else:
            with warnings.catch_warnings():
                # A warning of memtrace is an error here: it says that the recording is not complete.
                warnings.filterwarnings("error", module="memtrace")
                with memtrace.record(recording, observer=observer):
                    result = program()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    _update(digest, result)
    _update(digest, torch.get_rng_state())
    left = [thread.name for thread in threading.enumerate() if "memtrace" in thread.name]
    return f"the recording left threads: {left}" if left else digest.hexdigest()


def _update(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        _update(digest, [item for pair in value.items() for item in pair])
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} of {len(value)}".encode())
        for item in value:
            _update(digest, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(repr(value).encode())
    else:
        raise TypeError(f"a program returned a {type(value).__name__}")


if __name__ == "__main__":
    main()
