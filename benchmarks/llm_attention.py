"""The attention of the models of benchmarks/llm.py: one that copies no keys and values, beside transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED, PRODUCTS = "grouped", "products"
ATTENTION = (GROUPED, PRODUCTS, "sdpa", "eager")
"""``grouped``, the same as two products and a softmax (``products``), and names that transformers knows. "eager" copies
keys and values once for each query head; "sdpa" does so in compiled models, with transformers 5.17 in all.
"flex_attention" is not among them: with a static cache whose first places were filled by hand its logits differ from
the others by 6 % (transformers 5.24, torch 2.13, CPU)."""


def grouped(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention for one new token of each sequence: the query heads of a key head are rows of one product.

    query: [batch, heads, 1, dim]; key, value: [batch, heads / groups, length, dim]; attention_mask: [batch or 1, 1, 1,
    length], added. Prompts go to transformers' function for "sdpa", which copies nothing where there is no mask.
    """
    batch, heads, tokens, dim = query.shape
    if tokens > 1 or dropout:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    rows = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, dim), None


def products(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """``grouped`` without ``scaled_dot_product_attention``, which on a GPU asks whether the batch is 1 (torch 2.11): a
    graph for batches of any size must not ask."""
    batch, heads, tokens, dim = query.shape
    if tokens > 1 or dropout:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    rows = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    weights = rows @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        weights = weights + attention_mask
    out = torch.softmax(weights.float(), dim=-1).to(value.dtype) @ value
    return out.reshape(batch, 1, heads, dim), None


def added_mask(batch_size: int, q_length: int, kv_length: int, *rest: Any, **options: Any) -> torch.Tensor | None:
    """The mask of "sdpa"; for single tokens as numbers to add, once a step and not once a layer."""
    allowed: torch.Tensor | None = sdpa_mask(batch_size, q_length, kv_length, *rest, **options)
    if allowed is None or q_length > 1:
        return allowed
    dtype = options.get("dtype", torch.float32)
    none = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, none, torch.finfo(dtype).min)


for name, function in ((GROUPED, grouped), (PRODUCTS, products)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, added_mask)
