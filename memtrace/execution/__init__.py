"""Carries out a plan on the model and the optimizer of a running program."""

from memtrace.execution.application import apply
from memtrace.execution.target import Target

__all__ = ["Target", "apply"]
