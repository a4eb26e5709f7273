"""From a trace to tables; each module answers one question."""
