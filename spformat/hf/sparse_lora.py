"""The adapter of PEFT on a sparse layer. Only ``with_sparse_layers`` imports this module, because it needs peft.

The class is one of a module, so that pickle finds it again.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import layer

from ..errors import UsageError
from ..torch.fused import FusedLinear
from ..torch.module import SparseLinear


class SparseLora(layer.Linear):  # type: ignore[misc]
    """``peft.tuners.lora.Linear`` on a ``SparseLinear``, and on the dense layer that ``densify`` puts there."""

    def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
        if isinstance(module, FusedLinear):
            raise UsageError(
                "target_modules matches the fused weight of several layers, whose results only these layers give "
                "out, so that an adapter on it would change nothing: name the layers themselves (['q_proj', ..])"
            )
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: torch.nn.Module) -> Any:
        if isinstance(base_layer, SparseLinear):
            return base_layer.device, base_layer.dtype
        return super()._get_base_layer_device_and_dtype(base_layer)  # densified since

    def merge(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.get_base_layer(), SparseLinear):
            raise UsageError(
                "an adapter is not merged into a sparse weight, because their sum is dense: keep it beside the "
                "weight, or merge after model.dequantize() or spformat.torch.densify(model)"
            )
        super().merge(*args, **kwargs)
