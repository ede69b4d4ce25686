"""From dense tensors to matrices: the rules, patterns and pruning of a conversion of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..arrays.torch_tensors import array_to_torch, torch_to_array
from ..checkpoint.fastest import is_fastest, resolved
from ..checkpoint.recipe import AUTO, KEEP, Recipe, Rule, needs_counts
from ..checkpoint.tensor_plans import prune as pruned
from ..checkpoint.tensor_plans import prune_into
from ..errors import StructureError, UsageError
from ..formats import parse_spec
from ..formats.base import Format
from ..formats.convert import convert
from ..preprocess.structure import analyse

WITHOUT_SHAPE = "has no shape yet, as torch gives lazy layers theirs when they are called: call the model once before"
"""What an error says of a parameter of ``torch.nn.LazyLinear`` and others."""


def recipe(
    rules: str | Rule | Sequence[str | Rule] = (), to: str = KEEP, prune: bool = False, sparsity: float | None = None
) -> Recipe:
    """The recipe of a conversion, whose rules are texts "PATTERN=FORMAT" or ``Rule`` objects."""
    given: Any = rules
    one = isinstance(given, str | Rule) or not isinstance(given, Iterable)
    chosen: list[Any] = [given] if one else list(given)
    if not all(isinstance(rule, str | Rule) for rule in chosen):
        raise UsageError(f'rules: expected texts "PATTERN=FORMAT" or Rule objects, got {rules!r:.80}')
    parsed = tuple(Rule.parse(rule) if isinstance(rule, str) else rule for rule in chosen)
    return Recipe(to, parsed, prune="magnitude" if prune else "", sparsity=sparsity)


def converted(
    weight: torch.Tensor, target: str, *, prune: bool = False, sparsity: float | None = None, **params: Any
) -> Format:
    """A dense weight as a matrix in the format ``target`` (a text with params, or "auto"), where the weight is.

    Raises StructureError for a weight that the format cannot hold exactly, unless ``prune``.
    """
    if params:
        given = {k: "x".join(map(str, v)) if isinstance(v, tuple | list) else v for k, v in params.items()}
        target += (",", ":")[":" not in target] + ",".join(f"{k}={v}" for k, v in given.items())
    return convert_by(recipe(to=target, prune=prune, sparsity=sparsity), weight, target)


def convert_by(r: Recipe, weight: torch.Tensor, target: str) -> Format:
    """The matrix of a dense weight in a target of a recipe, pruned if the recipe asks for it."""
    x = torch_to_array(weight.detach())
    if r.prune and not needs_counts(target):
        return prune_into(x, target, r)
    x = pruned(x, target, r)
    if target == AUTO:
        target = analyse(x).smallest()
    elif is_fastest(target):
        target = resolved(target, x)
    fmt, given = parse_spec(target)
    try:
        return convert(x, fmt, **given)
    except StructureError as e:
        if e.fields.get("hint"):  # what prunes elsewhere
            e.message += "; in spformat.torch give prune=True"
        raise


def current_weight(layer: torch.nn.Module) -> torch.Tensor:
    """The weight of the next product of a linear layer. The bias is brought up to date, too.

    UsageError for a lazy layer that has no weight yet.
    """
    if is_lazy(layer._parameters.get("weight")):
        raise UsageError(f"this layer {WITHOUT_SHAPE}")
    for hook in layer._forward_pre_hooks.values():
        if computes_the_weight(hook):
            hook(layer, ())
    weight: torch.Tensor = layer.weight
    return weight


def computes_the_weight(hook: Any) -> bool:
    """Whether a hook writes ``weight`` or ``bias`` before a product, so that until then they may be those of before."""
    return isinstance(hook, BasePruningMethod | WeightNorm | SpectralNorm)


def cast(matrix: Format, dtype: torch.dtype) -> Format:
    """The matrix with its values rounded to another dtype; those that become zero are no longer stored."""
    parts = matrix.parts_by_name()
    if parts:
        below = matrix.fields_of_parts({name: cast(part, dtype) for name, part in parts.items()})
        return type(matrix)(**(matrix.fields() | below)).validate()
    dense = array_to_torch(matrix.to_dense()).to(dtype)
    return type(matrix).from_dense(torch_to_array(dense), **matrix.params())


def some_become_zero(before: Iterable[torch.Tensor], after: Iterable[torch.Tensor]) -> bool:
    """Whether values are zero after they were rounded, so that the pattern, which names them, has to be found anew."""
    pairs = zip(before, after, strict=True)
    return any(int((old != 0).sum()) != int((new != 0).sum()) for old, new in pairs)  # synchronize!
