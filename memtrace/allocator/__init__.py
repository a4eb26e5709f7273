"""A model of PyTorch's CUDA caching allocator: exact replay of recordings, and predictions for other settings."""
