"""The CUDA backend: one launcher and one ``.cu`` twin per kernel, compiled at first use through CuPy's NVRTC."""
