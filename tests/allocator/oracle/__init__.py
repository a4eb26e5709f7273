"""torch's own CUDA caching allocator, run on a device that is not there.

`libc10_cuda.so` of a CUDA build of torch is loaded over a CUDA runtime that hands out addresses and counts bytes, and
nothing else (`device.c`). `driver.cpp` puts requests to it and prints what its trace tracker says. So the model is
compared with the very code that it models, without a GPU. See `README.md` for what it needs.
"""
