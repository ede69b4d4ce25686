"""Whole models: dense layers become sparse ones by rules, and sparse ones dense again."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..checkpoint.recipe import KEEP, Recipe, Rule, matcher, require_match
from ..errors import SpformatError, UsageError
from .conversion import computes_the_weight, convert_by, current_weight, recipe
from .module import SparseLinear
from .states import PLAIN_SAVING


def sparsify(
    model: torch.nn.Module, rules: str | Rule | Sequence[str | Rule] | Recipe, *, prune: bool = False,
    sparsity: float | None = None,
) -> dict[str, SparseLinear]:  # fmt: skip
    """Replace the ``torch.nn.Linear`` layers of a model whose weights match rules; returns name -> new layer.

    rules: as of ``spformat convert``: texts "PATTERN=FORMAT:params" over the names of the weights
    ("model.layers.0.mlp.up_proj.weight"), of which the last that matches decides; "re:.." is a regular expression. Or a
    whole ``Recipe``, with exclusions and a default.
    prune: zero the smallest values where a weight does not fit; sparsity: the share, where the format leaves it open.

    Weights are converted where they are. The model is changed only after all of them fit. Raises StructureError with
    the name of the first weight that does not fit, UsageError for a rule that matches no linear layer.
    """
    require_module(model)
    r = rules if isinstance(rules, Recipe) else recipe(rules, prune=prune, sparsity=sparsity)
    if isinstance(rules, Recipe) and (prune or sparsity is not None):
        raise UsageError("a Recipe has its own prune and sparsity: give them there")
    layers = dict(linear_layers(model))
    weights = [f"{name}.weight".lstrip(".") for name in layers]
    patterns = [("rule", rule.pattern) for rule in r.rules]
    patterns += [("include", p) for p in r.include] + [("exclude", p) for p in r.exclude]
    for flag, pattern in patterns:
        try:
            require_match(flag, pattern, weights)
        except UsageError as e:
            raise UsageError(f"{e.message}{_other_parameter(model, pattern)}") from None
    new: dict[tuple[int, str], SparseLinear] = {}
    names: dict[str, SparseLinear] = {}
    for (name, layer), weight in zip(layers.items(), weights, strict=True):
        lazy = is_lazy(layer._parameters.get("weight"))
        shape = (0, 0) if lazy else tuple(layer.weight.shape)
        target, _ = r.target_of(weight, shape, str(layer.weight.dtype).removeprefix("torch."))
        if target == KEEP:
            continue
        _require_no_adapter(model, name)
        key = id(layer), target
        if key not in new:
            try:
                matrix = convert_by(r, current_weight(layer), target)
            except SpformatError as e:
                raise e.at(tensor=weight) from None
            new[key] = SparseLinear(matrix, layer.bias)
        names[name] = new[key]
    for name, sparse in names.items():
        replace(model, name, sparse)
    if names:
        refuse_plain_saving(model)
    return names


def densify(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Replace every ``SparseLinear`` of a model by a ``torch.nn.Linear`` with its weight; returns name -> new layer.

    A weight has as many bytes as a dense one, of course. Biases are shared. Weights get a gradient where they have a
    floating dtype. A model of transformers is saved by its own ``save_pretrained`` again.

    Raises UsageError for a model that is itself a ``SparseLinear``.
    """
    require_module(model)
    if isinstance(model, SparseLinear):
        raise UsageError(
            "the model itself is a SparseLinear: give the module that has it, or take layer.weight, the dense weight"
        )
    new: dict[int, torch.nn.Linear] = {}
    names: dict[str, torch.nn.Linear] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, SparseLinear) or not layer.has_own_weight:
            continue
        if id(layer) not in new:
            dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            dense.weight = torch.nn.Parameter(layer.weight, requires_grad=layer.weight.is_floating_point())
            bias = layer.bias
            if bias is not None and not isinstance(bias, torch.nn.Parameter):  # some rows of that of a fused layer
                bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
            dense.bias = bias
            new[id(layer)] = dense
        names[name] = new[id(layer)]
        replace(model, name, new[id(layer)])
    for module in list(model.modules()):
        for child, layer in list(module._modules.items()):
            if isinstance(layer, SparseLinear) and not layer.has_own_weight:
                del module._modules[child]  # all of its projections have been replaced
        saving = vars(module).get("save_pretrained")
        if isinstance(saving, Saving):
            saving.take_back(module)
    return names


