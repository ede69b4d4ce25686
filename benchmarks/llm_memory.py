"""Memory of a device while models load, and at rest: python benchmarks/llm_memory.py [--models two-four,bitmask-50]

Each model is built, saved as a packed folder and loaded again from there: by from_pretrained and by load_into. Beside
the peak stand the packed bytes and the largest tensor: what a loader may take is their sum. The vocabulary is small,
so that no dense embedding hides what sparse layers take. *rest* is what the weights of the decoder take after products
with 1 and 16 tokens, and then with 300, which may leave a workspace as large as the largest dense weight, as the model
was loaded and after spformat.torch.freeze, relative to the dense weights.

Memory is what torch and CuPy have reserved, cached memory included: nobody else can have it. Peaks of the two are
added, whether or not they were at the same time. benchmarks/llm.py --load uses ``loading``, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import spformat.hf as hf
import spformat.torch as st


def synchronize(a: argparse.Namespace) -> None:
    """Wait for the device."""
    if a.device.type == "cuda":
        torch.cuda.synchronize()


def release(a: argparse.Namespace) -> None:
    """Give back what models no longer use, and what the allocators cache."""
    gc.collect()
    gc.collect()  # orders of kernels are free only after a second collection (seen on a GPU)
    if a.device.type == "cuda":
        torch.cuda.empty_cache()
        cupy().get_default_memory_pool().free_all_blocks()


def reset_peak(a: argparse.Namespace) -> None:
    """Start to count the memory of the device anew."""
    release(a)
    if a.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(a: argparse.Namespace, reserved: bool = False) -> int | None:
    """Most bytes of torch's tensors since ``reset_peak``, and what CuPy, which our kernels allocate with, has now.

    reserved: what torch keeps for later tensors counts, too: nobody else can have it.
    """
    if a.device.type != "cuda":
        return None
    torchs = torch.cuda.max_memory_reserved() if reserved else torch.cuda.max_memory_allocated()
    return int(torchs) + int(cupy().get_default_memory_pool().total_bytes())


def bytes_now(a: argparse.Namespace) -> int:
    """Bytes of torch's tensors and of CuPy's arrays."""
    if a.device.type != "cuda":
        return 0
    return int(torch.cuda.memory_allocated()) + int(cupy().get_default_memory_pool().used_bytes())


def cupy() -> Any:
    """CuPy, which a CPU does not need."""
    import cupy

    return cupy


def pretrained(folder: str, a: argparse.Namespace) -> Any:
    """The model of a packed folder, by transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, device_map=str(a.device), dtype=a.dtype)


def into(model: Any) -> Callable[[str, argparse.Namespace], Any]:
    """``load_into`` a model like this one on the meta device."""
    cls, config = type(model), model.config

    def load(folder: str, a: argparse.Namespace) -> Any:
        with torch.device("meta"):
            empty = cls(config)
        empty.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are in no checkpoint
        st.load_into(empty.to(a.dtype), folder, a.device)
        return empty

    return load


def saved(model: Any, folder: str) -> tuple[int, int]:
    """(bytes of the packed folder that a model is saved in, those of its largest tensor)."""
    hf.save_pretrained(model, folder)
    packed = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
    return packed, max(t.nbytes for t in model.state_dict().values())


def measured(load: Callable[..., Any], folder: str, packed: int, largest: int, a: argparse.Namespace) -> dict[str, Any]:
    """Load a folder: seconds, and the peak of the device beside what a loader may take."""
    reset_peak(a)
    before = peak_bytes(a, reserved=True) or 0  # of models that are there already, with what our kernels keep of them
    start = time.perf_counter()
    model = load(folder, a)
    synchronize(a)
    seconds, peak = time.perf_counter() - start, peak_bytes(a, reserved=True)
    rise = None if peak is None else peak - before
    del model
    return {
        "packed_bytes": packed, "largest_tensor": largest, "seconds": round(seconds, 2), "peak_bytes": rise,
        "over_bytes": None if rise is None else rise - packed - largest,
    }  # fmt: skip


def loading(model: Any, a: argparse.Namespace) -> dict[str, Any]:
    """Save a model as a packed folder and load it again with from_pretrained: see ``measured``.

    over_bytes: what the peak, reserved memory included, is above the packed bytes and the largest tensor.
    """
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        return measured(pretrained, folder, *saved(model, folder), a)


# ------------------------------------------------------------------ the run


def at_rest(folder: str, freeze: bool, a: argparse.Namespace) -> list[float] | None:
    """Bytes that the layers of a loaded model take after products, over the bytes of their dense weights."""
    reset_peak(a)
    before = bytes_now(a)
    model = pretrained(folder, a)
    layers = [m for m in model.model.layers.modules() if isinstance(m, st.SparseLinear)]
    dense = sum(m.in_features * m.out_features * a.dtype.itemsize for m in layers)
    others = sum(t.nbytes for m in model.modules() if not isinstance(m, st.SparseLinear)
                 for t in [*m._parameters.values(), *m._buffers.values()] if t is not None)  # fmt: skip
    if freeze:
        st.freeze(model)
    shares = []
    with torch.no_grad():
        for several in ((1, 16), (300,)):
            for tokens in several:
                model(input_ids=torch.zeros(1, tokens, dtype=torch.int64, device=a.device), use_cache=False)
            synchronize(a)
            gc.collect()
            shares.append(round((bytes_now(a) - before - others) / dense, 4))
    return shares if a.device.type == "cuda" else None


def main() -> None:
    """Run, and print a table."""
    from llm import parsed  # it imports this module
    from llm_models import build

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="two-four,bitmask-50")
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--vocab", type=int, default=8192)
    p.add_argument("--hidden", type=int, help="another hidden size, for a short test")
    p.add_argument("--device", default="cuda")
    p.add_argument("--folder", help="where models are saved; default: the temporary folder")
    p.add_argument("--json")
    own = p.parse_args()
    hidden = ["--hidden", str(own.hidden)] if own.hidden else []
    a = parsed(["--layers", str(own.layers), "--device", own.device, "--attention", "sdpa", *hidden])
    a.config |= {"vocab_size": own.vocab}
    a.folder = own.folder
    result: dict[str, Any] = {}
    for name in own.models.split(","):
        with torch.no_grad(), tempfile.TemporaryDirectory(dir=a.folder) as folder:
            model, _ = build(name, a)
            packed, largest = saved(model, folder)
            loaders = {"from_pretrained": pretrained, "load_into": into(model)}
            del model
            rows = {how: measured(load, folder, packed, largest, a) for how, load in loaders.items()}
            rest = {how: at_rest(folder, how == "frozen", a) for how in ("as loaded", "frozen")}
            result[name] = rows | {"at_rest_of_dense": rest}
        for how, row in rows.items():
            peak, allowed = row["peak_bytes"], packed + largest
            share = "" if peak is None else f", peak {peak:,}: {peak / allowed:.3f} of what it may take"
            print(f"{name:12} {how:16} packed {packed:,}, largest tensor {largest:,}{share}, {row['seconds']} s")
        print(f"{name:12} at rest, of dense: {rest}", flush=True)
    if own.json:
        Path(own.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
