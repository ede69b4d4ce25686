"""CUDA kernels of vector n:m matrices."""
