"""``python -m memtrace.cli``: the ``memtrace`` command where only a module can be named, as torchrun's -m does."""

from memtrace.cli import main

main()
