"""LoRA of PEFT on sparse layers: the adapter is dense and trains, the sparse weight stays as it is."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError
from ..torch.module import SparseLinear


def with_sparse_layers(config: Any) -> Any:
    """A ``peft.LoraConfig`` that also takes ``SparseLinear`` layers; the same object.

    get_peft_model(model, with_sparse_layers(LoraConfig(target_modules=["q_proj", "v_proj"])))

    PEFT does not store this with an adapter: give ``config=with_sparse_layers(PeftConfig.from_pretrained(path))`` when
    one is loaded. Merging is refused by name, because the sum of a sparse weight and an adapter is dense.
    """
    from peft.tuners.lora import layer

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
