"""CUDA kernels of ELL buckets matrices."""
