"""CUDA kernels of CSR matrices."""