def _require_no_adapter(model: torch.nn.Module, name: str) -> None:
    """UsageError for a layer below an adapter of PEFT, which merges by adding to ``weight``: that would be lost."""
    holder, _, leaf = name.rpartition(".")
    if leaf == "base_layer" and type(model.get_submodule(holder)).__module__.startswith("peft."):
        raise UsageError(
            "this layer has an adapter of PEFT, which would not know that the weight is sparse: sparsify the model "
            "first, and then add or load the adapter by spformat.hf.with_sparse_layers", tensor=f"{name}.weight",
        )  # fmt: skip


def require_module(model: Any) -> None:
    """UsageError for a model that is none, such as a state dict or a path."""
    if not isinstance(model, torch.nn.Module):
        got = f"{type(model).__module__}.{type(model).__name__}"
        raise UsageError(f"model: expected a torch.nn.Module, got {got}")


def linear_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """(name, layer) of every layer that ``is_linear``, under every name that it has."""
    return ((name, m) for name, m in model.named_modules(remove_duplicate=False) if is_linear(m))


def _other_parameter(model: torch.nn.Module, pattern: str) -> str:
    """What an error adds where a pattern matches no weight of a linear layer, but a parameter of another layer."""
    matches = matcher(pattern).search
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        if isinstance(module, SparseLinear) and matches(f"{dot}weight"):
            return f"; {dot}weight is sparse already"
        other = next((leaf for leaf in module._parameters if matches(dot + leaf)), None)
        if other is not None:
            return (
                f"; {dot}{other} is a parameter of {type(module).__name__}, and only weights of torch.nn.Linear "
                "layers, with the forward of that class, become sparse"
            )
    return ""


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module only multiplies by its weight and adds its bias.

    False for classes and objects with a ``forward`` or a ``__call__`` of their own, and for layers whose weight other
    modules read, such as the output projection of ``torch.nn.MultiheadAttention``.
    """
    cls = type(module)
    if not isinstance(module, torch.nn.Linear) or cls.forward is not torch.nn.Linear.forward:
        return False
    if cls.__call__ is not torch.nn.Linear.__call__:
        return False
    return "forward" not in vars(module) and not isinstance(
        module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear
    )


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def replace(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    """Put a layer in the place of the one of that name, in its mode (training or not) and with its hooks."""
    parent, _, leaf = name.rpartition(".")
    if not leaf:
        raise UsageError("the model itself is a linear layer: use SparseLinear.from_linear(model, format)")
    holder = model.get_submodule(parent)
    old = getattr(holder, leaf)
    if old is not layer:
        layer.training = old.training
        vars(layer).update({kind: vars(old)[kind] for kind in _HOOKS})  # the same objects, so that handles remove them
        if any(map(computes_the_weight, old._forward_pre_hooks.values())):
            kept = {k: hook for k, hook in old._forward_pre_hooks.items() if not computes_the_weight(hook)}
            layer._forward_pre_hooks = OrderedDict(kept)
    setattr(holder, leaf, layer)


class Saving(functools.partial[None]):
    """A ``save_pretrained`` that a model of transformers has in place of that of its class, until ``densify``."""

    def take_back(self, model: torch.nn.Module) -> None:
        """Let the model have that of its class again."""
        del model.save_pretrained


def refuse_plain_saving(model: torch.nn.Module) -> None:
    """Let ``save_pretrained`` of models of transformers raise an error, until ``spformat.hf`` or ``densify`` change it.

    What it writes would load without an error, with random numbers in the place of the sparse weights.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    for module in model.modules():
        if isinstance(module, modeling.PreTrainedModel):
            untie(module)
            module.save_pretrained = Saving(_refused)


def untie(model: Any) -> None:
    """Take sparse weights out of the weights that transformers ties: a sparse head is not the embedding any more.

    ``tie_weights``, which ``resize_token_embeddings`` calls, reads the pairs of the class and the config again. So the
    pairs that are left become those of this object, and the config says that nothing is tied where none is left.
    """
    tied = getattr(model, "all_tied_weights_keys", None)
    if not isinstance(tied, dict):  # of a transformers that does not load packed folders
        return
    sparse = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    targets = [t for t, source in tied.items() if t in sparse or source in sparse]
    for target in targets:
        del tied[target]
    if targets and tied:
        model._tied_weights_keys = dict(tied)
    elif targets:
        model.config.tie_word_embeddings = False


def _refused(*_: Any, **__: Any) -> None:
    raise UsageError(PLAIN_SAVING)
