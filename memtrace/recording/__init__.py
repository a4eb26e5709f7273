"""Records the memory of a running training process into a trace."""
