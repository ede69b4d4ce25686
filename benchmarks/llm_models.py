"""The models that benchmarks/llm.py measures: shapes, rules, and how they are pruned and converted on the device."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from spformat.torch import SparseLinear, freeze, fuse_projections

SHAPES = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "num_hidden_layers": 16, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 32, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The shapes of Llama 3.2 1B and Llama 3.1 8B."""

MODELS = {
    "dense": {},
    "semi": {"": "semi"},
    "two-four": {"": "two-four"},
    "bitmask-50": {"": "bitmask@0.5"},
    "bitmask-70": {"": "bitmask@0.7"},
    "bsr-80": {"": "bsr:blocksize=64x64@0.8"},
    "mixed": {"": "two-four", "self_attn": "bitmask@0.5"},
}
"""Name of a model -> {part of a layer's name: format @ share of zeros}; the last part that matches decides."""
FUSED, FROZEN = "fused", "frozen"
"""Behind a "+" after the name of a model: q, k and v are one product, and gate and up; weights are there once."""


def dense_model(a: argparse.Namespace, joined: bool = False) -> Any:
    """A model with random weights, created where it is measured.

    joined: it is one of Phi 3, whose weights of q, k and v, and of gate and up, are one matrix each.
    """
    most = max([*a.prefill, a.context + a.margin])
    kind, cls = (Phi3Config, Phi3ForCausalLM) if joined else (LlamaConfig, LlamaForCausalLM)
    config = kind(**a.config, max_position_embeddings=most, attn_implementation=a.attention, pad_token_id=0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(a.dtype)
    torch.manual_seed(0)
    try:
        with torch.device(a.device):
            return cls(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def pruned(w: torch.Tensor, spec: str, sparsity: float) -> torch.Tensor:
    """A weight with as many zeros as a format needs, and at the places where it needs them."""
    if spec == "two-four":
        groups = w.view(-1, 4)
        dropped = groups.abs().argsort(dim=1)[:, :2]
        return groups.scatter(1, dropped, 0).view_as(w)
    if spec.startswith("bsr"):
        R, C = (int(x) for x in spec.partition("=")[2].split("x"))
        keep = torch.rand(w.shape[0] // R, w.shape[1] // C, device=w.device) >= sparsity
        return w * keep.repeat_interleave(R, 0).repeat_interleave(C, 1)
    return w * (torch.rand(w.shape, device=w.device) >= sparsity)


def sparse_layer(linear: torch.nn.Linear, target: str) -> torch.nn.Module:
    """The layer in the format of a target "bitmask@0.5", on the device where it is."""
    spec, _, share = target.partition("@")
    w = pruned(linear.weight, "two-four" if spec == "semi" else spec, float(share or 0))
    new = torch.nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    if spec == "semi":
        new.weight = torch.nn.Parameter(torch.sparse.to_sparse_semi_structured(w), requires_grad=False)
        return new
    new.weight = torch.nn.Parameter(w, requires_grad=False)
    return SparseLinear.from_linear(new, spec)


def build(name: str, a: argparse.Namespace) -> tuple[Any, float]:
    """(model, largest error of its sparse layers against the dense product of the same weight).

    The first layer of the decoder is converted; the others are copies of its layers, in memory of their own. "+fused"
    after the name of a dense model makes it one of Phi 3, and calls ``fuse_projections`` of a sparse one.
    """
    kind, *steps = name.split("+")
    model = dense_model(a, a.joined or (FUSED in steps and not MODELS[kind]))
    error = 0.0
    layers = model.model.layers
    for path, linear in list(layers[0].named_modules()) if MODELS[kind] else []:
        if not isinstance(linear, torch.nn.Linear):
            continue
        target = next(t for part, t in reversed(MODELS[kind].items()) if part in path)
        new = sparse_layer(linear, target)
        x = torch.randn(16, linear.in_features, dtype=a.dtype, device=a.device)
        weight = new.weight.to_dense() if target == "semi" else new.weight
        exact = x.double() @ weight.double().T
        error = max(error, float((new(x).double() - exact).abs().max() / exact.abs().max()))
        parent, _, leaf = path.rpartition(".")
        for i, layer in enumerate(layers):
            copied = new if i == 0 else sparse_layer(linear, target) if target == "semi" else copy.deepcopy(new)
            setattr(layer.get_submodule(parent), leaf, copied)
    if FUSED in steps and MODELS[kind]:
        fuse_projections(model)
    if FROZEN in steps:
        freeze(model)
    return model, error


def weight_bytes(model: Any) -> int:
    """Bytes of the weights of the linear layers of the decoder."""
    total = 0
    for m in model.model.layers.modules():
        if isinstance(m, SparseLinear):
            total += m.nbytes if m.has_own_weight else 0
        elif isinstance(m, torch.nn.Linear):
            w = m.weight
            inner = [t for n in ("packed", "meta") if (t := getattr(w, n, None)) is not None]
            total += sum(t.nbytes for t in inner) if inner else w.nbytes
    return total
