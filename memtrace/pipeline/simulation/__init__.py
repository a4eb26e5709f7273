"""Time and memory of a pipeline schedule, simulated from layer costs."""
