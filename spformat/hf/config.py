"""The ``quantization_config`` of a model with sparse weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.layouts import METHOD
from ..errors import UsageError


@register_quantization_config(METHOD)
class SpformatConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a dense model becomes sparse while ``from_pretrained`` loads it; without rules, of a folder that is packed.

    from_pretrained("./dense", quantization_config=SpformatConfig("re:.*proj.*=two-four", prune=True))

    The formats of a packed folder are in its files, so its config says no more than the method.
    """

    def __init__(
        self, rules: str | Sequence[str] = (), prune: bool = False, sparsity: float | None = None, **unknown: Any
    ) -> None:
        """rules, prune, sparsity: as of ``spformat.torch.sparsify``. UsageError for other settings."""
        unknown.pop("quant_method", None)
        if unknown:
            raise UsageError(f"quantization_config of spformat: expected rules, prune, sparsity, got {sorted(unknown)}")
        self.quant_method = METHOD
        self.rules = [rules] if isinstance(rules, str) else list(rules)
        self.prune = prune
        self.sparsity = sparsity

    def to_dict(self) -> dict[str, Any]:
        """The settings for config.json: those of a packed folder, because that is what gets saved."""
        return {"quant_method": METHOD}
