"""From a live process to a trace."""
