"""CUDA kernels of 2:4 matrices."""
