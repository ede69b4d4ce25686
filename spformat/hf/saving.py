"""``save_pretrained`` of models with sparse layers: a folder in the layout of transformers."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import PreTrainedModel, remove_tied_weights_from_state_dict
from transformers.utils.hub import convert_file_size_to_int

from ..checkpoint.folder import make as make_folder
from ..checkpoint.layouts import CONFIG, METHOD, PACKED_INDEX, TRANSFORMERS, config_for
from ..checkpoint.packing import require_no_checkpoint, write_packed
from ..errors import OutputError, SpformatError, UsageError
from ..formats.base import Format
from ..storage.files import Path, path_text
from ..storage.filewriter import Tensor
from ..storage.output import publish
from ..torch import models
from ..torch.module import SparseLinear, WithoutWeights

USUAL = {
    "push_to_hub": False, "save_peft_format": True, "save_original_format": True, "safe_serialization": True,
    "distributed_checkpoint": False,
}  # fmt: skip
"""Options of transformers with the values that change nothing here."""
UNUSED = ("save_function",)
"""Options that transformers takes since earlier releases, and that it does not use."""
SHARD = 5 * 10**9
"""Bytes of a file, unless a single tensor has more."""
CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""dtypes of values that are cast to the dtype of the model, as transformers casts dense weights."""
REFUSED_CASTS = ("half", "float")
"""Methods that transformers refuses for models that it takes for quantized ones; ``to(dtype)`` it does not."""


def sparsify(model: Any, rules: str | Sequence[str], **options: Any) -> dict[str, SparseLinear]:
    """``spformat.torch.sparsify`` of a model of transformers, whose ``save_pretrained`` then writes a packed folder."""
    layers = models.sparsify(model, rules, **options)
    save_itself(model)
    return layers


