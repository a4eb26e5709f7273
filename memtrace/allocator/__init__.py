"""A model of PyTorch's CUDA caching allocator: exact replay of recorded histories, and predictions for other settings."""
