"""Which states ``load_state_dict`` may put into a sparse layer.

The arrays of a matrix belong together: a layer takes them if they can be a matrix of its kind, and else none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ArrayError
from .conversion import cast, some_become_zero
from .description import Description


def require_fit(description: Description, here: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> None:
    """Raise ArrayError for arrays that no matrix of this description has. Contents are not read.

    here: the tensors of the layer, by name; given: those of the state, some or all of them, in the same order.
    """
    path = {c.attribute: c.path for c in description.components}
    other = []
    for name, t in given.items():
        if not torch.overrides.is_tensor_like(t):
            raise ArrayError(f"{description.format}: {path[name]}: expected a tensor, got {type(t).__name__}")
        if t.shape != here[name].shape:
            other.append(name)
    lacking = [path[name] for name in here if name not in given]
    if other and lacking:
        shapes = ((path[n], list(here[n].shape), list(given[n].shape)) for n in other)
        misfits = "; ".join(f"{p}: expected shape {old}, that of the layer, got {new}" for p, old, new in shapes)
        raise ArrayError(f"{description.format}: {misfits}: give {', '.join(lacking)}, too")
    if other and all(is_plain(t) for t in given.values()):
        description.matrix([t.contiguous() for t in given.values()])


def rounded(
    description: Description, here: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All tensors of the matrix of a state, if some of its values are zero in the dtype of the layer; else none.

    Such values are no longer stored then, as after ``.to(dtype)``. Arrays that the state lacks are those of the layer.
    Raises the errors of the format for contents that are not valid.
    """
    tensors = [given.get(name, t) for name, t in here.items()]
    new, old = description.values_of(tensors), description.values_of(list(here.values()))
    dtype = old[0].dtype
    if all(t.dtype is dtype for t in new) or not all(map(is_plain, [*tensors, *old])):
        return {}
    with torch.inference_mode(False), torch.no_grad():
        if not some_become_zero(new, (t.to(dtype) for t in new)):
            return {}
        tensors = [t.detach().to(new[0].device).contiguous() for t in tensors]
        matrix = cast(description.matrix(tensors).validate(), dtype)
        return dict(zip(here, description.tensors(matrix), strict=True))


def is_plain(t: Any) -> bool:
    """Whether a tensor has memory that can be read, and is of no subclass."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta
