"""What all CUDA kernels share: compiling, launching, operands, workspaces, tensor maps."""
