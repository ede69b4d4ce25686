"""Memory of a device for benchmarks/llm.py: peaks, and what loading a packed folder takes."""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import spformat.hf as hf


def synchronize(a: argparse.Namespace) -> None:
    """Wait for the device."""
    if a.device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(a: argparse.Namespace) -> None:
    """Start to count the memory of the device anew."""
    if a.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        cupy().get_default_memory_pool().free_all_blocks()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(a: argparse.Namespace, reserved: bool = False) -> int | None:
    """Most bytes of torch's tensors since ``reset_peak``, and what CuPy, which our kernels allocate with, has now.

    reserved: what torch keeps for later tensors counts, too: nobody else can have it.
    """
    if a.device.type != "cuda":
        return None
    torchs = torch.cuda.max_memory_reserved() if reserved else torch.cuda.max_memory_allocated()
    return int(torchs) + int(cupy().get_default_memory_pool().total_bytes())


def cupy() -> Any:
    """CuPy, which a CPU does not need."""
    import cupy

    return cupy


def loading(model: Any, a: argparse.Namespace) -> dict[str, Any]:
    """Save a model as a packed folder and load it again: seconds, and the peak of the device beside the bytes.

    over_bytes: what the peak, reserved memory included, is above the packed bytes and the largest tensor.
    """
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        hf.save_pretrained(model, folder)
        packed = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        reset_peak(a)
        before = peak_bytes(a, reserved=True) or 0  # of the model that was saved, with what our kernels keep of it
        start = time.perf_counter()
        again = AutoModelForCausalLM.from_pretrained(folder, device_map=str(a.device), dtype=a.dtype)
        synchronize(a)
        seconds, peak = time.perf_counter() - start, peak_bytes(a, reserved=True)
        largest = max(t.nbytes for t in again.state_dict().values())
        rise = None if peak is None else peak - before
        return {
            "packed_bytes": packed, "largest_tensor": largest, "seconds": round(seconds, 2), "peak_bytes": rise,
            "over_bytes": None if rise is None else rise - packed - largest,
        }  # fmt: skip
