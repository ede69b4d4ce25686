"""A small Llama model of transformers, dense and packed, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_installed import torch, transformers

from spformat.checkpoint import Recipe, Rule, convert_checkpoint
from spformat.torch import SparseLinear

PROJECTIONS = "re:proj.weight$"


def llama(dtype: str = "float32", **settings: Any) -> Any:
    """A Llama model with two small layers and random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes | heads | {"tie_word_embeddings": False} | settings)
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def recipe(target: str = "bitmask", pattern: str = PROJECTIONS) -> Recipe:
    open_share = target.startswith(("csr", "bitmask", "bsr"))
    return Recipe("keep", (Rule(pattern, target),), prune="magnitude", sparsity=0.5 if open_share else None)


def packed_beside(dense: Path) -> Path:
    """A folder of the layout of transformers beside a dense one."""
    convert_checkpoint(dense, dense.parent / "packed", recipe(), layout="transformers")
    return dense.parent / "packed"


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def ids(batch: int = 2, tokens: int = 17) -> Any:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(ids()).logits


def sparse_layers(model: Any) -> dict[str, SparseLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
