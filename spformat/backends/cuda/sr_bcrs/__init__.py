"""CUDA kernels of SR-BCRS matrices."""