def save_itself(model: Any) -> None:
    """Give a model ``save_pretrained``, ``dequantize`` and casts that know sparse layers, not those of its class.

    So do the models of transformers inside it, an encoder or a language model: a part is saved like the whole.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            models.untie(part)
            part.save_pretrained = Saving(save_pretrained, part)
            part.dequantize = functools.partial(dequantize, part)
            for name in REFUSED_CASTS:
                setattr(part, name, functools.partial(getattr(torch.nn.Module, name), part))


class Saving(models.Saving):
    """The ``save_pretrained`` of ``save_itself``."""

    def take_back(self, model: Any) -> None:
        """Let the model be one of transformers that is not quantized."""
        super().take_back(model)
        for name in ("dequantize", *REFUSED_CASTS):
            vars(model).pop(name, None)
        if _method(getattr(model, "hf_quantizer", None)) == METHOD:
            model.hf_quantizer.remove_quantization_config(model)
        _take_settings(model.config)


def _method(owner: Any) -> Any:
    """The method of the ``quantization_config`` of a config or a quantizer; None without one."""
    settings = getattr(owner, "quantization_config", None)
    return settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)


def _take_settings(config: Any) -> Any:
    """Take the ``quantization_config`` of spformat out of a config; None if it has none."""
    return vars(config).pop("quantization_config") if _method(config) == METHOD else None


def dequantize(model: Any, dtype: Any = None) -> Any:
    """Make all sparse layers dense; returns the same model.

    dtype: of the whole model. By default every tensor keeps its dtype, but for int8 and float8 weights, which no dense
    layer multiplies: they get the dtype of the model.
    """
    usual = model.dtype
    for layer in models.densify(model).values():
        if layer.weight.dtype not in CAST:
            layer.weight = torch.nn.Parameter(layer.weight.to(usual))
    return model if dtype is None else model.to(dtype)


def save_pretrained(
    model: Any,
    save_directory: Path,
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    *,
    max_shard_size: int | str | None = None,
    overwrite: bool = True,
    **options: Any,
) -> None:
    """Write a model with sparse layers into a folder that ``from_pretrained`` loads after ``import spformat.hf``.

    is_main_process: other processes write nothing. state_dict: what to write in place of ``model.state_dict()``, as
    FSDP gathers it; UsageError if it lacks tensors of the model. max_shard_size: bytes of a file, unless a single
    tensor has more; an int, or a text like "5GB", which is the default.
    overwrite: replace an earlier checkpoint in the folder, as transformers does. Other options of transformers
    (``push_to_hub``, ``variant``, ..) are refused: UsageError.

    With adapters on the model (``add_adapter``) only those are saved, by transformers, with all of its options. So is a
    model that has no sparse layer any more, as a dense one. A model below adapters, whose layers have other names, is
    refused: UsageError.
    """
    model = _unwrapped(model)
    if getattr(model, "_hf_peft_config_loaded", False):
        _by_transformers(model, save_directory, is_main_process, state_dict, max_shard_size, overwrite, options)
        return
    if not any(isinstance(m, SparseLinear) for m in model.modules()):
        settings = _take_settings(model.config)
        try:
            _by_transformers(model, save_directory, is_main_process, state_dict, max_shard_size, overwrite, options)
        finally:
            if settings is not None:  # the config may be that of a model around this one
                model.config.quantization_config = settings
        return
    given = [name for name, x in options.items() if name not in UNUSED and x not in (None, USUAL.get(name))]
    if given:
        raise UsageError(f"save_pretrained: expected no other option for sparse layers, got {', '.join(sorted(given))}")
    adapted = next((name for name, _ in model.named_modules() if name.endswith(".base_layer")), None)
    if adapted is not None:
        raise UsageError(
            f"{adapted.removesuffix('.base_layer')} has an adapter of PEFT: save adapters by save_pretrained of the "
            "model that they were added to, or take them off first, as unload() does"
        )
    try:
        shard = SHARD if max_shard_size is None else convert_file_size_to_int(max_shard_size)
        if shard < 1:
            raise ValueError(max_shard_size)
    except (ValueError, AttributeError) as e:
        raise UsageError(
            f"max_shard_size: expected bytes as an int or a text like '5GB', got {max_shard_size!r}"
        ) from e
    if not is_main_process:
        return
    folder = path_text(save_directory)
    make_folder(folder)
    if not overwrite:
        require_no_checkpoint(folder)  # before its config is written over
    tensors, others = tensors_of(model, state_dict), _files_beside(model)
    for name, data in others.items():
        publish(os.path.join(folder, name), data, overwrite=True)
    write_packed(folder, tensors, shard, overwrite, PACKED_INDEX)


def _files_beside(model: Any) -> dict[str, bytes]:
    """What transformers writes beside the weights: the configs, and the code of a class of its own.

    transformers writes them in place, and an error would leave half of them over those of an earlier model.
    """
    method = _method(model.config)
    if method not in (None, METHOD):
        raise UsageError(
            f"model.config.quantization_config: the model is quantized by {method!r}, too, and transformers takes one "
            "method: if its other weights are ordinary dense ones by now, del model.config.quantization_config"
        )
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # torch's fully_shard gives it that name
    with tempfile.TemporaryDirectory() as folder:
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if model._auto_class is not None:
            custom_object_save(model, folder, config=model.config)
        model.config.save_pretrained(folder)
        files = {}
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as f:
                files[name] = f.read()
    return files | {CONFIG: config_for(files[CONFIG], TRANSFORMERS)}


def _unwrapped(model: Any) -> Any:
    """The model that ``torch.compile`` compiles, whose layers have the names of a checkpoint; others as they are.

    UsageError for what is no model of transformers: loading would find no weight under the names that it has there.
    """
    own = getattr(model, "_orig_mod", model)
    if isinstance(own, PreTrainedModel):
        return own
    got = f"{type(own).__module__}.{type(own).__name__}"
    adapted = type(own).__module__.startswith("peft.")
    fix = "save adapters by its own save_pretrained" if adapted else "give the model inside, as wrapped.module"
    raise UsageError(f"model: expected a model of transformers, got {got}: {fix}")


def _by_transformers(
    model: Any, folder: Path, is_main_process: bool, state: Any, max_shard_size: int | str | None, overwrite: bool,
    options: Any,
) -> None:  # fmt: skip
    """Call the ``save_pretrained`` of the class of a model."""
    if not overwrite and os.path.isdir(folder) and os.listdir(folder):
        raise OutputError("the target holds files already; use overwrite=True", path=folder)
    if max_shard_size is not None:
        options["max_shard_size"] = max_shard_size
    type(model).save_pretrained(model, folder, is_main_process=is_main_process, state_dict=state, **options)


def tensors_of(model: Any, given: Mapping[str, torch.Tensor] | None = None) -> dict[str, Tensor]:
    """What a checkpoint of a model holds, under the names of its checkpoint: matrices, and tensors without gradients.

    given: a state dict of the whole model, which is read in place of its own. Tied weights occur once. UsageError for a
    sparse weight that transformers would divide or join while saving, and for a given state that lacks tensors.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear) and m.has_own_weight}
    buffers = {f"{name}.{c.attribute}" for name, layer in layers.items() for c in layer.description.components}
    ignored = {*buffers, *(model._keys_to_ignore_on_save or ())}
    everything = model.state_dict(destination=WithoutWeights())
    if given is not None:
        _require_all({name for name in everything if name not in ignored} | buffers, given, model)
        everything = given
    state = {name: t for name, t in everything.items() if name not in ignored}
    divided = next((name for name, t in state.items() if hasattr(t, "full_tensor")), None)  # a DTensor
    if divided is not None:
        raise UsageError(
            "this tensor is divided between processes: give state_dict=, as accelerator.get_state_dict(model) or "
            "torch's get_model_state_dict gather it on all of them", tensor=divided,
        )  # fmt: skip
    state = remove_tied_weights_from_state_dict(state, model)
    # Stand-ins for the sparse weights, so that transformers gives them their names in the checkpoint.
    stand_ins = {
        f"{name}.weight": torch.empty(layer.description.shape, device="meta") for name, layer in layers.items()
    }
    weight_of = {id(stand_ins[f"{name}.weight"]): (name, layer) for name, layer in layers.items()}
    named: Mapping[str, torch.Tensor] = revert_weight_conversion(model, state | stand_ins)
    tensors: dict[str, Tensor] = {}
    for name, t in named.items():
        if id(t) in weight_of:
            own_name, layer = weight_of[id(t)]
            tensors[name] = _matrix_of(layer, own_name, given)
        elif t.is_meta:
            raise UsageError(
                "a tensor on the meta device has no contents to save, or is joined of sparse ones", tensor=name
            )
        else:
            tensors[name] = t.detach().contiguous()
    return tensors


def _require_all(names: set[str], given: Mapping[str, torch.Tensor], model: Any) -> None:
    """UsageError if a state dict lacks tensors of these names, unless it has those that they are tied to."""
    tied = model.all_tied_weights_keys or {}
    lacking = sorted(name for name in names - given.keys() if tied.get(name, name) not in given)
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise UsageError(
            f"state_dict: expected the tensors of the whole model, under its names, but it lacks {lacking[0]}{more}: "
            "give that of the model inside wrappers, or leave state_dict out"
        )


def _matrix_of(layer: SparseLinear, name: str, given: Mapping[str, torch.Tensor] | None) -> Format:
    """The weight of a layer, or what a state dict has in its place, validated."""
    try:
        if given is None:
            return layer.matrix
        tensors = [given[f"{name}.{c.attribute}"].detach().contiguous() for c in layer.description.components]
        return layer.description.matrix(tensors).validate()
    except SpformatError as e:
        raise e.at(tensor=f"{name}.weight") from None
