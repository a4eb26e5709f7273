"""CUDA's caching allocator, replayed exactly, and what it would do under other settings."""
