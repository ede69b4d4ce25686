"""CUDA kernels of sums of matrices."""
