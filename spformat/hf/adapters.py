"""LoRA of PEFT on sparse layers: the adapter is dense and trains, the sparse weight stays as it is."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from ..torch.module import SparseLinear

CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` by which PEFT changes the weight beside the adapter."""


def with_sparse_layers(config: Any) -> Any:
    """A ``peft.LoraConfig`` that also takes ``SparseLinear`` layers; the same object.

    get_peft_model(model, with_sparse_layers(LoraConfig(target_modules=["q_proj", "v_proj"])))

    PEFT does not store this with an adapter: give ``config=with_sparse_layers(PeftConfig.from_pretrained(path))`` when
    one is loaded. Refused by name: merging, and initial values that change the weight (``"pissa"``), because the sum
    of a sparse weight and an adapter is dense; ``target_modules="all-linear"``, by which PEFT finds dense layers only.
    """
    from peft.tuners.lora import layer

    if config.target_modules == "all-linear":
        raise UsageError("target_modules: 'all-linear' would leave sparse layers out; name the layers: ['q_proj', ..]")
    initial = str(config.init_lora_weights).lower()
    if initial.startswith(CHANGE_THE_BASE):
        raise UsageError(
            f"init_lora_weights={config.init_lora_weights!r} takes the adapter's first product off the base weight, "
            "which would not be sparse any more: use True, 'gaussian', 'orthogonal' or 'eva'"
        )

    class SparseLora(layer.Linear):  # type: ignore[misc]
        """``peft.tuners.lora.Linear`` on a ``SparseLinear``."""

        def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
            return module.in_features, module.out_features

        def _get_base_layer_device_and_dtype(self, base_layer: SparseLinear) -> tuple[torch.device, torch.dtype]:
            return base_layer.device, base_layer.dtype

        def merge(self, *args: Any, **kwargs: Any) -> None:
            raise UsageError(
                "an adapter is not merged into a sparse weight, because their sum is dense: keep it beside the weight, "
                "or merge after model.dequantize()"
            )

    config._register_custom_module({SparseLinear: SparseLora})
    return config
