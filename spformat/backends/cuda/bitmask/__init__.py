"""CUDA kernels of bitmask matrices."""
