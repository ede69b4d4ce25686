"""LoRA of PEFT on sparse layers: the adapter is dense and trains, the sparse weight stays as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import UsageError
from ..torch.module import SparseLinear

CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` by which PEFT changes the weight beside the adapter."""


def with_sparse_layers(config: Any, model: torch.nn.Module | None = None) -> Any:
    """A ``peft.LoraConfig`` that also takes ``SparseLinear`` layers; the same object.

    get_peft_model(model, with_sparse_layers(LoraConfig(target_modules=["q_proj", "v_proj"]), model))

    model: that of the adapter, in which names of ``modules_to_save`` must not be those of sparse layers or of modules
    with sparse layers: PEFT would put copies into the adapter, whose weights do not train. PEFT itself does not look.

    PEFT does not store this with an adapter: give ``config=with_sparse_layers(PeftConfig.from_pretrained(path))`` when
    one is loaded. Refused by name: merging while the weight is sparse, an adapter on the fused weight of
    ``spformat.torch.fuse_projections`` (those on its projections work), and initial values that change the weight
    (``"pissa"``), because the sum of a sparse weight and an adapter is dense; ``target_modules="all-linear"``, by which
    PEFT finds dense layers only; configs of adapters other than LoRA.
    """
    from peft import LoraConfig

    from .sparse_lora import SparseLora

    if not isinstance(config, LoraConfig):
        raise UsageError(
            f"config: expected a peft.LoraConfig, got {type(config).__name__}: PEFT takes configs that replace no "
            "sparse layer, such as those of prompts, as they are; other adapters on layers need model.dequantize()"
        )
    if config.target_modules == "all-linear":
        raise UsageError("target_modules: 'all-linear' would leave sparse layers out; name the layers: ['q_proj', ..]")
    initial = str(config.init_lora_weights).lower()
    if initial.startswith(CHANGE_THE_BASE):
        raise UsageError(
            f"init_lora_weights={config.init_lora_weights!r} takes the adapter's first product off the base weight, "
            "which would not be sparse any more: use True, 'gaussian', 'orthogonal' or 'eva'"
        )

    if model is not None:
        _require_dense(config.modules_to_save or (), model)
    config._register_custom_module({SparseLinear: SparseLora})
    return config


def _require_dense(names: Iterable[str], model: torch.nn.Module) -> None:
    """UsageError if one of the modules that PEFT finds by these names has a sparse weight."""
    named = [(name, path, m) for path, m in model.named_modules() for name in names if path.endswith(name)]
    for name, path, module in named:
        if any(isinstance(m, SparseLinear) for m in module.modules()):
            raise UsageError(
                f"modules_to_save: {name!r} is {path}, which has a sparse weight, and that does not train: name it in "
                "target_modules, or leave the layer dense"
            )
