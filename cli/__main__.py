"""``python -m memtrace.cli``: the ``memtrace`` command, for launchers such as torchrun that start modules."""

from memtrace.cli import main

main()
