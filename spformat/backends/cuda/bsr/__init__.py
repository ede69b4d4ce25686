"""CUDA kernels of BSR and DBSR matrices."""
