"""Installs the wheel with each supported version of Python and torch, and runs tests against what was installed."""
