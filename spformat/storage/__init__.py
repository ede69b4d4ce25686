"""Tensors in files: the container, safetensors headers, durable output, locks and checksums."""
