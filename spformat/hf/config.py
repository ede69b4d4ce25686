"""The ``quantization_config`` of a model with sparse weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.quantizers import auto
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.layouts import METHOD
from ..checkpoint.recipe import KEEP, Rule
from ..errors import UsageError
from ..torch.conversion import recipe


@register_quantization_config(METHOD)
class SpformatConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a dense model becomes sparse while ``from_pretrained`` loads it; without rules, of a folder that is packed.

    from_pretrained("./dense", quantization_config=SpformatConfig("re:.*proj.*=two-four", prune=True))

    The formats of a packed folder are in its files, so its config says no more than the method, and rules for it are
    refused: UsageError.
    """

    def __init__(
        self,
        rules: str | Rule | Sequence[str | Rule] = (),
        prune: bool = False,
        sparsity: float | None = None,
        **unknown: Any,
    ) -> None:
        """rules, prune, sparsity: as of ``spformat.torch.sparsify``. UsageError for other settings."""
        unknown.pop("quant_method", None)
        if unknown:
            raise UsageError(f"quantization_config of spformat: expected rules, prune, sparsity, got {sorted(unknown)}")
        self.quant_method = METHOD
        self.rules: list[str] = []
        if rules != ():
            self.rules = [f"{rule.pattern}={rule.target}" for rule in recipe(rules, KEEP, prune, sparsity).rules]
        self.prune = prune
        self.sparsity = sparsity

    def to_dict(self) -> dict[str, Any]:
        """The settings that are not those of a packed folder, by which ``from_dict`` creates an equal config."""
        return {"quant_method": METHOD} | self._given()

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = {"rules": list(self.rules)} if self.rules else {}
        given |= {"prune": True} if self.prune else {}
        return given if self.sparsity is None else given | {"sparsity": self.sparsity}

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, as of the dict that config.json has: transformers reads that of ``model.config`` so."""
        return self.to_dict().get(name, default)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What transformers asks of a config that ``from_pretrained`` is given for a folder that has one: nothing."""
        given = self._given()
        if given:
            raise UsageError(
                "quantization_config: the folder is packed already, in the formats that its files have, so that "
                f"{', '.join(given)} would be ignored: leave quantization_config out, or convert the folder "
                "(spformat convert --to dense) and load that one with rules"
            )
        return {}


# Releases without this list only warn that the config of the folder is used.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*getattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", ()), SpformatConfig)
