"""CUDA for the rest of the runtime: compiling our kernels at start, loading and launching them, device memory."""
