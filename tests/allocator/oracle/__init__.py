"""PyTorch's own CUDA caching allocator, run without a GPU.

`libc10_cuda.so` of a CUDA build of PyTorch is loaded with a CUDA runtime that only assigns addresses and counts bytes
(`device.c`). `driver.cpp` sends requests to it and prints the events of its trace tracker. The model is thus compared with the
code that it models. See `README.md` for the requirements.
"""
