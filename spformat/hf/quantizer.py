"""The quantizer that transformers calls while ``from_pretrained`` loads a model.

transformers creates the model without weights and asks the quantizer to put its own layers in; then it loads the
tensors that it knows by name; at the end the quantizer may finish. So the sparse layers are created from the headers of
the files, and their contents are read at the end by spformat's own reader, which checks and validates them, straight to
the device where transformers has put each layer.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from ..checkpoint.layouts import CONFIG, GUARD, METHOD, PACKED_INDEX
from ..errors import SpformatError, UsageError
from ..formats.base import Format
from ..formats.dense import Dense
from ..formats.stack import Stack
from ..storage.container import safe_open
from ..storage.descriptor import Record
from ..torch.loading import is_sparse
from ..torch.models import is_linear, replace, untie
from ..torch.module import SparseLinear
from .config import SpformatConfig
from .saving import CAST, dequantize, save_itself, sparsify

log = logging.get_logger(__name__)


@register_quantizer(METHOD)
class SpformatQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads packed folders, and makes dense ones sparse on the way if the config has rules."""

    quantization_config: SpformatConfig
    requires_calibration = False

    def __init__(self, quantization_config: SpformatConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._to_fill: dict[str, list[tuple[str, str]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._sized: list[Unfilled] = []
        self._dense_names: DenseNames | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """UsageError for a device map with "disk", which layers of spformat cannot be loaded to.

        transformers also calls it with the map that it computed for "auto", after it has read the sizes of all layers.
        """
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise UsageError("device_map: sparse layers are not offloaded to disk; leave 'disk' out")
        if not self.pre_quantized and not self.quantization_config.rules:
            raise UsageError(
                "quantization_config: the model is dense, so rules must say what becomes sparse, as in "
                "SpformatConfig('re:.*proj.*=two-four')"
            )
        if isinstance(device_map, dict):
            self._forget_sizes()

    # ---------------------------------------------------------------- where the files are

    def _with_index(self, config: Any) -> Any:
        named = getattr(config, "transformers_weights", None)
        # transformers leaves the name out when it saves a config alone.
        if self.pre_quantized and (named == GUARD or (named is None and _may_have_index(config.name_or_path))):
            config.transformers_weights = PACKED_INDEX
        return config

    def update_attn_implementation(self, config: Any) -> Any:
        """Called with the config before transformers looks for files (since 5.18): says which index to read."""
        return self._with_index(config)

    def update_tp_plan(self, config: Any) -> Any:
        """The same in earlier releases."""
        return self._with_index(config)

    # ---------------------------------------------------------------- before and after the weights

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        if not self.pre_quantized:
            return model
        self._to_fill, entries, buffers = {}, set(), set()
        names = Names(model)
        unused, dense = [], []
        entries_of_dense: dict[str, str] = {}
        for file in checkpoint_files or ():
            with safe_open(file) as f:
                every = {name: f.info(name) for name in f}
                records = {name: record for name, record in every.items() if is_sparse(record)}
                dense += [name for name in every if name not in records]
                entries_of_dense |= {r.entry("data"): name for name, r in every.items() if r.format is Dense}
                stack = next((name for name in f if f.info(name).format is Stack), None)
            if stack is not None:
                message = "transformers cannot load a stack of sparse matrices; convert again with --exclude for it"
                raise UsageError(message, path=file, tensor=stack)
            for name, record in records.items():
                entries |= {record.entry(array).removeprefix(name) for array in record.arrays}
                layer_name = names.layer_of(name, record, file)
                if layer_name is None:
                    unused.append(name)
                    continue
                old = model.get_submodule(layer_name)
                layer = Unfilled.from_record(record, old.bias)
                layer._is_hf_initialized = True  # transformers must not draw random numbers for it
                replace(model, layer_name, layer)
                self._dtypes[layer_name] = dtype_of(f"{layer_name}.weight", old.weight.dtype, model)
                self._sized.append(layer)
                self._to_fill.setdefault(file, []).append((name, layer_name))
                buffers |= {c.attribute for c in layer.description.components}
        self._dense_names = DenseNames(entries_of_dense) if entries_of_dense else None
        if not (self._to_fill or unused or entries_of_dense):
            message = "no tensor of the checkpoint is sparse: take quantization_config out of its config.json"
            raise UsageError(message, path=_first(checkpoint_files))
        if not self._to_fill:
            names.require_half(dense, _first(checkpoint_files))
        filled = {f"{layer_name}.weight" for pairs in self._to_fill.values() for _, layer_name in pairs}
        for target, source in model.all_tied_weights_keys.items():
            if source in filled and target not in filled:
                raise UsageError(
                    f"this weight is tied to {target}, so it must be dense: convert with --exclude",
                    path=_first(checkpoint_files), tensor=source,
                )  # fmt: skip
        untie(model)
        if unused:
            log.warning(f"{len(unused)} sparse tensors have no place in the model and are not loaded, as {unused[0]}")
        # What transformers would report: buffers that it does not find, and entries that it does not know.
        if buffers:
            model._keys_to_ignore_on_load_missing |= {rf"\.({_alternatives(buffers)})$"}
        if entries:
            model._keys_to_ignore_on_load_unexpected |= {rf"({_alternatives(entries)})$"}
        if not isinstance(kwargs.get("device_map"), str):  # of "auto" and the like the map is computed later
            self._forget_sizes()
        return model

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """What transformers does with the names in the files: matrices in the format dense come first."""
        others = super().update_weight_conversions(weight_conversions, model)
        return [*self.get_weight_conversions(), *(c for c in others if not isinstance(c, DenseNames))]

    def get_weight_conversions(self) -> list[Any]:
        """The same in releases that only add these."""
        return [] if self._dense_names is None else [self._dense_names]

    def _forget_sizes(self) -> None:
        """transformers allocates what it does not load, and torch would keep that memory when ours replaces it."""
        for layer in self._sized:
            layer.forget_sizes()
        self._sized = []

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            c = self.quantization_config
            sparsify(model, c.rules, prune=c.prune, sparsity=c.sparsity)
            return model
        if self._dense_names is not None:
            self._dense_names.require_all()
            self._dense_names = None
        if not self._to_fill:  # the sparse weights are those of other layers, such as a head
            self.remove_quantization_config(model)
            return model
        devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
        if len(devices) > 1 and "cpu" in devices:
            raise UsageError("device_map: sparse layers are not offloaded to the host; choose GPUs only, or 'cpu'")
        for file, pairs in self._to_fill.items():
            places = [(name, layer_name, model.get_submodule(layer_name)) for name, layer_name in pairs]
            with safe_open(file) as f:
                for device, group in itertools.groupby(places, key=lambda place: str(place[2].device)):
                    here = list(group)
                    for (name, layer_name, layer), matrix in zip(
                        here, f.read_all([name for name, _, _ in here], device), strict=True
                    ):
                        layer.fill(matrix)
                        dtype = self._dtypes[layer_name]
                        if dtype is not layer.dtype and layer.dtype in CAST:
                            try:
                                layer.to(dtype)
                            except SpformatError as e:  # a dtype that the format cannot have
                                raise e.at(path=file, tensor=name) from None
        self._to_fill, self._dtypes = {}, {}
        save_itself(model)
        return model

    def dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Make all layers dense: ``saving.dequantize``."""
        return dequantize(model, dtype)

    # ---------------------------------------------------------------- what transformers asks

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether ``save_pretrained`` works: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether gradients flow through the layers, to adapters and earlier layers: yes."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` takes the layers: yes."""
        return True


class DenseNames(WeightRenaming):  # type: ignore[misc]
    """Gives matrices in the format dense, whose only array is the matrix, the names of plain tensors.

    ``--to auto`` chooses this format where no sparse one is smaller. transformers reads such an array as a tensor then.
    """

    __slots__ = ("names", "seen")

    def __init__(self, names: dict[str, str]) -> None:
        """names: of the array in the file -> of the tensor."""
        super().__init__("spformat", "spformat")  # the patterns are not used
        self.names, self.seen = names, set[str]()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """(name, pattern): as of transformers."""
        if source_key in self.names:
            self.seen.add(source_key)
        return self.names.get(source_key, source_key), None

    def was_used(self) -> bool:
        """False: saving does not undo it."""
        return False

    def require_all(self) -> None:
        """UsageError if transformers did not ask for the name of each, and so left weights to random numbers."""
        lacking = sorted(self.names.keys() - self.seen)
        if lacking:
            raise UsageError(
                "this release of transformers does not load matrices in the format dense: install a newer one, or "
                "convert with --rule NAME=keep for them", tensor=self.names[lacking[0]],
            )  # fmt: skip


class Unfilled(SparseLinear):
    """A layer while transformers loads: its buffers say where it is, and have sizes until the layer's device is chosen.

    Other modules may draw random numbers for its weight, which are not used, or look at its dtype.
    """

    @property  # type: ignore[misc]  # read only until it is filled
    def weight(self) -> torch.Tensor:
        """The weight on the meta device, as nothing is known of it yet."""
        return torch.empty(self.description.shape, dtype=self.dtype, device="meta")

    def forget_sizes(self) -> None:
        """Let the buffers that are on the meta device have no elements from now on."""
        for name, t in zip(self._names, self._tensors(), strict=True):
            if t.is_meta:
                self._buffers[name] = torch.empty(0, dtype=t.dtype, device="meta")

    def fill(self, matrix: Format) -> None:
        """Become an ordinary layer with these contents."""
        super().fill(matrix)
        self.__class__ = SparseLinear  # hooks of accelerate know this object


class Names:
    """The linear layers of a model by the names that their weights have in a checkpoint."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._tensors = model.state_dict()
        conversions = get_model_conversion_mapping(model, None, None)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]

    def _renamed(self, name: str) -> tuple[str, Any]:
        """The name in the model of a tensor of a checkpoint; and a pattern, if it is joined with others or divided."""
        prefix = self.model.base_model_prefix
        renamed, merged = rename_source_key(name, self._renamings, self._converters, prefix, self._tensors)
        if renamed not in self._tensors and name in self._tensors:
            return name, None
        return renamed, merged

    def require_half(self, dense: Sequence[str], path: str) -> None:
        """UsageError if dense tensors of these names alone leave most of the model to random numbers."""
        there = {self._renamed(name)[0] for name in dense} & self._tensors.keys()
        if 2 * len(there) < len(self._tensors):
            raise UsageError(
                f"no sparse tensor of the checkpoint is a weight of this model, and its dense ones are {len(there)} of "
                f"the {len(self._tensors)} tensors of the model: load it with the class and config of its own",
                path=path,
            )  # fmt: skip

    def layer_of(self, name: str, record: Record, path: str) -> str | None:
        """The layer that a sparse tensor is the weight of; None if the model has no tensor of that name.

        UsageError for a tensor that is not the weight of a linear layer, or that has another shape.
        """
        renamed, merged = self._renamed(name)
        if merged is not None:
            raise UsageError(
                "transformers joins or divides this tensor while loading, so it must be dense: convert with --exclude",
                path=path, tensor=name,
            )  # fmt: skip
        if renamed not in self._tensors:
            return None
        layer_name = renamed.removesuffix(".weight")
        layer = self.model.get_submodule(layer_name) if layer_name != renamed else None
        if layer is None or not is_linear(layer):
            raise UsageError(
                "this tensor is the weight of no linear layer, so it must be dense: convert with --exclude",
                path=path, tensor=name,
            )  # fmt: skip
        if tuple(layer.weight.shape) != record.shape:
            expected, got = list(layer.weight.shape), list(record.shape)
            raise UsageError(
                f"expected shape {expected}, as the config says, got {got}: give the sizes of the checkpoint, or "
                "convert with --exclude, so that transformers may draw this tensor anew (ignore_mismatched_sizes=True)",
                path=path, tensor=name,
            )  # fmt: skip
        return str(layer_name)


def dtype_of(name: str, dtype: torch.dtype, model: Any) -> torch.dtype:
    """The dtype that transformers loads a weight in, of a model created in ``dtype``: some stay in float32."""
    kept = model._get_dtype_plan(dtype)
    return next((kept[p] for p in kept if re.search(p.replace("*", ".*"), name)), dtype)


def _may_have_index(folder: str) -> bool:
    """False for a folder of a model without the index; models of the hub and subfolders are not looked at."""
    return not os.path.isfile(os.path.join(folder, CONFIG)) or os.path.isfile(os.path.join(folder, PACKED_INDEX))


def _alternatives(names: set[str]) -> str:
    return "|".join(sorted(map(re.escape, names)))


def _first(files: Sequence[str] | None) -> str:
    return files[0] if files else ""
